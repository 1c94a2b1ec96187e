"""The policy and the landscapes from the settings of a run."""

from typing import Any

from torchrl_perf.systems.fuel_breaks.config import FuelBreaksConfig
from torchrl_perf.systems.fuel_breaks.networks import BreakPolicy, make_break_policy
from torchrl_perf.systems.fuel_breaks.trainer import make_fuel_breaks_env
from torchrl_perf.trainers.blueprints import Blueprint

__all__ = ["FUEL_BREAKS"]


def _policy(specs: Any, config: FuelBreaksConfig) -> BreakPolicy:
    # the planes of the landscapes are a part of what the network reads; they follow from the settings
    return make_break_policy(make_fuel_breaks_env(config.for_rows(1), specs.device), config)


FUEL_BREAKS = Blueprint(_policy, env=make_fuel_breaks_env)
