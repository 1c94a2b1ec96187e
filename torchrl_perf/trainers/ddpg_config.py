"""Settings of DDPG and TD3 runs, and what all runs with a deterministic policy share."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchrl_perf.trainers.actor_critic_config import ActorCriticConfig
from torchrl_perf.trainers.config_checks import Checks, is_count


@dataclass(frozen=True)
class DeterministicConfig(ActorCriticConfig):
    """What algorithms with a deterministic policy have in common: they explore by noise on the action.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    noise: Literal["gaussian", "ou"] = "gaussian"
    """Noise on the actions: independent from step to step, or an Ornstein-Uhlenbeck process that drifts back to 0."""
    noise_start: float = 0.2
    """Standard deviation of the noise at the start, as a share of half the bounds' width."""
    noise_end: float = 0.1
    """Standard deviation of the noise after noise_frames."""
    noise_frames: int = 50_000
    """Frames in which it changes, linearly; those before learning_starts count."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("noise_start", "noise_end"), lambda value: value >= 0, "a number of at least 0")
        checks.each(("noise_frames",), is_count, "a positive integer")


@dataclass(frozen=True)
class DDPGConfig(DeterministicConfig):
    """Every choice of a DDPG run (arXiv:1509.02971). Frames, steps, transitions: all one action of one env.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "ddpg"
    presets_in: ClassVar[str] = "trainers.ddpg_config:DDPG_PRESETS"

    loss_function: Literal["l2", "smooth_l1"] = "l2"
    """Loss of the critics: squared error, or the Huber loss that TorchRL takes by default."""


@dataclass(frozen=True)
class TD3Config(DDPGConfig):
    """Every choice of a TD3 run (arXiv:1802.09477): DDPG with several critics, a slower actor and smoothed targets.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "td3"
    presets_in: ClassVar[str] = "trainers.ddpg_config:TD3_PRESETS"
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


# Of a horizon of 20 steps, as PPO and SAC have it.
PENDULUM: dict[str, Any] = {
    "total_steps": 32_000,
    "capacity": 50_000,
    "updates_per_iteration": 4,
    "learning_starts": 1_600,
    "gamma": 0.95,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 3e-3,
    "tau": 0.01,
    "hidden_size": 64,
    "noise_frames": 20_000,
}

DDPG_PRESETS: dict[str, DDPGConfig] = {"Pendulum": DDPGConfig(**PENDULUM)}
"""Settings for each task, by env name."""

TD3_PRESETS: dict[str, TD3Config] = {"Pendulum": TD3Config(**PENDULUM)}
"""Settings for each task, by env name."""
