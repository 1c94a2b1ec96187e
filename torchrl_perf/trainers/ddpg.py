"""Deterministic policy gradients, DDPG and TD3, with every step of the loop on the device."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import TensorSpec

from torchrl_perf.objectives.td3 import DeviceTD3Loss
from torchrl_perf.trainers.config_checks import Checks, is_count
from torchrl_perf.trainers.off_policy.actor_critic import ActorCritic
from torchrl_perf.trainers.off_policy.chained_deterministic import chained_deterministic
from torchrl_perf.trainers.off_policy.deterministic import (
    PENDULUM,
    DeterministicConfig,
    DeterministicPasses,
    NoisyActor,
    make_deterministic_actor,
)
from torchrl_perf.trainers.off_policy.ensemble_critic import make_ensemble_critic
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.off_policy.twin_critics import critics_wanted


@dataclass(frozen=True)
class DDPGConfig(DeterministicConfig):
    """Every choice of a DDPG run (arXiv:1509.02971). Frames, steps, transitions: all one action of one env.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "ddpg"
    presets_in: ClassVar[str] = "trainers.ddpg:DDPG_PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:DDPG"

    loss_function: Literal["l2", "smooth_l1"] = "l2"
    """Loss of the critics: squared error, or the Huber loss that TorchRL takes by default."""


@dataclass(frozen=True)
class TD3Config(DDPGConfig):
    """Every choice of a TD3 run (arXiv:1802.09477): DDPG with several critics, a slower actor and smoothed targets.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "td3"
    presets_in: ClassVar[str] = "trainers.ddpg:TD3_PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:DDPG"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*DDPGConfig.fixed_by_checkpoint, "num_critics")

    num_critics: int = 2
    """Critics whose smallest value is believed (K)."""
    policy_delay: int = 2
    """Updates of the critics for one of the actor and the targets; has to divide updates_per_iteration."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target's actions, as a share of half the bounds' width."""
    noise_clip: float = 0.5
    """Largest such noise, in the same unit."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("num_critics", "policy_delay"), is_count, "a positive integer")
        checks.each(("target_noise", "noise_clip"), lambda value: value >= 0, "a number of at least 0")
        if checks.sound("updates_per_iteration", "policy_delay") and self.updates_per_iteration % self.policy_delay:
            checks.add(
                "policy_delay",
                f"policy_delay: expected a divisor of updates_per_iteration = {self.updates_per_iteration}, received "
                f"{self.policy_delay}. Remedy: a multiple of it as updates_per_iteration.",
            )


DDPG_PRESETS: dict[str, DDPGConfig] = {"Pendulum": DDPGConfig(**PENDULUM)}
"""Settings for each task, by env name."""

TD3_PRESETS: dict[str, TD3Config] = {"Pendulum": TD3Config(**PENDULUM)}
"""Settings for each task, by env name."""


class DDPG(NoisyActor, ActorCritic):
    """DDPG (arXiv:1509.02971), and with a :class:`TD3Config` TD3 (arXiv:1802.09477).

    TD3's actor and targets move at each ``policy_delay``-th update of an iteration; nothing is computed of them at the
    others.
    """

    config: DDPGConfig
    loss: DeviceTD3Loss

    def make_actor(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """:func:`make_deterministic_actor`, squashed by tanh."""
        return make_deterministic_actor(observation, action, self.config)

    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """One network of action values, or those of TD3 in one batched network."""
        config = self.config
        num_critics = config.num_critics if isinstance(config, TD3Config) else 1
        return make_ensemble_critic(observation, action, config, num_critics)

    def make_loss(self, actor: nn.Module, critic: nn.Module) -> DeviceTD3Loss:
        """The losses of DDPG or TD3."""
        config = self.config
        smoothing, number = {"target_noise": 0.0}, None  # DDPG takes a critic as it is
        if isinstance(config, TD3Config):
            number = critics_wanted(critic, self.setup.specs, config.num_critics)
            self.actor_interval = config.policy_delay
            smoothing = {"target_noise": config.target_noise, "noise_clip": config.noise_clip}
        options: dict[str, Any] = {"num_qvalue_nets": number, "loss_function": config.loss_function, **smoothing}
        return DeviceTD3Loss(actor, critic, gamma=config.gamma, **options)

    def make_passes(self) -> DeterministicPasses:
        """The deterministic policy gradient, with the noise of TD3's targets."""
        return DeterministicPasses(self.loss, self.critic_optimizer, self.actor_optimizer, noise=self._target_noise)

    def make_chained(self) -> Any:
        """The update in few launches, for perceptrons."""
        return chained_deterministic(self)

    def _target_noise(self, sample: TensorDictBase) -> Tensor | None:
        """``[B, D]`` standard normal numbers for the target's actions; None where they have no noise."""
        return torch.randn_like(sample.get(self.loss.action_key)) if self.loss.target_noise > 0 else None


class DDPGTrainer(OffPolicyTrainer):
    """The loop of :class:`OffPolicyTrainer` on :class:`DDPG`: DDPG or TD3, as the kind of config says.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs]; by default the package's task that the config names.
        collector: a collector that acts with a :class:`GaussianNoise` or :class:`OUNoise` on ``actor``, such as a
            ``HostCollector`` with ``init_random_frames``; by default a :class:`DeviceCollector` of the env.
        actor: a deterministic TensorDict module for the env's action; by default that of the collector's policy, or
            :func:`make_deterministic_actor` where there is no collector.
        critic: a TensorDict module that reads observations and the action and writes ``state_action_value``.

    Raises:
        ValueError: at construction, for actions that are not continuous and bounded, or parts that do not fit.
    """

    algorithm_class = DDPG
