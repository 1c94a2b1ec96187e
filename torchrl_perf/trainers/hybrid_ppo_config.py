"""Settings of a hybrid PPO run."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.trainers.config import PPOConfig


@dataclass(frozen=True)
class HybridPPOConfig(PPOConfig):
    """Every choice of a PPO run whose actions have discrete and continuous parts (arXiv:1707.06347, arXiv:1903.01344).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "hybrid-ppo"
    presets_in: ClassVar[str] = "trainers.hybrid_ppo_config:HYBRID_PPO_PRESETS"

    env: Literal[  # pyright: ignore[reportIncompatibleVariableOverride]
        "HybridTarget", "CartPole", "Pendulum", "Acrobot", "MountainCar", "MountainCarContinuous"
    ] = "HybridTarget"
    """Which of the package's tasks to learn; an action of one part serves too."""


HYBRID_PPO_PRESETS: dict[str, HybridPPOConfig] = {
    "HybridTarget": HybridPPOConfig(
        num_envs=64,
        num_steps=16,
        total_steps=122_880,
        gamma=0.8,
        lmbda=0.9,
        epochs=5,
        minibatches=4,
        learning_rate=3e-3,
        entropy_coeff=0.03,
        entropy_coeff_final=0.0,
    ),
}
"""Settings for each task, by env name."""
