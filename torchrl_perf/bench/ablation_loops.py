"""The loops that the ablation switches on and off: PPO, DQN, SAC, a small convolutional net, one matrix product."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_perf.runtime import Acceleration, capture
from torchrl_perf.trainers import DQNConfig, DQNTrainer, GuardedAdam, PPOConfig, PPOTrainer, SACConfig, SACTrainer
from torchrl_perf.trainers.optim.group_adam import GroupAdam

SWITCHES = ("tf32", "bf16", "compile", "graph", "fused", "channels-last")
OPTIMIZER_OFF = {"cuda": "foreach", "cpu": "for-loop"}  # what torch takes where nothing is said, with a tensor as rate


@dataclass(frozen=True)
class Variant:
    """One way to run a loop: a name, and which switches are on."""

    name: str
    on: frozenset[str]

    def __contains__(self, switch: str) -> bool:
        return switch in self.on

    @property
    def precision(self) -> str:
        """The name that the switches amount to."""
        return "bf16" if "bf16" in self.on else "tf32" if "tf32" in self.on else "ieee"


class Loop(ABC):
    """A loop in one precision, eager or compiled; several variants run it, which differ in optimiser and graph.

    Args:
        precision: of its products.
        compiles: whether its functions are compiled.
        quick: take small sizes.
        device: where it runs.
    """

    switches: tuple[str, ...] = ("tf32", "bf16", "compile", "graph", "fused")
    """Switches that this loop has."""
    compiled_switches = switches
    """Those of them that make a difference where everything else is on."""

    def __init__(self, precision: str, compiles: bool, quick: bool, device: torch.device) -> None:
        self.precision, self.compiles, self.quick, self.device = precision, compiles, quick, device
        self.make()

    @abstractmethod
    def make(self) -> None:
        """Makes what the loop needs."""

    @abstractmethod
    def iteration(self) -> None:
        """One iteration."""

    @abstractmethod
    def outputs(self) -> Tensor:
        """What the networks give for fixed inputs and the weights at the start, flat."""

    def reset(self) -> None:  # noqa: B027  (a product has no state)
        """Goes back to the state at the start."""

    def loss_value(self) -> float:
        """The loss of the iterations since the last reset or reading; NaN where there is none."""
        return math.nan

    def select(self, fused: bool, channels_last: bool) -> None:  # noqa: B027
        """Takes one of the optimisers, and one of the memory formats where there are two."""

    def close(self) -> None:  # noqa: B027
        """Releases what the loop holds."""

    def step(self, variant: Variant) -> Callable[[], Any]:
        """The function that a variant calls for each iteration."""
        fused, channels_last = "fused" in variant, "channels-last" in variant

        def run() -> None:
            self.select(fused, channels_last)
            self.iteration()

        return capture(run, device=self.device, audit=False) if "graph" in variant else run

    @property
    def acceleration(self) -> Acceleration:
        """The switches of this loop, all but those that are selected later."""
        return Acceleration(self.precision)  # pyright: ignore[reportArgumentType]


class _TrainerLoop(Loop):
    trainer: Any
    optimizers: dict[bool, tuple[Any, ...]]
    names: tuple[str, ...] = ("optimizer",)
    """Attributes of the trainer that hold its optimisers."""
    loss_key = "train/loss_critic"

    def keep_start(self) -> None:
        """Keeps the state that :meth:`reset` goes back to: of the trainer, and of the optimisers it has not."""
        self.start = self.trainer.state_dict()
        # copied: a state_dict holds the moments themselves
        self.unfused_start = [deepcopy(optimizer.state_dict()) for optimizer in self.optimizers[False]]

    def reset(self) -> None:
        """Goes back to the state at the start, random numbers included."""
        self.select(True, False)
        self.trainer.load_state_dict(self.start)
        for optimizer, state in zip(self.optimizers[False], self.unfused_start, strict=True):
            optimizer.load_state_dict(state)
        self.trainer.metrics.flush(0)

    def loss_value(self) -> float:
        """Mean loss of the critic since the last reading."""
        row = self.trainer.metrics.flush(1)
        return float("nan") if row is None else float(row[self.loss_key])

    def select(self, fused: bool, channels_last: bool) -> None:
        """Takes one of the kinds of optimisers."""
        for name, optimizer in zip(self.names, self.optimizers[fused], strict=True):
            setattr(self.trainer, name, optimizer)

    def close(self) -> None:
        """Closes the trainer."""
        self.trainer.close()

    @property
    def settings(self) -> dict[str, Any]:
        mode = "compile" if self.compiles else "eager"
        names = {"precision": self.precision, "mode": mode, "device": str(self.device)}
        return {**names, "logger": "none", "total_steps": 10**9}

    def observations(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        size = self.trainer.env.observation_spec["observation"].shape[-1]
        return torch.randn(256, size, generator=generator).to(self.device)

    def iteration(self) -> None:
        self.trainer.iteration()


class PPOLoop(_TrainerLoop):
    """PPO on CartPole: 4 epochs of 4 minibatches."""

    def make(self) -> None:
        """The trainer, and a second optimiser."""
        num_envs, num_steps = (16, 8) if self.quick else (2048, 32)
        config = PPOConfig(num_envs=num_envs, num_steps=num_steps, epochs=4, minibatches=4, **self.settings)
        self.trainer = trainer = PPOTrainer(config)
        self.optimizers = _two_optimizers(trainer, list(trainer.loss.parameters()), self.device)
        self.keep_start()

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """Logits and values."""
        rows = self.observations()
        with self.acceleration.active(self.device):
            return torch.cat([self.trainer.actor.module[0].module(rows), self.trainer.critic.module(rows)], -1)


class DQNLoop(_TrainerLoop):
    """DQN on CartPole: 16 updates an iteration."""

    loss_key = "train/loss"

    def make(self) -> None:
        """The trainer with a filled buffer, and a second optimiser."""
        sizes = {"num_envs": 16, "minibatch_size": 64, "updates_per_iteration": 2, "hidden_size": 32}
        if not self.quick:
            sizes = {"num_envs": 256, "minibatch_size": 256, "updates_per_iteration": 16, "hidden_size": 64}
        rows = 64 * sizes["num_envs"]
        config = DQNConfig.without_task(num_steps=4, learning_starts=rows, capacity=rows, **sizes, **self.settings)
        self.trainer = trainer = DQNTrainer(config)
        for _ in range(config.fill_iterations):
            trainer.step()
        self.optimizers = _two_optimizers(trainer, list(trainer.q_network.parameters()), self.device)
        self.keep_start()

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """Action values."""
        with self.acceleration.active(self.device):
            return self.trainer.q_network(self.observations())


class SACLoop(_TrainerLoop):
    """SAC on Pendulum: 16 updates of 256 rows with 512-512 networks, the claims' size."""

    compiled_switches = ("tf32", "bf16", "compile", "graph")  # the compiled update holds its optimiser
    names = ("critic_optimizer", "actor_optimizer")
    rows = 256

    def make(self) -> None:
        """The trainer with a filled buffer, and second optimisers."""
        sizes = {"num_envs": 16, "minibatch_size": 32, "updates_per_iteration": 2, "hidden_size": 32}
        if not self.quick:
            sizes = {"num_envs": 256, "minibatch_size": self.rows, "updates_per_iteration": 16, "hidden_size": 512}
        filled = 64 * sizes["num_envs"]
        config = SACConfig.without_task(num_steps=1, learning_starts=filled, capacity=filled, **sizes, **self.settings)
        self.trainer = trainer = SACTrainer(config)
        for _ in range(config.fill_iterations):
            trainer.step()
        self.optimizers = {True: (trainer.critic_optimizer, trainer.actor_optimizer)}
        self.optimizers[False] = tuple(self._unfused(optimizer) for optimizer in self.optimizers[True])
        self.keep_start()

    def _unfused(self, optimizer: GroupAdam) -> GroupAdam:
        groups = list(zip(optimizer.groups, map(float, optimizer.learning_rates), strict=True))
        return GroupAdam(
            groups,
            max_grad_norm=optimizer.max_grad_norm,
            targets=optimizer.targets,
            fused=False,
            loss_scale=optimizer.loss_scale,
        )

    def select(self, fused: bool, channels_last: bool) -> None:
        """Takes one pair of optimisers; the compiled update has its own."""
        super().select(fused or self.compiles, channels_last)

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """Values of the critics, location and scale of the actor."""
        rows = self.observations()
        critic, actor = self.trainer.loss.critic.module, self.trainer.loss.actor.module[0].module
        with self.acceleration.active(self.device):
            return torch.cat([critic(rows, rows[:, :1]), *actor(rows)[:2]], -1)


class LargeSACLoop(SACLoop):
    """SAC with 4,096 rows an update, where the products are more than their launches."""

    rows = 4096


class ConvLoop(Loop):
    """Regression with the small convolutional net of DQN (Nature 518, 2015) on frames of 84 x 84."""

    switches = SWITCHES
    compiled_switches = SWITCHES

    def make(self) -> None:
        """Two nets of the same weights, one channels-last, each with two optimisers; frames and targets."""
        batch, size, width = (4, 36, 32) if self.quick else (256, 84, 512)
        generator = torch.Generator().manual_seed(1)
        self.frames = torch.rand(batch, 4, size, size, generator=generator).to(self.device)
        self.target = torch.rand(batch, 6, generator=generator).to(self.device)
        self.last_loss = torch.zeros((), device=self.device)
        self.parts, self.starts = {}, []
        for channels_last in (False, True):
            torch.manual_seed(0)
            fast = replace(self.acceleration, channels_last=channels_last)
            net = fast.module(_conv_net(size, width).to(self.device))
            loss = self._loss_of(net)
            kinds = {True: "fused", False: OPTIMIZER_OFF[self.device.type]}
            optimizers = {
                fused: replace(fast, optimizer=kind).make_optimizer(net.parameters(), lr=1e-4)
                for fused, kind in kinds.items()
            }
            start = {name: value.clone() for name, value in net.state_dict().items()}
            self.starts.append((net, start, optimizers))
            self.parts[channels_last] = (net, fast.compile(loss) if self.compiles else loss, optimizers)
        self.select(True, False)

    def _loss_of(self, net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(frames: Tensor, target: Tensor) -> Tensor:
            return nn.functional.mse_loss(net(frames), target)

        return loss

    def select(self, fused: bool, channels_last: bool) -> None:
        """Takes one net and one of its optimisers."""
        self.net, self.loss, optimizers = self.parts[channels_last]
        self.optimizer = optimizers[fused]

    def iteration(self) -> None:
        """Forward, backward and Adam."""
        with self.acceleration.active(self.device):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(self.frames, self.target)
            loss.backward()
            self.optimizer.step()
            self.last_loss.copy_(loss.detach())

    def reset(self) -> None:
        """Weights and moments as at the start."""
        for net, start, optimizers in self.starts:
            net.load_state_dict(start)
            for optimizer in optimizers.values():
                moments = [value for state in optimizer.state.values() for value in state.values()]
                for value in moments:
                    value.zero_()

    def loss_value(self) -> float:
        """Loss of the last iteration."""
        return float(self.last_loss)

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """What the net gives for the frames, in both memory formats."""
        with self.acceleration.active(self.device):
            return torch.cat([net(self.frames) for net, *_ in self.parts.values()])


class MatmulLoop(Loop):
    """One square product, large enough to be bound by arithmetic: what the peak rates of the card amount to."""

    switches = compiled_switches = ("tf32", "bf16")

    def make(self) -> None:
        """Two matrices."""
        size = 256 if self.quick else 4096
        generator = torch.Generator().manual_seed(1)
        self.a, self.b = torch.randn(2, size, size, generator=generator).to(self.device) / math.sqrt(size)

    def iteration(self) -> None:
        """The product."""
        self.outputs()

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """The product."""
        with self.acceleration.active(self.device), self.acceleration.autocast(self.device):
            return self.a @ self.b


LOOPS: dict[str, type[Loop]] = {
    "ppo": PPOLoop,
    "dqn": DQNLoop,
    "sac": SACLoop,
    "sac-4096": LargeSACLoop,
    "conv": ConvLoop,
    "matmul": MatmulLoop,
}


def _two_optimizers(trainer: Any, params: list[nn.Parameter], device: torch.device) -> dict[bool, tuple[Any, ...]]:
    """The trainer's own optimiser, which is fused, and one of the kind that PyTorch takes by itself."""
    config = trainer.config
    unfused = replace(trainer.acceleration, optimizer=OPTIMIZER_OFF[device.type])
    options = {"learning_rate": config.learning_rate, "max_grad_norm": config.max_grad_norm}
    return {True: (trainer.optimizer,), False: (GuardedAdam(params, acceleration=unfused, **options),)}


def _conv_net(size: int, width: int) -> nn.Module:
    side = ((size - 8) // 4 + 1 - 4) // 2 + 1 - 2
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * side * side, width),
        nn.ReLU(),
        nn.Linear(width, 6),
    )
