"""Trainers: one dataclass of settings and one visible loop per algorithm."""

from torchrl_perf.trainers.actor_critic import make_actor, make_critic
from torchrl_perf.trainers.config import PRESETS, PPOConfig
from torchrl_perf.trainers.minibatches import minibatches
from torchrl_perf.trainers.optimization import GuardedAdam
from torchrl_perf.trainers.ppo import PPOTrainer
from torchrl_perf.trainers.run import RunResult, TrainingDivergedError, train

__all__ = [
    "PRESETS",
    "GuardedAdam",
    "PPOConfig",
    "PPOTrainer",
    "RunResult",
    "TrainingDivergedError",
    "make_actor",
    "make_critic",
    "minibatches",
    "train",
]
