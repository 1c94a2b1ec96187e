"""Networks of the navigation agents: one encoder of a vessel and the objects around it below each of their heads."""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded, TensorSpec
from torchrl.envs import EnvBase

from torchrl_perf.envs.marine.sensing import OBJECT_SCALE, SELF_SCALE, split_observation
from torchrl_perf.modules import (
    CategoricalMLP,
    DeterministicActor,
    DeviceActor,
    EnsembleQ,
    ImplicitQuantileCritic,
    ImplicitQuantileMLP,
    MixedSequential,
    SetEncoder,
    SquashedNormal,
    SquashedNormalHead,
)
from torchrl_perf.modules.aligned import AlignedLinear
from torchrl_perf.modules.bounds import action_bounds
from torchrl_perf.modules.deterministic import Squash
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.values.value_head import ValueHead
from torchrl_perf.objectives.sac import VALUE_KEY
from torchrl_perf.systems.marine.config import MarineConfig, MarineIQNConfig, MarineRainbowConfig, MarineSACConfig
from torchrl_perf.trainers.off_policy.value_based import epsilon_greedy

__all__ = ["MarineTrunk", "TrunkCritic", "TrunkValues", "make_marine_actor", "make_marine_critic", "make_marine_policy"]


class MarineTrunk(nn.Module):
    """Features of an observation of :class:`~torchrl_perf.envs.MarineNavigation`, by a :class:`SetEncoder`.

    They do not depend on the order of the objects nor on what is in places without one.

    Args:
        config: gives the widths, the pool and the precision.
        device: of the parameters.

    Attributes:
        out_features: F, the config's ``hidden_size``.
    """

    def __init__(self, config: MarineConfig, device: torch.device | None = None) -> None:
        super().__init__()
        heads = 4 if config.object_size % 4 == 0 else 1
        self.encoder = SetEncoder(
            len(SELF_SCALE),
            len(OBJECT_SCALE),
            self_size=config.self_size,
            object_sizes=(max(1, config.object_size // 5), config.object_size),
            joint_sizes=(config.hidden_size,),
            pool=config.pool,
            num_heads=heads,
            precision=config.precision,
            device=device,
        )
        self.out_features = self.encoder.out_features

    def forward(self, observation: Tensor) -> Tensor:
        """``[*, 37]`` -> ``[*, F]``."""
        return self.encoder(*split_observation(observation))


class TrunkValues(nn.Module):
    """A value for each of D actions, from features.

    Args:
        trunk: makes features ``[*, F]`` of the observation.
        features: F.
        num_actions: D.
        **options: of the :class:`~torchrl_perf.modules.values.value_head.ValueHead`.
    """

    def __init__(self, trunk: nn.Module, features: int, num_actions: int, **options: Any) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(features, num_actions, 1, has_trunk=True, **options)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Observation -> ``[*, D]``."""
        return self.head(self.trunk(*inputs)).squeeze(-1)


class TrunkCritic(nn.Module):
    """K values of a continuous action, from features that the critics share.

    Args:
        trunk: makes features ``[*, F]`` of the observation.
        head: maps features and action ``[*, D]`` to ``[*, K]``.
    """

    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Observation and action -> ``[*, K]``."""
        return self.head(self.trunk(observation), action)


def make_marine_policy(env: EnvBase, config: MarineConfig) -> EpsilonGreedy:
    """Epsilon-greedy on the values that the agent learns: reads ``observation``, writes ``action``.

    Args:
        env: streams of vessels with discrete actions.
        config: of DQN, IQN or Rainbow.

    Raises:
        ValueError: for continuous actions.
    """
    trunk = MarineTrunk(config, env.device)
    kind: Callable[..., nn.Module] = functools.partial(TrunkValues, trunk)
    if isinstance(config, MarineIQNConfig):
        kind = functools.partial(
            ImplicitQuantileMLP,
            trunk=trunk,
            num_cosines=config.num_cosines,
            num_action_taus=config.num_action_taus,
            risk=config.distortion,
        )
    elif isinstance(config, MarineRainbowConfig):
        kind = functools.partial(
            CategoricalMLP,
            trunk=trunk,
            num_atoms=config.num_atoms,
            v_min=config.v_min,
            v_max=config.v_max,
            noisy=None if config.noisy == "none" else config.noisy,
        )

    def make_network(size: int, num_actions: int, **options: Any) -> nn.Module:
        return kind(trunk.out_features, num_actions, dueling=cast("Any", config).dueling, **options)

    return epsilon_greedy(env, cast("Any", config), make_network)


def make_marine_actor(action: TensorSpec, config: MarineConfig, squash: Squash = "tanh") -> nn.Module:
    """The policy of SAC (a squashed normal) or of DDPG and AC-IQN (deterministic), on an encoder of its own.

    Args:
        action: spec ``[*, D]``, continuous with finite bounds.
        config: of one of them.
        squash: of the deterministic policy's output into the bounds.

    Raises:
        ValueError: for another kind of action.
    """
    if not isinstance(action, Bounded) or not action.dtype.is_floating_point:
        raise ValueError(
            f"action_spec: expected continuous actions with finite bounds for {config.agent}, received "
            f"{type(action).__name__} of {action.dtype}. Remedy: MarineNavigation(action='continuous'), or one of the "
            "agents iqn, dqn and rainbow."
        )
    device = cast("Any", action.device)
    trunk, size = MarineTrunk(config, device), action.shape[-1]

    def layers(outputs: int) -> list[nn.Module]:
        active = nn.ReLU() if config.activation == "relu" else nn.Tanh()
        hidden = config.hidden_size
        return [AlignedLinear(hidden, hidden), active, AlignedLinear(hidden, outputs)]

    if isinstance(config, MarineSACConfig):
        head = SquashedNormalHead(*action_bounds(action))
        net = MixedSequential(*layers(2 * size), head, precision=config.precision).to(device)
        return DeviceActor(
            nn.Sequential(trunk, net),
            distribution_class=SquashedNormal,
            param_keys=SquashedNormalHead.param_keys,
            spec=action,
        )
    parts = layers(size)
    with torch.no_grad():
        # far from the bounds at the start, where the squash has a gradient
        cast("Any", parts[-1]).weight.mul_(0.1)
    net = MixedSequential(*parts, precision=config.precision).to(device)
    return DeterministicActor(nn.Sequential(trunk, net), spec=action, squash=squash)


def make_marine_critic(action: TensorSpec, config: MarineConfig) -> nn.Module:
    """The critic of AC-IQN (quantiles), or the K values of SAC and DDPG, on an encoder of its own.

    Args:
        action: spec ``[*, D]``.
        config: of one of them.
    """
    device = cast("Any", action.device)
    trunk, size = MarineTrunk(config, device), action.shape[-1]
    options: dict[str, Any] = {"activation": config.activation, "precision": config.precision, "device": device}
    if config.agent == "ac-iqn":
        return ImplicitQuantileCritic(
            trunk.out_features,
            size,
            num_cosines=cast("Any", config).num_cosines,
            trunk=trunk,
            hidden_size=config.hidden_size,
            **options,
        )
    count = config.num_critics if isinstance(config, MarineSACConfig) else 1
    head = EnsembleQ(count, trunk.out_features + size, hidden_sizes=(config.hidden_size,), **options)
    return TensorDictModule(TrunkCritic(trunk, head), in_keys=["observation", "action"], out_keys=[VALUE_KEY])
