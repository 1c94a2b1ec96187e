"""Trainers: one dataclass of settings and one visible loop per algorithm."""

from torchrl_perf.moved import moved_from as _moved_from
from torchrl_perf.trainers.ac_iqn import AC_IQN_PRESETS, ACIQNConfig, ACIQNTrainer
from torchrl_perf.trainers.actor_critic import make_actor, make_critic, make_hybrid_actor
from torchrl_perf.trainers.config_checks import ConfigError
from torchrl_perf.trainers.ddpg import DDPG_PRESETS, TD3_PRESETS, DDPGConfig, DDPGTrainer, TD3Config
from torchrl_perf.trainers.dqn import DQN_PRESETS, DQNConfig, DQNTrainer, make_q_policy
from torchrl_perf.trainers.evaluation import Episodes, evaluate_episodes
from torchrl_perf.trainers.hybrid_ppo import HYBRID_PPO_PRESETS, HybridPPOConfig, HybridPPOTrainer
from torchrl_perf.trainers.iqn import (
    IQN_PRESETS,
    QR_DQN_PRESETS,
    IQNConfig,
    IQNTrainer,
    QRDQNConfig,
    make_quantile_policy,
)
from torchrl_perf.trainers.off_policy.algorithm import Algorithm, Update
from torchrl_perf.trainers.off_policy.config import OffPolicyConfig
from torchrl_perf.trainers.off_policy.deterministic import make_deterministic_actor
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.on_policy.algorithm import OnPolicyAlgorithm
from torchrl_perf.trainers.on_policy.minibatches import minibatches
from torchrl_perf.trainers.on_policy.trainer import OnPolicyTrainer
from torchrl_perf.trainers.optim.optimization import GuardedAdam
from torchrl_perf.trainers.policies import load_policy, save_policy
from torchrl_perf.trainers.ppo import PRESETS, PPOConfig, PPOTrainer
from torchrl_perf.trainers.pqn import PQN_PRESETS, PQNConfig, PQNTrainer
from torchrl_perf.trainers.rainbow import RAINBOW_PRESETS, RainbowConfig, RainbowTrainer, make_rainbow_policy
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder
from torchrl_perf.trainers.run.numerics import NumericalGuard
from torchrl_perf.trainers.run.run import RunFolderError, RunResult, TrainingDivergedError, train
from torchrl_perf.trainers.run.state import TrainState
from torchrl_perf.trainers.sac import SAC_PRESETS, SACConfig, SACTrainer, make_sac_actor, make_sac_critic
from torchrl_perf.trainers.sac_options import SAC_OPTIONS_PRESETS, SACOptionsConfig, SACOptionsTrainer
from torchrl_perf.trainers.torchrl.install import DeviceParts, use_device_parts
from torchrl_perf.trainers.torchrl.log import DeviceLogHook
from torchrl_perf.trainers.torchrl.replay import DeviceReplayHook, MinibatchHook
from torchrl_perf.trainers.torchrl.stepper import GuardedStepper

__all__ = [
    "AC_IQN_PRESETS",
    "DDPG_PRESETS",
    "DQN_PRESETS",
    "HYBRID_PPO_PRESETS",
    "IQN_PRESETS",
    "PQN_PRESETS",
    "PRESETS",
    "QR_DQN_PRESETS",
    "RAINBOW_PRESETS",
    "SAC_OPTIONS_PRESETS",
    "SAC_PRESETS",
    "TD3_PRESETS",
    "ACIQNConfig",
    "ACIQNTrainer",
    "Algorithm",
    "CheckpointFolder",
    "ConfigError",
    "DDPGConfig",
    "DDPGTrainer",
    "DQNConfig",
    "DQNTrainer",
    "DeviceLogHook",
    "DeviceParts",
    "DeviceReplayHook",
    "Episodes",
    "GuardedAdam",
    "GuardedStepper",
    "HybridPPOConfig",
    "HybridPPOTrainer",
    "IQNConfig",
    "IQNTrainer",
    "MinibatchHook",
    "NumericalGuard",
    "OffPolicyConfig",
    "OffPolicyTrainer",
    "OnPolicyAlgorithm",
    "OnPolicyTrainer",
    "PPOConfig",
    "PPOTrainer",
    "PQNConfig",
    "PQNTrainer",
    "QRDQNConfig",
    "RainbowConfig",
    "RainbowTrainer",
    "RunFolderError",
    "RunResult",
    "SACConfig",
    "SACOptionsConfig",
    "SACOptionsTrainer",
    "SACTrainer",
    "TD3Config",
    "TrainState",
    "TrainingDivergedError",
    "Update",
    "evaluate_episodes",
    "load_policy",
    "make_actor",
    "make_critic",
    "make_deterministic_actor",
    "make_hybrid_actor",
    "make_q_policy",
    "make_quantile_policy",
    "make_rainbow_policy",
    "make_sac_actor",
    "make_sac_critic",
    "minibatches",
    "save_policy",
    "train",
    "use_device_parts",
]

__getattr__ = _moved_from(__name__)
