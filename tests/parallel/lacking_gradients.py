"""Ranks of which parameters lack a gradient: on all of them or on some, always or in some updates, eagerly and not."""

from typing import Any

import torch
from rank_checks import joint_numbers, part
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from torchrl_perf.modules import EpsilonGreedy
from torchrl_perf.parallel import RankStoppedError, SharedGradients, join, leave
from torchrl_perf.runtime import capture
from torchrl_perf.trainers import DQNConfig, DQNTrainer, GuardedAdam, PPOConfig, PPOTrainer

DECAY = 0.1
NAMES = ("always", "never", "frozen", "of_last_rank", "odd")
KINDS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=DECAY),
    "GuardedAdam": lambda params: GuardedAdam(params, lr=1e-2, weight_decay=DECAY, decoupled_weight_decay=True),
}
UPDATES = 6


def made() -> nn.ParameterDict:
    """Parameters, the same on all ranks."""
    params = nn.ParameterDict({name: nn.Parameter(joint_numbers(5, seed=number)) for number, name in enumerate(NAMES)})
    params["frozen"].requires_grad_(False)
    return params


def loss_of(params: nn.ParameterDict, rows: Tensor, number: int, is_last: bool) -> Tensor:
    """The loss of a rank's rows in an update."""
    names = ["always", "frozen"] + ["of_last_rank"] * is_last + ["odd"] * (number % 2)
    return sum(((rows @ params[name]).tanh() - number).square().mean() for name in names)  # pyright: ignore


def own_loop() -> dict[str, Any]:
    """Parameters after updates of a loop of one's own, and those of its even updates when they are captured."""
    ranks, found = join("cpu"), {}
    rows, is_last = part(ranks, joint_numbers(12, 5, seed=9)), ranks.rank == ranks.size - 1
    for name, kind in KINDS.items():
        for weighted in (False, True):
            params = made()
            shared, optimizer = SharedGradients(params.values()), kind(params.values())
            weight = torch.tensor(float(len(rows))) if weighted else None
            for number in range(UPDATES):
                optimizer.zero_grad()
                loss_of(params, rows, number, is_last).backward()
                shared.mean_(weight=weight)
                optimizer.step()
            found[f"{name}-{weighted}"] = {key: value.detach() for key, value in params.items()}
    params = made()
    shared, optimizer = SharedGradients(params.values()), KINDS["GuardedAdam"](params.values())

    def update() -> None:
        optimizer.zero_grad()
        loss_of(params, rows, 0, is_last).backward()
        shared.mean_()
        optimizer.step()

    captured = capture(update, device="cpu")  # its first call refuses host waits
    for _ in range(4):
        captured()
    found["captured"] = {key: value.detach() for key, value in params.items()}
    leave()
    return found


class Spare(nn.Module):
    """A network with a parameter that no output depends on, and one that is frozen."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, size))
        self.spare, self.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(size), requires_grad=False)

    def forward(self, observation: Tensor) -> Tensor:
        """Outputs."""
        return self.net(observation) * self.frozen


def trainers() -> dict[str, Any]:
    """What trainers with a weight decay leave of such parameters; also alone."""
    join("cpu")
    usual: dict[str, Any] = {"num_envs": 12, "num_steps": 4, "device": "cpu", "mode": "eager", "weight_decay": DECAY}
    config = PPOConfig(**usual, epochs=1, minibatches=2, hidden_size=16)
    critic = TensorDictModule(Spare(1), in_keys=["observation"], out_keys=["state_value"])
    ppo = PPOTrainer(config, critic=critic)
    spec = ppo.env.action_spec
    config = DQNConfig(**usual, capacity=480, minibatch_size=24, learning_starts=48)
    dqn = DQNTrainer(config, policy=EpsilonGreedy(Spare(2), spec=spec))
    found = {}
    for name, trainer, module in (("ppo", ppo, critic.module), ("dqn", dqn, dqn.algorithm.q_network)):
        before = module.net[0].weight.detach().clone()
        for _ in range(4):
            trainer.step()
            trainer.iterations_done += 1
        found[name] = {
            "spare": module.spare.detach().clone(),
            "frozen": module.frozen.detach().clone(),
            "moved": not torch.equal(before, module.net[0].weight),
        }
        trainer.close()
    leave()
    return found


def other_networks() -> str:
    """Ranks whose networks differ: the message, and none of the collectives that would wait without end."""
    ranks = join("cpu")
    told = []
    for params in (
        [nn.Parameter(torch.ones(3 + ranks.rank))],
        [nn.Parameter(torch.ones(3, dtype=torch.float64 if ranks.rank else torch.float32))],
        [nn.Parameter(torch.ones(3)) for _ in range(1 if ranks.rank else 2)],
    ):
        try:
            SharedGradients(params)
        except (ValueError, RankStoppedError) as error:
            told.append(f"{type(error).__name__}: {error}")
    leave()
    return "\n".join(told)
