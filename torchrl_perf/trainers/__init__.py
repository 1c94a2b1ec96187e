"""Trainers: one dataclass of settings and one visible loop per algorithm."""

from torchrl_perf.trainers.ac_iqn import ACIQNTrainer
from torchrl_perf.trainers.ac_iqn_config import AC_IQN_PRESETS, ACIQNConfig
from torchrl_perf.trainers.active_dynamics import ActiveDynamicsTrainer
from torchrl_perf.trainers.active_dynamics_config import ACTIVE_DYNAMICS_PRESETS, ActiveDynamicsConfig
from torchrl_perf.trainers.active_dynamics_evaluation import PredictionFigures
from torchrl_perf.trainers.actor_critic import make_actor, make_critic
from torchrl_perf.trainers.checkpoint import CheckpointFolder
from torchrl_perf.trainers.config import PRESETS, PPOConfig
from torchrl_perf.trainers.config_checks import ConfigError
from torchrl_perf.trainers.ddpg import DDPGTrainer, make_deterministic_actor
from torchrl_perf.trainers.ddpg_config import DDPG_PRESETS, TD3_PRESETS, DDPGConfig, TD3Config
from torchrl_perf.trainers.dqn import DQNTrainer, make_q_policy
from torchrl_perf.trainers.dqn_config import DQN_PRESETS, DQNConfig
from torchrl_perf.trainers.durotaxis import DurotaxisTrainer
from torchrl_perf.trainers.durotaxis_config import DUROTAXIS_PRESETS, DurotaxisConfig
from torchrl_perf.trainers.durotaxis_networks import make_colony_actor, make_colony_critic
from torchrl_perf.trainers.fuel_breaks import FuelBreaksTrainer, make_fuel_breaks_env
from torchrl_perf.trainers.fuel_breaks_config import FUEL_BREAKS_PRESETS, FuelBreaksConfig
from torchrl_perf.trainers.fuel_breaks_evaluation import PlacementFigures
from torchrl_perf.trainers.fuel_breaks_networks import BreakPolicy, make_break_policy
from torchrl_perf.trainers.group_adam import GroupAdam
from torchrl_perf.trainers.hooks_log import DeviceLogHook
from torchrl_perf.trainers.hooks_replay import DeviceReplayHook, MinibatchHook
from torchrl_perf.trainers.hooks_stepper import GuardedStepper
from torchrl_perf.trainers.hybrid_ppo import HybridPPOTrainer, make_hybrid_actor
from torchrl_perf.trainers.hybrid_ppo_config import HYBRID_PPO_PRESETS, HybridPPOConfig
from torchrl_perf.trainers.iqn import IQNTrainer, make_quantile_policy
from torchrl_perf.trainers.iqn_config import IQN_PRESETS, QR_DQN_PRESETS, IQNConfig, QRDQNConfig
from torchrl_perf.trainers.marine import (
    MarineACIQNTrainer,
    MarineDDPGTrainer,
    MarineDQNTrainer,
    MarineIQNTrainer,
    MarineRainbowTrainer,
    MarineSACTrainer,
    make_marine_env,
)
from torchrl_perf.trainers.marine_config import (
    MarineACIQNConfig,
    MarineDDPGConfig,
    MarineDQNConfig,
    MarineIQNConfig,
    MarineRainbowConfig,
    MarineSACConfig,
)
from torchrl_perf.trainers.marine_evaluation import NavigationFigures, Scenarios
from torchrl_perf.trainers.marine_presets import (
    MARINE_ACIQN_PRESETS,
    MARINE_DDPG_PRESETS,
    MARINE_DQN_PRESETS,
    MARINE_IQN_PRESETS,
    MARINE_RAINBOW_PRESETS,
    MARINE_SAC_PRESETS,
)
from torchrl_perf.trainers.minibatches import minibatches
from torchrl_perf.trainers.numerics import NumericalGuard
from torchrl_perf.trainers.off_policy import OffPolicyTrainer
from torchrl_perf.trainers.off_policy_actor_critic import ActorCriticTrainer
from torchrl_perf.trainers.off_policy_config import OffPolicyConfig
from torchrl_perf.trainers.optimization import GuardedAdam
from torchrl_perf.trainers.options_market import OptionsMarketTrainer
from torchrl_perf.trainers.options_market_config import OPTIONS_MARKET_PRESETS, OptionsMarketConfig
from torchrl_perf.trainers.options_market_networks import make_options_market_env
from torchrl_perf.trainers.ppo import PPOTrainer
from torchrl_perf.trainers.rainbow import RainbowTrainer, make_rainbow_policy
from torchrl_perf.trainers.rainbow_config import RAINBOW_PRESETS, RainbowConfig
from torchrl_perf.trainers.run import RunFolderError, RunResult, TrainingDivergedError, train
from torchrl_perf.trainers.sac import SACTrainer, make_sac_actor, make_sac_critic
from torchrl_perf.trainers.sac_config import SAC_PRESETS, SACConfig
from torchrl_perf.trainers.sac_options import SACOptionsTrainer
from torchrl_perf.trainers.sac_options_config import SAC_OPTIONS_PRESETS, SACOptionsConfig
from torchrl_perf.trainers.torchrl_hooks import DeviceParts, use_device_parts
from torchrl_perf.trainers.train_state import TrainState
from torchrl_perf.trainers.value_based import ValueTrainer

__all__ = [
    "ACTIVE_DYNAMICS_PRESETS",
    "AC_IQN_PRESETS",
    "DDPG_PRESETS",
    "DQN_PRESETS",
    "DUROTAXIS_PRESETS",
    "FUEL_BREAKS_PRESETS",
    "HYBRID_PPO_PRESETS",
    "IQN_PRESETS",
    "MARINE_ACIQN_PRESETS",
    "MARINE_DDPG_PRESETS",
    "MARINE_DQN_PRESETS",
    "MARINE_IQN_PRESETS",
    "MARINE_RAINBOW_PRESETS",
    "MARINE_SAC_PRESETS",
    "OPTIONS_MARKET_PRESETS",
    "PRESETS",
    "QR_DQN_PRESETS",
    "RAINBOW_PRESETS",
    "SAC_OPTIONS_PRESETS",
    "SAC_PRESETS",
    "TD3_PRESETS",
    "ACIQNConfig",
    "ACIQNTrainer",
    "ActiveDynamicsConfig",
    "ActiveDynamicsTrainer",
    "ActorCriticTrainer",
    "BreakPolicy",
    "CheckpointFolder",
    "ConfigError",
    "DDPGConfig",
    "DDPGTrainer",
    "DQNConfig",
    "DQNTrainer",
    "DeviceLogHook",
    "DeviceParts",
    "DeviceReplayHook",
    "DurotaxisConfig",
    "DurotaxisTrainer",
    "FuelBreaksConfig",
    "FuelBreaksTrainer",
    "GroupAdam",
    "GuardedAdam",
    "GuardedStepper",
    "HybridPPOConfig",
    "HybridPPOTrainer",
    "IQNConfig",
    "IQNTrainer",
    "MarineACIQNConfig",
    "MarineACIQNTrainer",
    "MarineDDPGConfig",
    "MarineDDPGTrainer",
    "MarineDQNConfig",
    "MarineDQNTrainer",
    "MarineIQNConfig",
    "MarineIQNTrainer",
    "MarineRainbowConfig",
    "MarineRainbowTrainer",
    "MarineSACConfig",
    "MarineSACTrainer",
    "MinibatchHook",
    "NavigationFigures",
    "NumericalGuard",
    "OffPolicyConfig",
    "OffPolicyTrainer",
    "OptionsMarketConfig",
    "OptionsMarketTrainer",
    "PPOConfig",
    "PPOTrainer",
    "PlacementFigures",
    "PredictionFigures",
    "QRDQNConfig",
    "RainbowConfig",
    "RainbowTrainer",
    "RunFolderError",
    "RunResult",
    "SACConfig",
    "SACOptionsConfig",
    "SACOptionsTrainer",
    "SACTrainer",
    "Scenarios",
    "TD3Config",
    "TrainState",
    "TrainingDivergedError",
    "ValueTrainer",
    "make_actor",
    "make_break_policy",
    "make_colony_actor",
    "make_colony_critic",
    "make_critic",
    "make_deterministic_actor",
    "make_fuel_breaks_env",
    "make_hybrid_actor",
    "make_marine_env",
    "make_options_market_env",
    "make_q_policy",
    "make_quantile_policy",
    "make_rainbow_policy",
    "make_sac_actor",
    "make_sac_critic",
    "minibatches",
    "train",
    "use_device_parts",
]
