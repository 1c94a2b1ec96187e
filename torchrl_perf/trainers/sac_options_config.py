"""Settings of a run of soft actor-critic with options."""

from dataclasses import dataclass
from typing import ClassVar

from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive
from torchrl_perf.trainers.sac_config import SACConfig


@dataclass(frozen=True)
class SACOptionsConfig(SACConfig):
    """Every choice of a run of SAC (arXiv:1812.05905) below a policy over options (Sutton, Precup and Singh, 1999).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "sac-options"
    presets_in: ClassVar[str] = "trainers.sac_options_config:SAC_OPTIONS_PRESETS"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*SACConfig.fixed_by_checkpoint, "option_capacity")

    env: str = "Ferry"
    """The package's task that has options, Ferry; any name beside env= and options=."""
    num_steps: int = 10
    """Steps of each env in one iteration (T)."""
    learning_starts: int = 5_000
    """Frames collected with random options and the actor's first actions before the first update."""
    option_learning_rate: float = 3e-3
    """Adam's step size for the policy over options and its values."""
    option_temperature: float = 1.0
    """What the logits of the choice of an option are divided by."""
    option_entropy_coeff: float = 0.01
    """Weight of the entropy of that choice."""
    option_clip: float = 0.2
    """Clipping range of the ratio to the probability with which an option was chosen."""
    option_capacity: int = 2_000
    """Choices of options that are kept to learn from; at least num_envs * num_steps."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("option_learning_rate", "option_temperature"), is_positive, "a positive number")
        checks.each(("option_entropy_coeff",), lambda value: value >= 0, "a number of at least 0")
        checks.each(("option_clip",), lambda value: 0 < value < 1, "a number in (0, 1)")
        checks.each(("option_capacity",), is_count, "a positive integer")
        if checks.sound("num_envs", "num_steps", "option_capacity") and self.option_capacity < self.batch_size:
            checks.add(
                "option_capacity",
                f"option_capacity: expected at least num_envs * num_steps = {self.batch_size}, the choices that one "
                f"iteration may make, received {self.option_capacity}. Remedy: a larger one.",
            )


SAC_OPTIONS_PRESETS: dict[str, SACOptionsConfig] = {
    "Ferry": SACOptionsConfig(
        total_steps=24_000,
        capacity=50_000,
        updates_per_iteration=8,
        learning_starts=480,
        gamma=0.97,
        actor_learning_rate=3e-3,
        critic_learning_rate=3e-3,
        initial_temperature=0.1,
        learn_temperature=False,
        tau=0.01,
        hidden_size=32,
    ),
}
"""Settings for each task, by env name."""
