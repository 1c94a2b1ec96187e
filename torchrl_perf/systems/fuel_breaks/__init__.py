"""Where to clear fuel so that the least forest burns: a convolutional DQN, and a policy that places all at once."""

from torchrl_perf.systems.fuel_breaks.config import FUEL_BREAKS_PRESETS, FuelBreaksConfig
from torchrl_perf.systems.fuel_breaks.evaluation import PlacementFigures
from torchrl_perf.systems.fuel_breaks.networks import BreakPolicy, make_break_policy
from torchrl_perf.systems.fuel_breaks.one_shot import OneShotConfig, OneShotTrainer
from torchrl_perf.systems.fuel_breaks.one_shot_config import ONE_SHOT_PRESETS, FuelBreaksOneShotConfig
from torchrl_perf.systems.fuel_breaks.one_shot_trainer import (
    FuelBreaksOneShotTrainer,
    PlacementPolicy,
    make_one_shot_env,
)
from torchrl_perf.systems.fuel_breaks.picture import FireMap, draw_fire_maps, fire_maps, record_breaks
from torchrl_perf.systems.fuel_breaks.trainer import FuelBreaksTrainer, make_fuel_breaks_env

__all__ = [
    "FUEL_BREAKS_PRESETS",
    "ONE_SHOT_PRESETS",
    "BreakPolicy",
    "FireMap",
    "FuelBreaksConfig",
    "FuelBreaksOneShotConfig",
    "FuelBreaksOneShotTrainer",
    "FuelBreaksTrainer",
    "OneShotConfig",
    "OneShotTrainer",
    "PlacementFigures",
    "PlacementPolicy",
    "draw_fire_maps",
    "fire_maps",
    "make_break_policy",
    "make_fuel_breaks_env",
    "make_one_shot_env",
    "record_breaks",
]
