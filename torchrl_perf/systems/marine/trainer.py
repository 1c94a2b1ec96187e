"""Six agents that learn to navigate: each is an algorithm of the package with one policy that all vessels share."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import nn
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase

from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.envs.marine import Curriculum, MarineNavigation
from torchrl_perf.modules.deterministic import Squash
from torchrl_perf.systems.marine.config import MarineConfig
from torchrl_perf.systems.marine.networks import make_marine_actor, make_marine_critic, make_marine_policy
from torchrl_perf.trainers.ac_iqn import ACIQN
from torchrl_perf.trainers.ddpg import DDPG
from torchrl_perf.trainers.dqn import DQN
from torchrl_perf.trainers.iqn import IQN
from torchrl_perf.trainers.off_policy.task import NOT_STORED, Task, both
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.rainbow import Rainbow
from torchrl_perf.trainers.sac import SAC

__all__ = [
    "MarineACIQNTrainer",
    "MarineDDPGTrainer",
    "MarineDQNTrainer",
    "MarineIQNTrainer",
    "MarineRainbowTrainer",
    "MarineSACTrainer",
    "MarineTask",
    "make_marine_env",
]

DISCRETE = ("iqn", "dqn", "rainbow")
EVENTS = {"success": 1, "collision": 2}  # of ("next", "event")


def make_marine_env(config: MarineConfig, device: torch.device, **options: Any) -> AgentStreams:
    """The world of a navigation run, a row for each place of a vessel: batch ``[num_envs * max_robots]``.

    Args:
        config: world, curriculum and agent, which says what kind of action there is.
        device: of everything.
        **options: replace arguments of :class:`~torchrl_perf.envs.MarineNavigation`.
    """
    stages = config.stages()
    whole = {name: tuple(map(int, stages[name])) for name in ("frames", "robots", "obstacles", "cores")}
    arguments: dict[str, Any] = {
        "max_robots": config.max_robots,
        "max_obstacles": config.max_obstacles,
        "max_cores": config.max_cores,
        "action": "discrete" if config.agent in DISCRETE else "continuous",
        "curriculum": Curriculum(**whole, distance=stages["distance"]),
        "observation_noise": config.observation_noise,
        "colregs": config.colregs,
        "max_episode_steps": config.max_episode_steps,
        "device": device,
    }
    return AgentStreams(MarineNavigation(config.num_envs, **{**arguments, **options}))


class MarineTask(Task):
    """The world of the vessels, and metrics of their outcomes.

    Metrics, means over the interval: ``navigation/success``, ``navigation/collision`` and ``navigation/timeout``, each
    a share of the vessels that ended; ``navigation/colregs``, share of a vessel's steps with a penalty;
    ``navigation/active``, share of the places whose vessel is active; ``navigation/stage`` of the curriculum.
    """

    not_stored: ClassVar[tuple[NestedKey, ...]] = (*NOT_STORED, *both(("event", "colregs")))
    metric_names = (
        *("navigation/success", "navigation/collision", "navigation/timeout"),
        *("navigation/colregs", "navigation/active", "navigation/stage"),
    )

    def make_env(self, config: Any, device: torch.device) -> EnvBase:
        """The world that the config describes."""
        return make_marine_env(config, device)

    def measure(self, trainer: Any, batch: TensorDictBase) -> None:
        """Adds the outcomes of the vessels; worlds without active vessels do not count."""
        following, add = cast("Mapping[str, Any]", batch.get("next")), trainer.metrics.add
        if trainer.valid_key is None or following.get("event", None) is None:
            return
        valid = batch.get(trainer.valid_key)
        ended, event = valid & following["done"], following["event"]
        for name, number in EVENTS.items():
            add(f"navigation/{name}", (event == number).float(), mask=ended)
        late = following["truncated"] & ~following["terminated"]
        add("navigation/timeout", late.float(), mask=ended)
        add("navigation/colregs", (following["colregs"] > 0).float(), mask=valid)
        add("navigation/active", valid.float())
        stage = getattr(getattr(trainer.env, "base_env", None), "stage", None)
        if stage is not None:
            add("navigation/stage", stage.float(), reduce="last")


def _networks(squash: Squash) -> dict[str, Callable[..., nn.Module]]:
    """Actor and critic on separate encoders, as an algorithm makes them."""

    def make_actor(observation: TensorSpec, action: TensorSpec, config: Any) -> nn.Module:
        return make_marine_actor(action, config, squash)

    def make_critic(observation: TensorSpec, action: TensorSpec, config: Any) -> nn.Module:
        return make_marine_critic(action, config)

    return {"make_actor": make_actor, "make_critic": make_critic}


class ValueAgent:
    """The part of a trainer that gives an algorithm of action values the vessels' networks and world."""

    task_class = MarineTask
    made_by: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {"make_policy": make_marine_policy}


class ActorCriticAgent:
    """The same for an algorithm of actor and critic, each on an encoder of its own."""

    task_class = MarineTask
    made_by = _networks("tanh")


class MarineDQNTrainer(ValueAgent, OffPolicyTrainer):
    """:class:`DQN` on vessels that share its policy; the arguments are those of :class:`DQNTrainer`."""

    algorithm_class = DQN


class MarineIQNTrainer(ValueAgent, OffPolicyTrainer):
    """:class:`IQN` on vessels that share its policy; the arguments are those of :class:`IQNTrainer`."""

    algorithm_class = IQN


class MarineRainbowTrainer(ValueAgent, OffPolicyTrainer):
    """:class:`Rainbow` on vessels that share its policy; the arguments are those of :class:`RainbowTrainer`."""

    algorithm_class = Rainbow


class MarineDDPGTrainer(ActorCriticAgent, OffPolicyTrainer):
    """:class:`DDPG` on vessels that share its policy; the arguments are those of :class:`DDPGTrainer`."""

    algorithm_class = DDPG


class MarineACIQNTrainer(ActorCriticAgent, OffPolicyTrainer):
    """:class:`ACIQN` on vessels that share its policy; the arguments are those of :class:`ACIQNTrainer`."""

    algorithm_class = ACIQN
    made_by = _networks("atan")


class MarineSACTrainer(ActorCriticAgent, OffPolicyTrainer):
    """:class:`SAC` on vessels that share its policy; the arguments are those of :class:`SACTrainer`."""

    algorithm_class = SAC
