"""The vessels' policy and world from the settings of a run."""

from typing import Any

import torch
from torch import nn

from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.envs.marine import Curriculum
from torchrl_perf.modules.deterministic import Squash
from torchrl_perf.systems.marine.networks import make_marine_actor, make_marine_policy
from torchrl_perf.systems.marine.trainer import make_marine_env
from torchrl_perf.trainers.blueprints import OF_LOSS, Blueprint
from torchrl_perf.trainers.spaces import continuous_action

__all__ = ["AC_IQN", "DDPG", "SAC", "VALUES"]


def _actor(specs: Any, config: Any, squash: Squash = "tanh") -> nn.Module:
    return make_marine_actor(continuous_action(specs), config, squash)


def _implicit_actor(specs: Any, config: Any) -> nn.Module:
    return _actor(specs, config, "atan")


def _last_stage(config: Any, device: torch.device, **options: Any) -> AgentStreams:
    """The world of the last stage of the run's curriculum, whatever number of frames the run has come to."""
    stages = config.stages()
    last = {name: int(stages[name][-1]) for name in ("robots", "obstacles", "cores")}
    curriculum = Curriculum.fixed(**last, distance=stages["distance"][-1])
    return make_marine_env(config, device, **{"curriculum": curriculum, **options})


VALUES = Blueprint(make_marine_policy, env=_last_stage)
SAC = DDPG = Blueprint(_actor, OF_LOSS, _last_stage)
AC_IQN = Blueprint(_implicit_actor, OF_LOSS, _last_stage)
