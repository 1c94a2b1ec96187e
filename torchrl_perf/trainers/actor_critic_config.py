"""Settings that off-policy algorithms with an actor and a critic of continuous actions share."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive, is_share
from torchrl_perf.trainers.off_policy_config import OffPolicyConfig


@dataclass(frozen=True)
class ActorCriticConfig(OffPolicyConfig):
    """A run that learns a policy of bounded continuous actions from a critic.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *OffPolicyConfig.fixed_by_checkpoint,
        "hidden_size",
        "activation",
    )

    env: str = "Pendulum"
    """Which of the package's tasks with bounded continuous actions to learn."""
    num_envs: int = 16
    """Number of envs that run at once (N)."""
    num_steps: int = 1
    """Steps of each env in one iteration (T)."""
    total_steps: int = 100_000
    """Env steps of the whole run, over all envs; rounded up to whole iterations."""
    capacity: int = 1_000_000
    """Rows of the replay buffer; rounded down to a multiple of num_envs."""
    updates_per_iteration: int = 16
    """Updates after each collected batch of num_envs * num_steps frames."""
    learning_starts: int = 5_000
    """Frames collected with random actions before the first update, rounded up to whole iterations."""
    actor_learning_rate: float = 3e-4
    """Adam's step size for the policy."""
    critic_learning_rate: float = 1e-3
    """Adam's step size for the critics."""
    tau: float = 0.005
    """How far the targets move towards the networks each time."""
    max_grad_norm: float | None = None
    """Largest norm of the gradient of the critics, and of the actor; None is no limit."""
    hidden_size: int = 256
    """Width of the hidden layers of actor and critics."""
    activation: Literal["relu", "tanh"] = "relu"
    """Activation of the hidden layers."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("hidden_size",), is_count, "a positive integer")
        checks.each(("actor_learning_rate", "critic_learning_rate", "max_grad_norm"), is_positive, "a positive number")
        checks.each(("tau",), is_share, "a number in [0, 1]")
