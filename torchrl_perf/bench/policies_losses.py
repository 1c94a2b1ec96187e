"""Loss and gradient of C51, as TorchRL, a plain loop and this package compute them, and whole updates of IQN."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import DistributionalDQNLoss, SoftUpdate

from torchrl_perf.bench.policies_agents import CHOICES, OBS, categorical_peer
from torchrl_perf.modules import CategoricalMLP
from torchrl_perf.objectives import DeviceC51Loss
from torchrl_perf.runtime import Stopwatch, capture, compiled, synchronize
from torchrl_perf.trainers import IQNConfig, IQNTrainer

GAMMA = 0.99
UPDATES = 16
"""IQN's updates in one call."""

LossCall = Callable[[], tuple[Tensor, ...]]


def transitions(batch: int, device: torch.device) -> TensorDict:
    """``[B]`` transitions, a tenth of them terminal, half of the returns beyond the ends of the support."""
    terminated = torch.rand(batch, 1, device=device) < 0.1
    following = {
        "observation": torch.randn(batch, OBS, device=device),
        "reward": 5 * torch.randn(batch, 1, device=device),
        "terminated": terminated,
        "done": terminated.clone(),
    }
    root = {
        "observation": torch.randn(batch, OBS, device=device),
        "action": torch.randint(0, CHOICES, (batch,), device=device),
    }
    return TensorDict({**root, "next": following}, [batch], device=device)


class LoopC51Loss(nn.Module):
    """The loss as many scripts have it: networks on the device, projection on the host, row by row, atom by atom.

    Args:
        network: the online network; the target network is its copy.
    """

    def __init__(self, network: CategoricalMLP) -> None:
        super().__init__()
        self.network, self.target_network = network, copy.deepcopy(network).requires_grad_(False)

    def forward(self, td: Any) -> Tensor:
        """The mean cross-entropy of a batch ``[B]``, 0-d."""
        rows, support = torch.arange(len(td), device=td.device), self.network.support
        with torch.no_grad():
            observation = td["next", "observation"]
            action = self.network(observation).argmax(-1)
            following = self.target_network.log_probs(observation)[rows, action].exp()
            reward, discount = td["next", "reward"].squeeze(-1), GAMMA * ~td["next", "terminated"].squeeze(-1)
            projected = _project(following.tolist(), reward.tolist(), discount.tolist(), support.tolist())
            targets = torch.tensor(projected, device=td.device)
        log_probs = self.network.log_probs(td["observation"])[rows, td["action"]]
        return -(targets * log_probs).sum(-1).mean()


def _project(probs: list[Any], rewards: list[float], discounts: list[float], support: list[float]) -> list[list[float]]:
    low, high = support[0], support[-1]
    gap = (high - low) / (len(support) - 1)
    projected = [[0.0] * len(support) for _ in probs]
    for row, target in enumerate(projected):
        for atom, value in enumerate(support):
            place = (min(max(rewards[row] + discounts[row] * value, low), high) - low) / gap
            left = min(int(place), len(support) - 2)
            target[left] += probs[row][atom] * (left + 1 - place)
            target[left + 1] += probs[row][atom] * (place - left)
    return projected


class C51Losses:
    """One network and one batch, and a call for each way to compute loss and gradients.

    Args:
        batch: B.
        device: where the networks are.

    Attributes:
        calls: by variant, calls that return the loss 0-d and the gradients of the parameters, in one order for all.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.network = CategoricalMLP(OBS, CHOICES, device=device)
        self.td = transitions(batch, device)
        self.ours = DeviceC51Loss(self.network, gamma=GAMMA)
        peer = categorical_peer(copy.deepcopy(self.network))
        theirs = DistributionalDQNLoss(peer, gamma=GAMMA, delay_value=True)
        SoftUpdate(theirs, eps=0.5)  # the loss warns without one
        own = dict(self.network.named_parameters())
        place = ("module", "0", "module", "0", "module", "network")
        params = [theirs.value_network_params[(*place, *name.split("."))] for name in own]
        self.calls: dict[str, LossCall] = {
            "loop": self._call(LoopC51Loss(self.network), list(own.values())),
            "torchrl": self._call(lambda td: theirs(td)["loss"], params),
            "eager": self._call(self._loss, list(own.values())),
        }

    def prepare(self, variant: str) -> None:
        """Makes "compiled", "graph" or "compiled + graph"; the others are there."""
        if variant == "compiled":
            self.calls[variant] = self._call(compiled(self._loss), list(self.network.parameters()))
        elif variant not in self.calls:
            inner = self.calls["eager" if variant == "graph" else "compiled"]
            self.calls[variant] = capture(inner, device=self.device, audit=False, warmup=3)

    def off_by(self, variant: str) -> float:
        """Largest difference of loss and gradients from TorchRL's, each relative to its greatest number."""
        if variant == "torchrl":
            return 0.0
        reference = [value.clone() for value in self.calls["torchrl"]()]
        call = self.calls[variant]
        for _ in range(5):  # a captured one is to be a replay
            values = call()
        differences = zip(values, reference, strict=True)
        return max(float((value - other).abs().max() / other.abs().max()) for value, other in differences)

    def _loss(self, td: TensorDictBase) -> Tensor:
        return self.ours.losses(td)[0]

    def _call(self, loss_of: Callable[[TensorDictBase], Tensor], parameters: list[Any]) -> LossCall:
        def call() -> tuple[Tensor, ...]:
            loss = loss_of(self.td)
            return (loss.detach(), *torch.autograd.grad(loss, parameters))

        return call


def iqn_updates(variant: str, device: torch.device) -> tuple[Callable[[], None], Callable[[], None], float]:
    """Full updates of IQN at batch 256 with 8 x 32 quantiles: sample, loss, gradients, Adam, target network.

    Args:
        variant: "eager", "compiled" or "compiled + graph".
        device: where.

    Returns:
        A call of :data:`UPDATES` updates, the call that ends it, and the seconds until it was ready.
    """
    start = Stopwatch("cpu").start()
    config = IQNConfig.without_task(
        num_envs=256,
        num_steps=4,
        learning_starts=8_192,
        updates_per_iteration=UPDATES,
        capacity=100_096,
        minibatch_size=256,
        num_taus=8,
        num_target_taus=32,
        mode="eager" if variant == "eager" else "compile",
        device=str(device),
        logger="none",
        total_steps=10**9,
    )
    trainer = IQNTrainer(config)
    for _ in range(config.fill_iterations):
        trainer.step()
    learn: Callable[[], None] = trainer.learn
    call = capture(learn, device=device, audit=False, warmup=3) if variant == "compiled + graph" else learn
    for _ in range(4):
        call()
    synchronize(device)
    start.stop()
    return call, trainer.close, start.seconds
