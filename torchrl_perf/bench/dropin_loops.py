"""TorchRL's PPO, DQN and SAC loops as a user writes them, in which any part may be this package's.

They are the loops of ``examples/drop_in.py``, ``drop_in_dqn.py`` and ``drop_in_sac.py``, which do the same with the
same seed (``tests/bench/test_dropin_loops.py``), taken apart: a part is named after what its line makes.
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import EnvBase, RewardSum, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate
from torchrl.objectives.value import GAE

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.metrics import EpisodeStatistics
from torchrl_perf.modules import EpsilonGreedy, SquashedNormal
from torchrl_perf.objectives import DeviceClipPPOLoss, DeviceDQNLoss, DeviceSACLoss, DeviceSoftUpdate
from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.runtime import capture
from torchrl_perf.trainers import GuardedAdam, minibatches
from torchrl_perf.transforms import GAETransform

READ_EVERY = 10
"""Iterations of a captured loop between two looks at its returns."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a loop; by default those of its example."""

    num_envs: int
    """Envs that run at once (N)."""
    frames_per_batch: int
    """Frames of one batch, N * T."""
    total_frames: int
    """Frames of the run."""
    updates: int
    """Updates after each batch; of PPO the minibatches of all its epochs."""
    batch_size: int
    """Rows of an update (B)."""
    first_frames: int
    """Frames of the beginning, which is timed for itself."""
    capacity: int = 0
    """Rows of the replay buffer; of PPO those of a batch."""
    learning_rate: float = 1e-3
    """Step size of Adam."""
    seed: int = 0
    """Seed of networks, envs and sampling."""


class Loop:
    """One loop, from its parts to the returns of its episodes.

    Args:
        sizes: of the loop.
        device: where everything runs.
        ours: the parts that are this package's, of :attr:`parts`.
        captured: all parts are, and an iteration is one graph.

    Attributes:
        parts: names of the parts that may be replaced, in the order of their lines.
        first_parts: those that are replaced first, where their effect together is of interest.
        unit: what its speed is told in.
        fills: whether the buffer keeps the rows of earlier iterations.
        default: the sizes of the example.
    """

    parts: ClassVar[tuple[str, ...]]
    first_parts: ClassVar[tuple[str, ...]] = ()
    unit: ClassVar[str] = "updates"
    fills: ClassVar[bool] = True
    default: ClassVar[Sizes]

    env: EnvBase
    collector: Any
    loss: Any
    buffer: Any
    optimizer: Any

    def __init__(
        self, sizes: Sizes, device: torch.device, ours: Collection[str] = (), *, captured: bool = False
    ) -> None:
        self.sizes, self.device, self.captured = sizes, device, captured
        self.ours = frozenset(self.parts if captured else ours)
        self.returns: deque[float] = deque(maxlen=self.returns_kept)
        torch.manual_seed(sizes.seed)
        self.make()

    @property
    def returns_kept(self) -> int:
        """Returns that the mean is taken of."""
        return 50

    def make(self) -> None:
        """Makes env, networks and parts, in the order of the script."""
        raise NotImplementedError

    def learn(self, batch: TensorDictBase) -> None:
        """Learns from one batch ``[N, T]``."""
        raise NotImplementedError

    def iterations(self) -> Iterator[None]:
        """Yields after each iteration, without an end other than that of the run."""
        if self.captured:
            yield from self._captured_iterations()
            return
        for batch in self.collector:
            self.learn(batch)
            self.note(batch)
            yield

    def note(self, batch: TensorDictBase) -> None:
        """Keeps the returns of the episodes that ended in a batch."""
        self.returns.extend(batch["next", "episode_reward"][batch["next", "done"]].tolist())

    def _captured_iterations(self) -> Iterator[None]:
        episodes = EpisodeStatistics(self.sizes.num_envs, self.device)

        def iteration() -> None:
            batch = self.collector.collect()
            self.learn(batch)
            episodes.update(batch["next", "reward"], batch["next", "done"])

        left = self.sizes.total_frames // self.sizes.frames_per_batch
        if self.fills:  # no graph can hold the write that allocates the rows
            self.buffer.extend(self.collector.collect().reshape(-1))
            left -= 1
            yield
        step = capture(iteration, device=self.device)
        for done in range(1, left + 1):
            step()
            if done % READ_EVERY == 0:
                self.returns.append(float(episodes.mean_return))
            yield

    @property
    def mean_return(self) -> float | None:
        """Mean of the returns that are kept; None before the first."""
        return sum(self.returns) / len(self.returns) if self.returns else None

    def close(self) -> None:
        """Ends the collector."""
        self.collector.shutdown()

    # -- parts that all loops have ------------------------------------------------------------------------------------

    def make_collector(self, policy: Any) -> Any:
        """Either collector; a captured loop records the collector's steps itself, as they are."""
        frames = {"frames_per_batch": self.sizes.frames_per_batch, "total_frames": self.sizes.total_frames}
        if "collector" not in self.ours:
            # the present default, without the warning that it will change
            return Collector(self.env, policy, **frames, auto_register_policy_transforms=False)
        return DeviceCollector(self.env, policy, **frames, mode="eager" if self.captured else "auto")

    def make_optimizer(self, max_grad_norm: float | None = None) -> Any:
        """Either Adam, over all parameters of the loss; PyTorch's is the fused one where no line changes it."""
        params, rate = self.loss.parameters(), self.sizes.learning_rate
        if self.captured or "optimizer" in self.ours:
            return GuardedAdam(params, lr=rate, max_grad_norm=max_grad_norm)
        return torch.optim.Adam(params, lr=rate, fused=None if "optimizer" in self.parts else True)

    def make_rows(self) -> Any:
        """Either replay buffer of uniform draws."""
        sizes = self.sizes
        if "buffer" in self.ours:
            return make_replay_buffer(sizes.capacity, batch_size=sizes.batch_size, device=self.device)
        storage = LazyTensorStorage(sizes.capacity, device=self.device)
        return TensorDictReplayBuffer(storage=storage, batch_size=sizes.batch_size)

    def make_target_update(self, tau: float) -> SoftUpdate:
        """Either updater of targets."""
        return (DeviceSoftUpdate if "targets" in self.ours else SoftUpdate)(self.loss, tau=tau)

    def descend(self, loss: Tensor) -> None:
        """One step of the optimiser."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class PPOLoop(Loop):
    """PPO on CartPole, ``examples/drop_in.py``."""

    parts = ("collector", "advantages", "loss", "buffer", "optimizer")
    first_parts = ("collector", "advantages", "loss")
    unit = "frames"
    fills = False
    epochs = 8
    max_grad_norm = 0.5
    default = Sizes(
        num_envs=128, frames_per_batch=4096, total_frames=204_800, updates=64, batch_size=512, first_frames=40_960
    )

    @property
    def returns_kept(self) -> int:
        """Means of the last batches."""
        return 10

    def make(self) -> None:
        """Makes env, networks and parts."""
        sizes, options = self.sizes, {"num_cells": [64, 64], "activation_class": nn.Tanh, "device": self.device}
        self.env = TransformedEnv(CartPole(sizes.num_envs, device=self.device), RewardSum())
        logits = MLP(4, 2, **options)
        actor = ProbabilisticActor(
            TensorDictModule(logits, in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            distribution_class=Categorical,
            return_log_prob=True,
            spec=self.env.full_action_spec,
        )
        critic = ValueOperator(MLP(4, 1, **options), in_keys=["observation"])
        self.collector = self.make_collector(actor)
        advantage = GAETransform if "advantages" in self.ours else GAE
        self.advantage = advantage(gamma=0.98, lmbda=0.95, value_network=critic)
        loss = DeviceClipPPOLoss if "loss" in self.ours else ClipPPOLoss
        self.loss = loss(
            actor, critic, entropy_coeff=0.01, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True
        )
        self.buffer = self._make_buffer()
        self.optimizer = self.make_optimizer(self.max_grad_norm)

    def _make_buffer(self) -> Any:
        rows, size = self.sizes.frames_per_batch, self.sizes.batch_size
        if "buffer" in self.ours:
            return make_replay_buffer(rows, batch_size=size, sampler="epoch", device=self.device)
        storage = LazyTensorStorage(rows, device=self.device)
        return ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=size)

    def learn(self, batch: TensorDictBase) -> None:
        """Advantages, and epochs of shuffled minibatches."""
        with torch.no_grad():
            self.advantage(batch)
        for minibatch in self._minibatches(batch):
            losses = self.loss(minibatch)
            self.descend(losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"])

    def _minibatches(self, batch: TensorDictBase) -> Iterator[TensorDictBase]:
        if self.captured:
            yield from minibatches(batch, epochs=self.epochs, parts=self.sizes.updates // self.epochs)
            return
        self.buffer.extend(batch.reshape(-1))
        for _ in range(self.epochs):
            yield from self.buffer

    def descend(self, loss: Tensor) -> None:
        """One step of the optimiser with the gradient clipped, which ours does by itself."""
        loss.backward()
        if "optimizer" not in self.ours:
            nn.utils.clip_grad_norm_(self.loss.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def note(self, batch: TensorDictBase) -> None:
        """Keeps the mean return of a batch."""
        finished = batch["next", "episode_reward"][batch["next", "done"]]
        if finished.numel():
            self.returns.append(finished.mean().item())


class DQNLoop(Loop):
    """DQN on CartPole, ``examples/drop_in_dqn.py``."""

    parts = ("exploration", "collector", "loss", "buffer", "targets")
    default = Sizes(
        num_envs=32, frames_per_batch=128, total_frames=64_000, updates=8, batch_size=256, first_frames=4096,
        capacity=16_384,
    )  # fmt: skip

    def make(self) -> None:
        """Makes env, network and parts."""
        sizes, device = self.sizes, self.device
        self.env = TransformedEnv(CartPole(sizes.num_envs, device=device), RewardSum())
        spec = self.env.full_action_spec_unbatched["action"]
        actor = QValueActor(MLP(4, 2, num_cells=[128, 128], device=device), in_keys=["observation"], spec=spec)
        kind = EpsilonGreedy if "exploration" in self.ours else EGreedyModule
        self.explore = kind(spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=20_000).to(device)
        self.collector = self.make_collector(TensorDictSequential(actor, self.explore))
        loss = DeviceDQNLoss if "loss" in self.ours else DQNLoss
        self.loss = loss(actor, action_space=spec, delay_value=True)
        self.buffer = self.make_rows()
        self.optimizer = self.make_optimizer()
        self.loss.make_value_estimator(gamma=0.99)
        self.target = self.make_target_update(tau=0.01)

    def learn(self, batch: TensorDictBase) -> None:
        """Stores a batch, and updates on samples."""
        self.buffer.extend(batch.reshape(-1))
        self.explore.step(batch.numel())
        for _ in range(self.sizes.updates):
            self.descend(self.loss(self.buffer.sample())["loss"])
            self.target.step()


class SACLoop(Loop):
    """SAC on Pendulum, ``examples/drop_in_sac.py``."""

    parts = ("collector", "loss", "buffer", "optimizer", "targets")
    default = Sizes(
        num_envs=16, frames_per_batch=64, total_frames=48_000, updates=16, batch_size=256, first_frames=1024,
        capacity=65_536,
    )  # fmt: skip

    def make(self) -> None:
        """Makes env, networks and parts."""
        sizes, options = self.sizes, {"num_cells": [128, 128], "device": self.device}
        self.env = TransformedEnv(Pendulum(sizes.num_envs, device=self.device), RewardSum())
        spec = self.env.full_action_spec_unbatched["action"]
        parameters = nn.Sequential(MLP(3, 2, **options), NormalParamExtractor())
        actor = ProbabilisticActor(
            TensorDictModule(parameters, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=SquashedNormal if self.captured else TanhNormal,  # the audit of a graph refuses waits
            distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
            spec=spec,
            return_log_prob=True,
        )
        critic = ValueOperator(MLP(4, 1, **options), in_keys=["observation", "action"])
        self.collector = self.make_collector(actor)
        loss = DeviceSACLoss if "loss" in self.ours else SACLoss
        self.loss = loss(actor, critic)
        self.buffer = self.make_rows()
        self.optimizer = self.make_optimizer()
        self.loss.make_value_estimator(gamma=0.99)
        self.target = self.make_target_update(tau=0.005)

    def learn(self, batch: TensorDictBase) -> None:
        """Stores a batch, and updates on samples."""
        self.buffer.extend(batch.reshape(-1))
        for _ in range(self.sizes.updates):
            losses = self.loss(self.buffer.sample())
            self.descend(losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"])
            self.target.step()


LOOPS: dict[str, type[Loop]] = {"ppo": PPOLoop, "dqn": DQNLoop, "sac": SACLoop}
"""Loops by algorithm."""
