"""Navigation of several vessels among currents and obstacles (the env is in ``torchrl_perf.envs.marine``)."""

from torchrl_perf.systems.marine.config import (
    MarineACIQNConfig,
    MarineDDPGConfig,
    MarineDQNConfig,
    MarineIQNConfig,
    MarineRainbowConfig,
    MarineSACConfig,
)
from torchrl_perf.systems.marine.evaluation import NavigationFigures, Scenarios
from torchrl_perf.systems.marine.picture import animate, draw_trajectories
from torchrl_perf.systems.marine.presets import (
    MARINE_ACIQN_PRESETS,
    MARINE_DDPG_PRESETS,
    MARINE_DQN_PRESETS,
    MARINE_IQN_PRESETS,
    MARINE_RAINBOW_PRESETS,
    MARINE_SAC_PRESETS,
)
from torchrl_perf.systems.marine.trainer import (
    MarineACIQNTrainer,
    MarineDDPGTrainer,
    MarineDQNTrainer,
    MarineIQNTrainer,
    MarineRainbowTrainer,
    MarineSACTrainer,
    make_marine_env,
)

__all__ = [
    "MARINE_ACIQN_PRESETS",
    "MARINE_DDPG_PRESETS",
    "MARINE_DQN_PRESETS",
    "MARINE_IQN_PRESETS",
    "MARINE_RAINBOW_PRESETS",
    "MARINE_SAC_PRESETS",
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
    "NavigationFigures",
    "Scenarios",
    "animate",
    "draw_trajectories",
    "make_marine_env",
]
