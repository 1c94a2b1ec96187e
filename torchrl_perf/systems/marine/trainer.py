"""Six agents that learn to navigate, each the package's own trainer on one policy that all vessels share."""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import nn
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase

from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.envs.marine import Curriculum, MarineNavigation
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.systems.marine.config import (
    MarineACIQNConfig,
    MarineConfig,
    MarineDDPGConfig,
    MarineDQNConfig,
    MarineIQNConfig,
    MarineRainbowConfig,
    MarineSACConfig,
)
from torchrl_perf.systems.marine.networks import make_marine_actor, make_marine_critic, make_marine_policy
from torchrl_perf.trainers.ac_iqn import ACIQNTrainer
from torchrl_perf.trainers.ddpg import DDPGTrainer
from torchrl_perf.trainers.dqn import DQNTrainer
from torchrl_perf.trainers.iqn import IQNTrainer
from torchrl_perf.trainers.off_policy import NOT_STORED, OffPolicyTrainer
from torchrl_perf.trainers.rainbow import RainbowTrainer
from torchrl_perf.trainers.sac import SACTrainer

__all__ = [
    "MarineACIQNTrainer",
    "MarineDDPGTrainer",
    "MarineDQNTrainer",
    "MarineIQNTrainer",
    "MarineRainbowTrainer",
    "MarineSACTrainer",
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


class MarineRun(OffPolicyTrainer):
    """What the six trainers add to those of the agents: the world, and what becomes of the vessels.

    Metrics, means over the interval: ``navigation/success``, ``navigation/collision`` and ``navigation/timeout``, each
    a share of the vessels that ended; ``navigation/colregs``, share of a vessel's steps with a penalty;
    ``navigation/active``, share of the places whose vessel is active; ``navigation/stage`` of the curriculum.
    """

    config: MarineConfig
    not_stored: ClassVar[tuple[NestedKey, ...]] = (
        *NOT_STORED,
        *("event", "colregs"),
        *(("next", "event"), ("next", "colregs")),
    )

    def make_env(self) -> EnvBase:
        """:func:`make_marine_env`."""
        return make_marine_env(self.config, self.device)

    def measure(self, batch: TensorDictBase) -> None:
        """Those of every trainer, and how the vessels ended."""
        super().measure(batch)
        following = cast("Mapping[str, Any]", batch.get("next"))
        if self.valid_key is None or following.get("event", None) is None:
            return
        valid = batch.get(self.valid_key)
        ended, event, add = valid & following["done"], following["event"], self.metrics.add
        for name, number in EVENTS.items():
            add(f"navigation/{name}", (event == number).float(), mask=ended)
        late = following["truncated"] & ~following["terminated"]
        add("navigation/timeout", late.float(), mask=ended)
        add("navigation/colregs", (following["colregs"] > 0).float(), mask=valid)
        add("navigation/active", valid.float())
        stage = getattr(getattr(self.env, "base_env", None), "stage", None)
        if stage is not None:
            add("navigation/stage", stage.float(), reduce="last")


class MarineDQNTrainer(MarineRun, DQNTrainer):
    """:class:`DQNTrainer` on vessels that share its policy; arguments, attributes and errors are its own."""

    config: MarineDQNConfig

    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """:func:`make_marine_policy`."""
        return make_marine_policy(env, self.config)


class MarineIQNTrainer(MarineRun, IQNTrainer):
    """:class:`IQNTrainer` on vessels that share its policy; arguments, attributes and errors are its own."""

    config: MarineIQNConfig

    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """:func:`make_marine_policy`."""
        return make_marine_policy(env, self.config)


class MarineRainbowTrainer(MarineRun, RainbowTrainer):
    """:class:`RainbowTrainer` on vessels that share its policy; arguments, attributes and errors are its own."""

    config: MarineRainbowConfig

    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """:func:`make_marine_policy`."""
        return make_marine_policy(env, self.config)


class _MarineActorCritic(MarineRun):
    """Actor and critic on encoders of their own."""

    def make_actor(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """:func:`make_marine_actor`."""
        return make_marine_actor(action, self.config, getattr(self, "squash", "tanh"))

    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """:func:`make_marine_critic`."""
        return make_marine_critic(action, self.config)


class MarineDDPGTrainer(_MarineActorCritic, DDPGTrainer):
    """:class:`DDPGTrainer` on vessels that share its policy; arguments, attributes and errors are its own."""

    config: MarineDDPGConfig


class MarineACIQNTrainer(_MarineActorCritic, ACIQNTrainer):
    """:class:`ACIQNTrainer` on vessels that share its policy; arguments, attributes and errors are its own."""

    config: MarineACIQNConfig


class MarineSACTrainer(_MarineActorCritic, SACTrainer):
    """:class:`SACTrainer` on vessels that share its policy; arguments, attributes and errors are its own."""

    config: MarineSACConfig
