"""The policy that places all breaks at once, and its landscapes, from the settings of a run."""

from torchrl_perf.systems.fuel_breaks.one_shot_trainer import make_one_shot_env, make_placement_policy
from torchrl_perf.trainers.blueprints import Blueprint

__all__ = ["ONE_SHOT"]

ONE_SHOT = Blueprint(make_placement_policy, env=make_one_shot_env)
