"""The policy and the colony from the settings of a run."""

from typing import Any

import torch

from torchrl_perf.envs.durotaxis import Durotaxis
from torchrl_perf.modules import HybridActor
from torchrl_perf.systems.durotaxis.config import DurotaxisConfig
from torchrl_perf.systems.durotaxis.networks import make_colony_actor
from torchrl_perf.systems.durotaxis.stages import last_stage
from torchrl_perf.trainers.blueprints import ACTOR, Blueprint

__all__ = ["COLONY", "make_colony"]


def make_colony(config: DurotaxisConfig, device: torch.device, **options: Any) -> Durotaxis:
    """The colony as a config describes it, from its last stage on.

    Args:
        config: task, substrate, curriculum.
        device: of everything.
        **options: replace arguments of :class:`~torchrl_perf.envs.Durotaxis`.
    """
    arguments: dict[str, Any] = {
        "reward_mode": config.reward_mode,
        "max_episode_steps": config.max_episode_steps,
        "actions": config.actions,
        "curriculum": last_stage(config),
        "device": device,
        "size": (config.width, config.height),
        "critical_nodes": config.critical_nodes,
        "slope": config.slope,
        "intercept": config.intercept,
        "field": config.field,
        "delete_max": config.delete_max,
    }
    return Durotaxis(config.num_envs, **{**arguments, **options})


def _policy(specs: Any, config: DurotaxisConfig) -> HybridActor:
    return make_colony_actor(specs, config, slots=config.critical_nodes)


COLONY = Blueprint(_policy, ACTOR, make_colony)
