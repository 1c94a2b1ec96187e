"""Trainers: one dataclass of settings and one visible loop per algorithm."""

from torchrl_perf.trainers.actor_critic import make_actor, make_critic
from torchrl_perf.trainers.config import PRESETS, PPOConfig
from torchrl_perf.trainers.dqn import DQNTrainer, make_q_policy
from torchrl_perf.trainers.dqn_config import DQN_PRESETS, DQNConfig
from torchrl_perf.trainers.group_adam import GroupAdam
from torchrl_perf.trainers.hooks_log import DeviceLogHook
from torchrl_perf.trainers.hooks_replay import DeviceReplayHook, MinibatchHook
from torchrl_perf.trainers.hooks_stepper import GuardedStepper
from torchrl_perf.trainers.minibatches import minibatches
from torchrl_perf.trainers.off_policy import OffPolicyTrainer
from torchrl_perf.trainers.off_policy_config import OffPolicyConfig
from torchrl_perf.trainers.optimization import GuardedAdam
from torchrl_perf.trainers.ppo import PPOTrainer
from torchrl_perf.trainers.run import RunResult, TrainingDivergedError, train
from torchrl_perf.trainers.sac import SACTrainer, make_sac_actor, make_sac_critic
from torchrl_perf.trainers.sac_config import SAC_PRESETS, SACConfig
from torchrl_perf.trainers.torchrl_hooks import DeviceParts, use_device_parts

__all__ = [
    "DQN_PRESETS",
    "PRESETS",
    "SAC_PRESETS",
    "DQNConfig",
    "DQNTrainer",
    "DeviceLogHook",
    "DeviceParts",
    "DeviceReplayHook",
    "GroupAdam",
    "GuardedAdam",
    "GuardedStepper",
    "MinibatchHook",
    "OffPolicyConfig",
    "OffPolicyTrainer",
    "PPOConfig",
    "PPOTrainer",
    "RunResult",
    "SACConfig",
    "SACTrainer",
    "TrainingDivergedError",
    "make_actor",
    "make_critic",
    "make_q_policy",
    "make_sac_actor",
    "make_sac_critic",
    "minibatches",
    "train",
    "use_device_parts",
]
