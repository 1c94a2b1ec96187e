"""Settings of a SAC run."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.trainers.actor_critic_config import ActorCriticConfig
from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive


@dataclass(frozen=True)
class SACConfig(ActorCriticConfig):
    """Every choice of a SAC run (arXiv:1812.05905). Frames, steps, transitions: all one action of one env.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "sac"
    presets_in: ClassVar[str] = "trainers.sac_config:SAC_PRESETS"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *ActorCriticConfig.fixed_by_checkpoint,
        "num_critics",
        "learn_temperature",
    )

    temperature_learning_rate: float = 1e-3
    """Adam's step size for the logarithm of the temperature."""
    target_interval: int = 1
    """Updates from one move of the target critics to the next."""
    initial_temperature: float = 1.0
    """Weight of the entropy against the reward, at the start; throughout where it is not learnt."""
    learn_temperature: bool = True
    """Adapt the temperature so that the policy's entropy stays at target_entropy."""
    target_entropy: float | None = None
    """Entropy of the policy that the temperature is adapted to, in nats; None is minus the number of action dims."""
    num_critics: int = 2
    """Critics whose smallest value is believed (K)."""
    loss_function: Literal["l2", "smooth_l1"] = "l2"
    """Loss of the critics: squared error, or the Huber loss that TorchRL takes by default."""
    max_grad_norm: float | None = None
    """Largest norm of the gradient of the critics, and of actor and temperature together; None is no limit."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("num_critics", "target_interval"), is_count, "a positive integer")
        checks.each(("temperature_learning_rate", "initial_temperature"), is_positive, "a positive number")

    @property
    def fixed_on_resume(self) -> tuple[str, ...]:
        """A temperature that is learnt goes on from where it is, whatever it was at the start."""
        return (
            (*self.fixed_by_checkpoint, "initial_temperature") if self.learn_temperature else self.fixed_by_checkpoint
        )


SAC_PRESETS: dict[str, SACConfig] = {
    # Large steps are safe here, and a low temperature spares the time in which the initial one would fall.
    "Pendulum": SACConfig(
        total_steps=32_000,
        capacity=50_000,
        updates_per_iteration=4,
        learning_starts=1_600,
        gamma=0.95,
        actor_learning_rate=3e-3,
        critic_learning_rate=3e-3,
        temperature_learning_rate=3e-3,
        initial_temperature=0.2,
        tau=0.01,
        hidden_size=64,
    ),
}
"""Settings for each task, by env name."""
