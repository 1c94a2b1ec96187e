"""Settings of a SAC run."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.trainers.config import is_count, is_positive, is_share
from torchrl_perf.trainers.off_policy_config import OffPolicyConfig


@dataclass(frozen=True)
class SACConfig(OffPolicyConfig):
    """Every choice of a SAC run (arXiv:1812.05905). Frames, steps, transitions: all one action of one env.

    Raises:
        ValueError: naming the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "sac"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *OffPolicyConfig.fixed_by_checkpoint,
        "hidden_size",
        "activation",
        "num_critics",
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
    temperature_learning_rate: float = 1e-3
    """Adam's step size for the logarithm of the temperature."""
    tau: float = 0.005
    """How far the target critics move towards the critics each time."""
    target_interval: int = 1
    """Updates from one move of the target critics to the next."""
    initial_temperature: float = 1.0
    """Weight of the entropy against the reward, at the start."""
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
    hidden_size: int = 256
    """Width of the two hidden layers of actor and critics."""
    activation: Literal["relu", "tanh"] = "relu"
    """Activation of the hidden layers."""
    precision: Literal["tf32", "ieee"] = "tf32"
    """Precision of the matrix products in updates (CUDA only)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_all(("num_critics", "hidden_size", "target_interval"), is_count, "a positive integer")
        rates = ("actor_learning_rate", "critic_learning_rate", "temperature_learning_rate", "initial_temperature")
        self._require_all(rates, is_positive, "a positive number")
        self._require_all(("tau",), is_share, "a number in [0, 1]")
        limit = self.max_grad_norm
        self._require("max_grad_norm", limit is None or limit > 0, "None or a positive number")


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
