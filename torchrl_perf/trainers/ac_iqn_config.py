"""Settings of an AC-IQN run."""

from dataclasses import dataclass
from typing import ClassVar

from torchrl_perf.trainers.config_checks import Checks, is_count
from torchrl_perf.trainers.ddpg_config import PENDULUM, DeterministicConfig


@dataclass(frozen=True)
class ACIQNConfig(DeterministicConfig):
    """Every choice of an AC-IQN run: a deterministic policy on a critic of implicit quantiles (arXiv:1806.06923).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "ac-iqn"
    presets_in: ClassVar[str] = "trainers.ac_iqn_config:AC_IQN_PRESETS"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*DeterministicConfig.fixed_by_checkpoint, "num_cosines")

    kappa: float = 1.0
    """Temporal difference up to which the quantile loss is quadratic; 0 is nowhere."""
    num_taus: int = 8
    """Quantiles of the action taken, drawn for each row (K)."""
    num_target_taus: int = 8
    """Quantiles of the target's action that each of them is compared with."""
    num_actor_taus: int = 32
    """Quantiles whose mean the policy raises."""
    num_cosines: int = 64
    """Features of a quantile's level."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        counts = ("num_taus", "num_target_taus", "num_actor_taus", "num_cosines")
        checks.each(counts, is_count, "a positive integer")
        checks.each(("kappa",), lambda value: value >= 0, "a number of at least 0")


AC_IQN_PRESETS: dict[str, ACIQNConfig] = {"Pendulum": ACIQNConfig(**PENDULUM)}
"""Settings for each task, by env name."""
