"""Navigation of several surface vehicles."""

from torchrl_perf.envs.marine.curriculum import Curriculum, Stage
from torchrl_perf.envs.marine.env import MarineNavigation, MarineOptions
from torchrl_perf.envs.marine.recording import Recording, record
from torchrl_perf.envs.marine.scenarios import scenario_set
from torchrl_perf.envs.marine.scripted import scripted_action

__all__ = [
    "Curriculum",
    "MarineNavigation",
    "MarineOptions",
    "Recording",
    "Stage",
    "record",
    "scenario_set",
    "scripted_action",
]
