"""Settings of a DQN run."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.trainers.value_config import ValueConfig


@dataclass(frozen=True)
class DQNConfig(ValueConfig):
    """Every choice of a DQN run (arXiv:1312.5602), with double Q-learning, duelling, n-step, prioritised replay.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "dqn"
    presets_in: ClassVar[str] = "trainers.dqn_config:DQN_PRESETS"

    loss: Literal["huber", "l2"] = "huber"
    """Loss of a temporal difference: quadratic up to 1 and linear beyond, or its square."""


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
