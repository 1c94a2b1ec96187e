"""Actor and critic of a PPO run, as TensorDict modules."""

from typing import Any, cast

import torch
from tensordict.nn import NormalParamExtractor
from torch import nn
from torchrl.data import MultiCategorical
from torchrl.envs import EnvBase
from torchrl.modules import ValueOperator

from torchrl_perf.modules import DeviceActor, FusedMLP
from torchrl_perf.modules.hybrid_actor import HybridActor, hybrid_features
from torchrl_perf.trainers.normalization import normalized
from torchrl_perf.trainers.spaces import action_choices, observation_inputs


class _StateIndependentScale(nn.Module):
    """The network's location, and a learnt log-scale independent of the state, as usual for PPO (arXiv:2006.05990)."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(size, device=device))

    def forward(self, loc: torch.Tensor) -> torch.Tensor:
        return torch.cat([loc, self.log_scale.expand_as(loc)], -1)


def make_actor(env: EnvBase, config: Any) -> DeviceActor | HybridActor:
    """A policy for the env's action spec: writes ``action`` and ``action_log_prob``.

    It reads what :func:`~torchrl_perf.trainers.spaces.observation_inputs` finds. Discrete (index) actions get a
    categorical over logits, several of them (``MultiCategorical``) one each; continuous ones a normal with a learnt
    scale, in the action's own units (the env clips, as Gymnasium's do); an action of several parts
    :func:`make_hybrid_actor`.

    Raises:
        ValueError: for another kind of action spec, and an env without an observation to read.
    """
    if env.action_keys != ["action"]:
        return make_hybrid_actor(env, config)
    inputs, choices = observation_inputs(env), action_choices(env)
    net: nn.Module = FusedMLP(
        inputs.size,
        choices.features,
        activation=config.activation,
        precision=config.precision,
        output_gain=0.01,
        device=env.device,
        **config.layers,
    )
    if not choices.discrete:
        scale = _StateIndependentScale(choices.features, cast("torch.device", env.device))
        net = nn.Sequential(net, scale, NormalParamExtractor("exp"))
    net = normalized(net, inputs, config, env.device)
    return DeviceActor(
        inputs.network(net, precision=config.precision, device=env.device),
        distribution_class=cast("Any", choices.distribution),
        param_keys=["logits"] if choices.discrete else ["loc", "scale"],
        in_keys=inputs.keys,
        spec=env.full_action_spec,
    )


def make_critic(env: EnvBase, config: Any) -> ValueOperator:
    """A value network: reads what :func:`make_actor` reads, writes ``state_value [*, 1]``."""
    inputs = observation_inputs(env)
    net: nn.Module = FusedMLP(
        inputs.size,
        1,
        activation=config.activation,
        precision=config.precision,
        device=env.device,
        **config.critic_layers,
    )
    net = normalized(net, inputs, config, env.device)
    network = inputs.network(net, precision=config.precision, device=env.device)
    return ValueOperator(network, in_keys=inputs.keys)


def make_hybrid_actor(env: EnvBase, config: Any) -> HybridActor:
    """A policy for the env's action spec: writes each part of the action and log-probabilities.

    It reads what :func:`~torchrl_perf.trainers.spaces.observation_inputs` finds.

    Raises:
        ValueError: for a part that is neither Categorical (index) nor floating-point Bounded or Unbounded, and an env
            without an observation to read.
    """
    spec = env.full_action_spec
    for key, leaf in spec.items(True, True):
        if isinstance(leaf, MultiCategorical):
            raise ValueError(
                f"action_spec: expected Categorical (index), Bounded or Unbounded parts, received MultiCategorical at "
                f"{key!r}. Remedy: a Categorical for each choice, PPOTrainer for an action of choices alone, or actor=."
            )
    inputs = observation_inputs(env)
    network: nn.Module = FusedMLP(
        inputs.size,
        hybrid_features(spec),
        activation=config.activation,
        precision=config.precision,
        output_gain=0.01,
        device=env.device,
        **config.layers,
    )
    network = normalized(network, inputs, config, env.device)
    network = inputs.network(network, precision=config.precision, device=env.device)
    return HybridActor(network, spec=spec, in_keys=inputs.keys)
