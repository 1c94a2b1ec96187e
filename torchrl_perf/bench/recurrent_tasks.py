"""Tasks that a policy without memory cannot learn, each with settings of PPO and what counts as learnt."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_perf.trainers.memory import STREAM_MEMORY_SETTINGS
from torchrl_perf.trainers.ppo import PRESETS, PPOConfig

__all__ = ["TASKS", "LearningTask"]

# whole episodes lie within a stream, so that a choice at the end reaches the sign at the beginning
_MAZE: dict[str, Any] = {"epochs": 4, "lmbda": 0.95, "learning_rate": 1e-3, "memory_size": 64, "entropy_coeff": 0.01}


@dataclass(frozen=True)
class LearningTask:
    """A task.

    Attributes:
        env: its name, of which there may be a preset.
        target: mean return at which it is learnt.
        settings: that differ from the preset, or from PPO's.
    """

    env: str
    target: float
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, memory: str, **changes: Any) -> PPOConfig:
        """The settings of one run with a memory, or ``"none"``, where those of a memory are left out."""
        preset = PRESETS.get(self.env, PPOConfig.without_task(env=self.env))
        settings = {"memory": memory, **self.settings}
        if memory == "none":
            settings = {name: value for name, value in settings.items() if name not in STREAM_MEMORY_SETTINGS[1:]}
        return dataclasses.replace(preset, **{**settings, **changes})


TASKS: dict[str, LearningTask] = {
    "stateless-cartpole": LearningTask("StatelessCartPole", 475.0, {"total_steps": 1_000_000}),
    "tmaze-20": LearningTask(
        "TMaze",
        3.8,
        {
            **_MAZE,
            **{"env_args": ("length=20",), "num_envs": 64, "num_steps": 64, "minibatches": 4},
            **{"gamma": 0.99, "total_steps": 1_000_000},
        },
    ),
    "tmaze-100": LearningTask(
        "TMaze",
        3.8,
        {
            **_MAZE,
            **{"env_args": ("length=100",), "num_envs": 256, "num_steps": 256, "minibatches": 8},
            **{"gamma": 0.999, "total_steps": 20_000_000},
        },
    ),
    "tmaze-1000": LearningTask(
        "TMaze",
        3.8,
        {
            **_MAZE,
            **{"env_args": ("length=1000",), "num_envs": 16, "num_steps": 2048, "minibatches": 8},
            # returns of -140 at first: of their own size the critic's loss would turn the memory into one of this step
            **{"gamma": 0.9999, "normalize_rewards": True, "layer_norm": True, "total_steps": 100_000_000},
        },
    ),
    "repeat-previous": LearningTask(
        "RepeatPrevious",
        0.9,
        {
            **{"num_envs": 256, "num_steps": 102, "minibatches": 8, "epochs": 4, "memory_size": 64},
            **{"gamma": 0.9, "learning_rate": 1e-3, "entropy_coeff": 0.01, "total_steps": 10_000_000},
        },
    ),
}
"""By name. Mazes have the length in it; ``tmaze-1000`` is for cells that are linear in their state."""
