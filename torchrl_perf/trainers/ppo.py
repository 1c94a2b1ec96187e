"""Proximal policy optimisation (arXiv:1707.06347): its settings, networks, advantages and loss."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase
from torchrl.objectives import ClipPPOLoss

from torchrl_perf.functional.losses.ppo import advantage_summary, merged_summary, normalized_advantage, normalized_by
from torchrl_perf.functional.schedules import adaptive, linear
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.trainers.actor_critic import make_actor, make_critic, trunk_of
from torchrl_perf.trainers.config import RunConfig, check_minibatches
from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive, is_share
from torchrl_perf.trainers.given_memory import on_shared_memory
from torchrl_perf.trainers.memory import (
    MEMORY_SETTINGS,
    STREAM_MEMORY_SETTINGS,
    StreamMemorySettings,
    Streams,
    check_streams,
    refuse_idle,
    remembers,
)
from torchrl_perf.trainers.networks import NETWORK_SETTINGS, POLICY_SETTINGS, Activation, GaussianNetworkSettings
from torchrl_perf.trainers.normalization import NORMALIZATION_SETTINGS, NormalizationSettings
from torchrl_perf.trainers.on_policy.algorithm import OnPolicyAlgorithm, Whole, valid_key_of
from torchrl_perf.trainers.on_policy.trainer import OnPolicyTrainer
from torchrl_perf.transforms import GAETransform


@dataclass(frozen=True)
class PPOConfig(StreamMemorySettings, NormalizationSettings, GaussianNetworkSettings, RunConfig):
    """Every choice of a PPO run (arXiv:1707.06347). Frames, steps, transitions: all one action of one env.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "ppo"
    presets_in: ClassVar[str] = "trainers.ppo:PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:PPO"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        *("hidden_size", "activation"),
        *NETWORK_SETTINGS,
        *POLICY_SETTINGS,
        *NORMALIZATION_SETTINGS,
        *MEMORY_SETTINGS,
    )

    gamma: float = 0.98
    """Discount factor."""
    epochs: int = 8
    """Passes over each batch."""
    minibatches: int = 4
    """Parts that a batch is split into at each pass; has to divide num_envs * num_steps."""
    learning_rate: float = 1.5e-3
    """Adam's step size at the start."""
    anneal_learning_rate: bool = True
    """Lower the learning rate linearly to 0 over the run, or over schedule_steps."""
    lmbda: float = 0.95
    """Lambda of generalised advantage estimation."""
    clip_epsilon: float = 0.2
    """Clipping range of the probability ratio."""
    clip_value: bool = False
    """Clip the change of the value estimate as well."""
    value_clip_epsilon: float | None = None
    """Range of that change, in the units of the return; None is clip_epsilon."""
    normalize_advantage: bool = True
    """Normalise the advantages of each minibatch."""
    entropy_coeff: float = 0.01
    """Weight of the entropy bonus at the start."""
    entropy_coeff_final: float | None = None
    """Weight of the entropy bonus at the end, reached linearly; None keeps it constant."""
    entropy_frames: int | None = None
    """Env steps after which that weight is reached; None is the whole run."""
    entropy_floor: float | None = None
    """Entropy of the policy, in nats, below which the shortfall is a loss of its own; None is no floor."""
    entropy_floor_coeff: float = 1.0
    """Weight of that loss."""
    critic_coeff: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient."""
    target_kl: float | None = None
    """Skip the rest of an iteration's updates once a minibatch's KL divergence exceeds this; None never."""
    kl_estimate: Literal["samples", "closed_form"] = "samples"
    """How that divergence is found: the mean of the log-ratios, or from the parameters of both policies, without noise
    and never negative."""
    desired_kl: float | None = None
    """KL divergence of a minibatch that the learning rate follows, in place of its annealing: divided by 1.5 above
    twice this, multiplied by 1.5 below half of it (rsl_rl's adaptive schedule); None leaves it alone."""
    min_learning_rate: float = 1e-5
    """Least step size that desired_kl leads to."""
    max_learning_rate: float = 1e-2
    """Greatest step size that desired_kl leads to."""
    hidden_size: int = 64
    """Width of the two hidden layers of actor and critic, where hidden_sizes are not given; 32, 64 and 128 run as fused
    kernels on CUDA."""
    activation: Activation = "tanh"
    """Activation of the hidden layers."""
    loss: Literal["device", "torchrl"] = "device"
    """The package's DeviceClipPPOLoss, or TorchRL's own ClipPPOLoss."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("epochs", "minibatches", "hidden_size"), is_count, "a positive integer")
        checks.each(("lmbda",), is_share, "a number in [0, 1]")
        checks.each(("learning_rate", "max_grad_norm", "critic_coeff"), is_positive, "a positive number")
        checks.each(("clip_epsilon",), lambda value: 0 < value < 1, "a number in (0, 1)")
        checks.each(("value_clip_epsilon", "entropy_floor_coeff"), is_positive, "a positive number")
        checks.each(("entropy_frames",), is_count, "a positive integer")
        checks.each(("target_kl",), lambda value: value >= 0, "a number of at least 0")
        checks.each(("desired_kl", "min_learning_rate", "max_learning_rate"), is_positive, "a positive number")
        checks.idle(("value_clip_epsilon",), "clip_value")
        checks.idle(("entropy_frames",), "entropy_coeff_final", lambda weight: weight is None)
        checks.idle(("entropy_floor_coeff",), "entropy_floor", lambda floor: floor is None)
        checks.idle(("min_learning_rate", "max_learning_rate"), "desired_kl")
        self._check_adaptive(checks)
        checks.idle(("kl_estimate", "entropy_floor"), "loss", lambda loss: loss == "torchrl")
        check_minibatches(self, checks)

    def _check_adaptive(self, checks: Checks) -> None:
        """Bounds that have a room between them, with the first step size in it."""
        names = ("learning_rate", "min_learning_rate", "max_learning_rate")
        if self.desired_kl is None or not checks.sound("desired_kl", *names):
            return
        if not self.min_learning_rate <= self.learning_rate <= self.max_learning_rate:
            checks.add(
                "learning_rate",
                f"learning_rate: expected one from min_learning_rate = {self.min_learning_rate} to max_learning_rate = "
                f"{self.max_learning_rate} with desired_kl, received {self.learning_rate}. Remedy: other bounds.",
            )

    @property
    def updates_each_iteration(self) -> int:
        """Updates of one iteration."""
        return self.epochs * self.minibatches

    @property
    def experiences_per_iteration(self) -> int:
        """Rows that the updates of one iteration learn from, repeats counted."""
        return self.epochs * self.batch_size


PRESETS: dict[str, PPOConfig] = {
    "CartPole": PPOConfig(log_interval=1),
    # Values reach -100 here: a small critic weight and a wide limit keep the gradient from being the critic's alone.
    "Pendulum": PPOConfig(
        env="Pendulum",
        num_steps=64,
        total_steps=600_000,
        minibatches=8,
        learning_rate=2e-3,
        gamma=0.95,
        clip_epsilon=0.1,
        entropy_coeff=0.0,
        critic_coeff=0.1,
        max_grad_norm=10.0,
        activation="relu",
        log_interval=1,
    ),
    "Acrobot": PPOConfig(env="Acrobot", total_steps=400_000, gamma=0.99, log_interval=1),
    # Actor and critic share the memory, and values are up to 50: with more weight the critic has the memory for itself.
    # Angles are below .2, and the memory has to tell differences of them.
    "StatelessCartPole": PPOConfig(
        env="StatelessCartPole",
        total_steps=400_000,
        epochs=6,
        learning_rate=2e-3,
        critic_coeff=0.02,
        normalize_observations=True,
        memory="gru",
        memory_size=64,
        log_interval=1,
    ),
    # PPO's noise, drawn anew at each step, does not climb the hill: the mean return stays at -200, the least there is.
    "MountainCar": PPOConfig(env="MountainCar", total_steps=1_000_000, gamma=0.99, log_interval=4),
    # The goal is first reached by chance: a large entropy weight keeps the noise up, and falls to let it end. 92 to 95.
    "MountainCarContinuous": PPOConfig(
        env="MountainCarContinuous",
        num_envs=256,
        num_steps=64,
        total_steps=2_000_000,
        minibatches=8,
        learning_rate=3e-3,
        gamma=0.9995,
        lmbda=0.99,
        clip_epsilon=0.1,
        entropy_coeff=0.15,
        entropy_coeff_final=0.0,
        critic_coeff=0.1,
        max_grad_norm=10.0,
        activation="relu",
        log_interval=2,
    ),
}
"""Settings for each task, by env name. They solve all but MountainCar, within a minute on two CPU cores;
StatelessCartPole ends at 500.0 with thirteen of fifteen seeds, and at 489.0 and 301.6 with the others.

A whole run logs 60 to 100 rows, so that its learning curve is a curve.
"""


class PPO(OnPolicyAlgorithm):
    """An actor and a critic, advantages by GAE (arXiv:1506.02438), and the clipped loss.

    Attributes:
        actor: the policy.
        critic: writes ``state_value``.
        gae: writes ``advantage``, ``value_target`` and ``state_value`` into a batch.
        value_size: numbers that the critic gives for a state, 1 unless a subclass has components.
        streams: makes minibatches of whole streams where the config has a memory; None without one.
    """

    losses: ClassVar[tuple[str, ...]] = ("loss_objective", "loss_critic", "loss_entropy")
    value_size: int = 1
    loss: ClipPPOLoss  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        config: Any,
        env: EnvBase,
        acceleration: Acceleration,
        *,
        actor: nn.Module | None = None,
        critic: nn.Module | None = None,
    ) -> None:
        self.config, self.env = config, env
        if config.shared_trunk and (given := [name for name, one in (("actor", actor), ("critic", critic)) if one]):
            raise ValueError(
                f"shared_trunk: expected the default actor and critic, received {' and '.join(given)} from Python. "
                "Remedy: shared_trunk=False; networks of your own share the modules that they both hold."
            )
        self.valid_key = valid_key_of(env)
        given = actor, critic
        if remembers(config):
            self._check_memory({"actor": actor, "critic": critic})
        else:
            actor, critic = on_shared_memory(actor, critic)
        has_memory = remembers(config) or (actor, critic) != given
        self.actor = acceleration.policy(actor or self.make_actor(env))
        self.streams = None
        if has_memory:
            self.streams = Streams(list(cast("Any", self.actor))[:-1], config.burn_in)
            check_streams(config)
        # a memory from Python has a size of its own
        refuse_idle(config, () if remembers(config) else STREAM_MEMORY_SETTINGS[1 : 2 if has_memory else None])
        self.critic = acceleration.policy(critic or self.make_critic(env))
        self.policy, self.networks = self.actor, {"actor": self.actor, "critic": self.critic}
        if self.valid_key is not None and config.loss == "torchrl":
            raise ValueError(
                f"loss: expected 'device' for {type(env).__name__}, whose rows do not all count ({self.valid_key!r}), "
                "received 'torchrl'. Remedy: loss='device'."
            )
        closed_form = config.kl_estimate == "closed_form"
        statistics = (*self.losses, "entropy", "kl_approx", "clip_fraction")
        self.statistics = (*statistics, "kl") if closed_form else statistics
        # the closed form needs the old policy's parameters
        self.unused_keys = () if closed_form else getattr(self._head, "param_keys", ("logits", "loc", "scale"))
        if self.streams is not None:
            self.unused_keys = (*self.unused_keys, *self.streams.written)
            self.carried = self.streams.state_keys
        self.gae = self.make_gae()
        self.loss = self._make_loss()
        self.row_keys = self._loss_keys()
        self.schedules = {"entropy_coeff": cast("Tensor", self.loss.entropy_coeff)}

    @property
    def _head(self) -> nn.Module:
        """What the loss calls as its actor: the policy, or the part of it above the memory."""
        return self.actor if self.streams is None else cast("Any", self.actor)[-1]

    def _check_memory(self, given: Mapping[str, nn.Module | None]) -> None:
        """Refuse networks that no memory can be put below."""
        if parts := [name for name, one in given.items() if one is not None]:
            raise ValueError(
                f"memory: expected with {self.config.memory!r} networks of the trainer's own, received "
                f"{' and '.join(parts)} from Python. Remedy: memory='none'."
            )

    def make_actor(self, env: EnvBase) -> nn.Module:
        """The default actor, :func:`make_actor`."""
        return make_actor(env, self.config)

    def make_critic(self, env: EnvBase) -> nn.Module:
        """The default critic, :func:`make_critic`."""
        if self.streams is not None:
            return make_critic(env, self.config, trunk=list(cast("Any", self.streams.trunk)))
        return make_critic(env, self.config, trunk_of(self.actor) if self.config.shared_trunk else None)

    def make_gae(self) -> GAETransform:
        """What computes advantages."""
        return GAETransform(gamma=self.config.gamma, lmbda=self.config.lmbda, value_network=cast("Any", self.critic))

    def _make_loss(self) -> ClipPPOLoss:
        config = self.config
        value_range = config.clip_epsilon if config.value_clip_epsilon is None else config.value_clip_epsilon
        own: dict[str, Any] = {
            "closed_form_kl": "kl" in self.statistics,
            "entropy_floor": config.entropy_floor,
            "entropy_floor_coeff": config.entropy_floor_coeff,
            "valid_key": self.valid_key,
        }
        kind, own = (DeviceClipPPOLoss, own) if config.loss == "device" else (ClipPPOLoss, {})
        critic: Any = self.critic
        loss = kind(
            cast("Any", self._head),
            critic if self.streams is None else critic[-1],
            **own,
            clip_epsilon=config.clip_epsilon,
            clip_value=value_range if config.clip_value else False,
            normalize_advantage=config.normalize_advantage,
            entropy_coeff=config.entropy_coeff,
            critic_coeff=config.critic_coeff,
            loss_critic_type="l2",
            functional=False,
        )
        if self.streams is not None:
            loss.add_module("memory", self.streams.trunk)  # its parameters are learnt with those of both heads
        if config.loss == "torchrl" and config.clip_value:
            # it asks at each call whether this is set: of a buffer, that is a host read
            del loss.clip_value
            loss.clip_value = value_range
        return loss

    def _loss_keys(self) -> list[NestedKey]:
        """The entries that the loss reads."""
        keys = self.loss.tensor_keys
        read = [
            *cast("list[NestedKey]", self.actor.in_keys),
            *cast("list[NestedKey]", self.critic.in_keys),
            *(keys.advantage, keys.value_target, keys.value),
        ]
        for key in (keys.action, keys.sample_log_prob):  # a list of them where the action has several parts
            read += [key] if isinstance(key, str | tuple) else cast("list[NestedKey]", key)
        read += cast("Any", self._head)[-1].in_keys if "kl" in self.statistics else []
        read += [] if self.valid_key is None else [self.valid_key]
        return list(dict.fromkeys(read))

    def schedule(self, iteration: Tensor) -> None:
        """The weight of the entropy bonus."""
        config = self.config
        if config.entropy_coeff_final is not None:
            frames = config.entropy_frames
            length = config.schedule_iterations if frames is None else frames / config.batch_size
            ends = config.entropy_coeff, config.entropy_coeff_final
            self.schedules["entropy_coeff"].copy_(linear(iteration, *ends, length))

    def estimate(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds ``advantage``, ``value_target`` and ``state_value`` to the batch."""
        return self.gae(batch)

    def rows(self, batch: TensorDictBase) -> TensorDictBase:
        """Transitions ``[T * N]``, or with a memory streams ``[N]``."""
        return super().rows(batch) if self.streams is None else self.streams.rows(batch, self.row_keys)

    def minibatch_loss(self, rows: TensorDictBase) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The clipped objective, the critic's loss and the entropy bonus."""
        losses = self.loss(rows if self.streams is None else self.streams.read(rows))
        return losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"], losses

    def stop(self, statistics: Mapping[str, Tensor]) -> Tensor | None:
        """Whether the policy has gone as far from the old one as ``target_kl`` allows."""
        return None if self.config.target_kl is None else self._divergence(statistics) > self.config.target_kl

    @property
    def adapts_learning_rate(self) -> bool:
        """Whether ``desired_kl`` is set."""
        return self.config.desired_kl is not None

    def adapt(self, statistics: Mapping[str, Tensor], learning_rate: Tensor, due: Tensor) -> None:
        """The learning rate that follows ``desired_kl``, see :func:`~torchrl_perf.functional.schedules.adaptive`."""
        config = self.config
        bounds = config.min_learning_rate, config.max_learning_rate
        adapted = adaptive(learning_rate, self._divergence(statistics), config.desired_kl, *bounds)
        learning_rate.copy_(torch.where(due, adapted, learning_rate))

    def _divergence(self, statistics: Mapping[str, Tensor]) -> Tensor:
        """The KL divergence of a minibatch, as ``kl_estimate`` has it."""
        return statistics["kl" if "kl" in statistics else "kl_approx"]

    def whole(self, rows: TensorDictBase, index: Tensor, summary: Tensor | None = None) -> Whole:
        """Advantages that are normalised over the whole minibatch, and how many rows of a part count."""
        advantage, valid = self._advantage_of(rows, index)
        if self.config.normalize_advantage and summary is None:
            advantage = normalized_advantage(advantage, valid)
        elif self.config.normalize_advantage:
            advantage = normalized_by(advantage, cast("Tensor", summary), valid)
        counts = None if valid is None else valid.flatten(1).sum(-1) if valid.ndim > 1 else valid
        return Whole({self.loss.tensor_keys.advantage: advantage}, None if counts is None else counts.to(torch.float32))

    def summary(self, rows: TensorDictBase, index: Tensor) -> Tensor | None:
        """Number, mean and deviation of the advantages of a rank's parts of minibatches, where they are normalised."""
        if not self.config.normalize_advantage:
            return None
        return advantage_summary(*self._advantage_of(rows, index), batch_dims=1)

    def merged(self, summaries: Tensor) -> Tensor:
        """Those of the minibatches of all ranks."""
        return merged_summary(summaries)

    def _advantage_of(self, rows: TensorDictBase, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Advantages of the rows at ``index``, and which of them count, None for all."""
        advantage, valid = rows.get(self.loss.tensor_keys.advantage)[index], None
        if isinstance(self.loss, DeviceClipPPOLoss):
            flags = rows.select(*self.loss.valid_keys, strict=False)
            valid = self.loss.valid_rows(cast("TensorDictBase", flags[index]), advantage.shape[:-1])
        if self.streams is not None and self.streams.burn_in:
            learnt = torch.zeros(advantage.shape[:-1], dtype=torch.bool, device=advantage.device)
            learnt[..., self.streams.learnt(advantage.shape[-2])] = True
            valid = learnt if valid is None else valid & learnt
        return advantage, valid

    @contextlib.contextmanager
    def in_parts(self) -> Iterator[None]:
        """Within it the loss takes advantages as they are."""
        self.loss.normalize_advantage = False
        try:
            yield
        finally:
            self.loss.normalize_advantage = self.config.normalize_advantage

    def probe_rows(self, rows: TensorDictBase) -> TensorDictBase:
        """Rows with advantages, values and targets of 0; with a memory, streams of one step."""
        keys = self.loss.tensor_keys
        for key, size in ((keys.advantage, 1), (keys.value_target, self.value_size), (keys.value, self.value_size)):
            rows.set(key, torch.zeros(len(rows), size, device=self.env.device))
        return rows if self.streams is None else self.streams.rows(rows.unsqueeze(-1), self.row_keys)


class PPOTrainer(OnPolicyTrainer):
    """PPO with every step of the loop on the device; the loop is that of :class:`OnPolicyTrainer`.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs], Gymnasium vector envs, or what makes an env, see
            :class:`OnPolicyTrainer`; by default the one that the config names.
        collector: collects ``[N, T]`` batches with ``actor``, such as a ``HostCollector``.
        actor: a probabilistic TensorDict module for the env's action; by default :func:`make_actor`.
        critic: a TensorDict module that writes ``state_value``; by default :func:`make_critic`.

    Attributes:
        actor: acts in the env.
        critic: values states.
        gae: computes advantages.
        value_size: numbers that the critic gives for a state.

    Raises:
        ValueError: at construction, for CUDA where there is none, or parts that do not fit each other.
    """

    algorithm_class: ClassVar[type[PPO]] = PPO  # pyright: ignore[reportIncompatibleVariableOverride]
    algorithm: PPO

    def __init__(
        self,
        config: PPOConfig,
        *,
        env: Any = None,
        collector: BaseCollector | None = None,
        actor: nn.Module | None = None,
        critic: nn.Module | None = None,
    ) -> None:
        super().__init__(config, env=env, collector=collector, actor=actor, critic=critic)
