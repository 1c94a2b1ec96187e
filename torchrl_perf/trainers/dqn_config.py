"""Settings of a DQN run."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.trainers.config import is_count, is_positive, is_share
from torchrl_perf.trainers.off_policy_config import OffPolicyConfig


@dataclass(frozen=True)
class DQNConfig(OffPolicyConfig):
    """Every choice of a DQN run (arXiv:1312.5602), with double Q-learning, duelling, n-step, prioritised replay.

    Raises:
        ValueError: naming the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "dqn"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *OffPolicyConfig.fixed_by_checkpoint,
        "hidden_size",
        "activation",
        "dueling",
    )

    double: bool = True
    """Let the online network choose the next action that the target network values (arXiv:1509.06461)."""
    dueling: bool = False
    """Learn the state's value and the actions' advantages apart (arXiv:1511.06581)."""
    loss: Literal["huber", "l2"] = "huber"
    """Loss of a temporal difference: quadratic up to 1 and linear beyond, or its square."""
    learning_rate: float = 1e-3
    """Adam's step size at the start."""
    anneal_learning_rate: bool = False
    """Lower the learning rate linearly to 0 over the run."""
    max_grad_norm: float = 10.0
    """Largest norm of the gradient."""
    tau: float = 1.0
    """Share of the online network that goes into the target network at each of its updates; 1 copies it."""
    target_interval: int = 100
    """Updates between two updates of the target network."""
    eps_start: float = 1.0
    """Probability of a random action at the start."""
    eps_end: float = 0.05
    """Probability of a random action after eps_frames."""
    eps_frames: int = 50_000
    """Frames in which that probability falls, linearly; those before learning_starts count."""
    hidden_size: int = 64
    """Width of the network's two hidden layers; 32, 64 and 128 run as fused kernels on CUDA."""
    activation: Literal["tanh", "relu"] = "relu"
    """Activation of the hidden layers."""
    precision: Literal["tf32", "bf16", "ieee"] = "tf32"
    """Precision of the matrix products in fused kernels (CUDA only)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_all(("hidden_size", "target_interval", "eps_frames"), is_count, "a positive integer")
        self._require_all(("learning_rate", "max_grad_norm"), is_positive, "a positive number")
        self._require_all(("eps_start", "eps_end"), is_share, "a number in [0, 1]")
        self._require("tau", 0 < self.tau <= 1, "a number in (0, 1]")


DQN_PRESETS: dict[str, DQNConfig] = {
    # The whole run stays in the buffer: without its early failures a good policy unlearns what they taught. A horizon
    # of 50 steps is enough to balance. Seeds 0 to 2 end at 500.
    "CartPole": DQNConfig(
        num_envs=64,
        num_steps=4,
        gamma=0.98,
        capacity=300_000,
        updates_per_iteration=32,
        minibatch_size=128,
        learning_starts=1_000,
        n_step=5,
        anneal_learning_rate=True,
        target_interval=256,
        eps_end=0.03,
        eps_frames=40_000,
        hidden_size=128,
        log_interval=20,
    ),
}
"""Settings for each task, by env name. They solve it within a minute on one CPU core."""
