"""How policy and env of a run are made again from its settings, when the trainer is gone."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_perf.modules.option_actor import OptionPolicy
from torchrl_perf.modules.option_set import OptionSet
from torchrl_perf.trainers.actor_critic import make_actor, make_hybrid_actor
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.dqn import make_q_policy
from torchrl_perf.trainers.iqn import make_quantile_policy
from torchrl_perf.trainers.memory import make_trunk, remembers
from torchrl_perf.trainers.off_policy.deterministic import make_deterministic_actor
from torchrl_perf.trainers.pqn import make_pqn_policy
from torchrl_perf.trainers.rainbow import make_rainbow_policy
from torchrl_perf.trainers.sac import make_sac_actor
from torchrl_perf.trainers.sac_options import OptionNetworks, task_options
from torchrl_perf.trainers.spaces import continuous_action, readable_observation, vector_observation
from torchrl_perf.trainers.tasks import make_env
from torchrl_perf.transforms import OptionState

if TYPE_CHECKING:
    from torchrl_perf.envs.from_callable import Made

__all__ = ["Blueprint", "blueprint_of", "make_option_policy"]

Weights = Mapping[str, tuple[str, str]]
"""For each module of a policy, by its path within it: the part of a checkpoint that holds it, and its path there."""


@dataclass(frozen=True)
class Blueprint:
    """What a run's policy and env are made of, apart from its trainer.

    A config names one in ``blueprint_in``.
    """

    policy: Callable[[Any, Any], nn.Module]
    """Makes the policy that acts, of what has the specs of an env and of the config, as the trainer does."""
    weights: Weights = field(default_factory=lambda: {"": ("policy", "")})
    """Where a checkpoint holds its parameters."""
    env: Callable[..., "EnvBase | Made"] = make_env
    """Makes the envs of a config and a device in which its policy is judged, or what makes them; further arguments
    replace those of the env."""
    evaluation: Callable[[Any], Any] | None = None
    """Makes what evaluates a trainer during its run, with ``row()`` and ``close()``; None where returns of episodes do.
    """
    on_memory: Weights | None = None
    """As ``weights``, of a policy on a memory, where that differs."""

    def weights_of(self, config: Any) -> Weights:
        """Where a checkpoint of a run with this config holds the parameters of its policy."""
        return self.weights if self.on_memory is None or not remembers(config) else self.on_memory


def blueprint_of(config: RunConfig) -> Blueprint:
    """How policy and env of a config's run are made again.

    Raises:
        LookupError: for a config without a blueprint.
    """
    module, _, name = config.blueprint_in.partition(":")
    if not name:
        raise LookupError(
            f"{type(config).__name__}: expected blueprint_in='module:NAME' of a Blueprint, received "
            f"{config.blueprint_in!r}. Remedy: one like those in torchrl_perf/trainers/blueprints.py."
        )
    return getattr(importlib.import_module(f"torchrl_perf.{module}"), name)


def with_specs(
    make: Callable[..., nn.Module], *more: Any, read: Callable[[Any], TensorSpec] = readable_observation
) -> Callable[[Any, Any], nn.Module]:
    """Makes an actor of the specs of observation and action, as actor-critics do.

    Args:
        make: called with both, the config, and ``more``.
        *more: further arguments.
        read: finds the spec of what is read.
    """

    def make_policy(specs: Any, config: Any) -> nn.Module:
        actor = make(read(specs), continuous_action(specs), config, *more)
        trunk = make_trunk(specs, config)
        return TensorDictSequential(TensorDictSequential(*trunk), actor) if trunk else actor

    return make_policy


def make_option_policy(specs: Any, config: Any, networks: OptionNetworks, options: OptionSet) -> OptionPolicy:
    """The controller of options and its actor, as SAC with options makes them.

    Args:
        specs: of an env that has the state of the options.
        config: of the run.
        networks: makes both.
        options: names and rules.
    """
    actor = networks.actor(vector_observation(specs), continuous_action(specs), options)
    selector = networks.choice(specs, options, specs.device)
    return OptionPolicy(networks.controller(selector, options, specs.fake_tensordict()), actor)


def _ferry_policy(specs: Any, config: Any) -> OptionPolicy:
    return make_option_policy(specs, config, OptionNetworks(config), task_options(config.env))


def _ferry(config: Any, device: torch.device, **arguments: Any) -> EnvBase:
    options, made = task_options(config.env), make_env(config, device, **arguments)
    assert made.env is not None  # a task of the package, or it has no options
    return TransformedEnv(made.env, OptionState(options.num_options))


ACTOR: Weights = {"": ("actor", "")}
OF_LOSS: Weights = {"": ("loss", "actor_network")}
OF_MEMORY: Weights = {"module.0": ("loss", "memory"), "module.1": ("loss", "actor_network")}
OPTIONS: Weights = {"controller": ("loss", "option.actor_network"), "actor": ("loss", "actor_network")}

PPO = Blueprint(make_actor, ACTOR)
HYBRID_PPO = Blueprint(make_hybrid_actor, ACTOR)
PQN = Blueprint(make_pqn_policy)
DQN = Blueprint(make_q_policy)
QUANTILES = Blueprint(make_quantile_policy)
RAINBOW = Blueprint(make_rainbow_policy)
SAC = Blueprint(with_specs(make_sac_actor), OF_LOSS, on_memory=OF_MEMORY)
DDPG = Blueprint(with_specs(make_deterministic_actor), OF_LOSS, on_memory=OF_MEMORY)
AC_IQN = Blueprint(with_specs(make_deterministic_actor, "atan", read=vector_observation), OF_LOSS)
SAC_OPTIONS = Blueprint(_ferry_policy, OPTIONS, _ferry)
