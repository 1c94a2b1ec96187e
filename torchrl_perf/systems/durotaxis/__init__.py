"""A colony of cells that grows, divides and follows the stiffness of its substrate, by hybrid-action PPO."""

from torchrl_perf.systems.durotaxis.config import DUROTAXIS_PRESETS, DurotaxisConfig
from torchrl_perf.systems.durotaxis.networks import make_colony_actor, make_colony_critic
from torchrl_perf.systems.durotaxis.picture import ColonyRecording, draw_colony, record_colony, recorded_colony
from torchrl_perf.systems.durotaxis.trainer import DurotaxisTrainer

__all__ = [
    "DUROTAXIS_PRESETS",
    "ColonyRecording",
    "DurotaxisConfig",
    "DurotaxisTrainer",
    "draw_colony",
    "make_colony_actor",
    "make_colony_critic",
    "record_colony",
    "recorded_colony",
]
