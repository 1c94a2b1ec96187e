"""Actor and critic of a PPO run, as TensorDict modules."""

from typing import Any, cast

import torch
from tensordict.nn import NormalParamExtractor
from torch import nn
from torchrl.envs import EnvBase
from torchrl.modules import ValueOperator

from torchrl_perf.modules import DeviceActor, FusedMLP
from torchrl_perf.trainers.normalization import normalized
from torchrl_perf.trainers.spaces import action_choices, observation_inputs


class _StateIndependentScale(nn.Module):
    """The network's location, and a learnt log-scale independent of the state, as usual for PPO (arXiv:2006.05990)."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(size, device=device))

    def forward(self, loc: torch.Tensor) -> torch.Tensor:
        return torch.cat([loc, self.log_scale.expand_as(loc)], -1)


def make_actor(env: EnvBase, config: Any) -> DeviceActor:
    """A policy for the env's action spec: writes ``action`` and ``action_log_prob``.

    It reads ``observation``, or the vectors of :func:`~torchrl_perf.trainers.spaces.observation_inputs`. Discrete
    (index) actions get a categorical over logits, several of them (``MultiCategorical``) one each; bounded continuous
    ones a normal with a learnt scale, in the action's own units (the env clips, as Gymnasium's do).

    Raises:
        ValueError: for another kind of action spec, and an env without a vector to read.
    """
    inputs, choices = observation_inputs(env), action_choices(env)
    net: nn.Module = FusedMLP(
        inputs.size,
        choices.features,
        hidden_size=config.hidden_size,
        activation=config.activation,
        precision=config.precision,
        output_gain=0.01,
        device=env.device,
    )
    if not choices.discrete:
        scale = _StateIndependentScale(choices.features, cast("torch.device", env.device))
        net = nn.Sequential(net, scale, NormalParamExtractor("exp"))
    net = normalized(net, inputs.keys, inputs.size, config, env.device)
    return DeviceActor(
        inputs.network(net),
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
        hidden_size=config.hidden_size,
        activation=config.activation,
        precision=config.precision,
        device=env.device,
    )
    net = normalized(net, inputs.keys, inputs.size, config, env.device)
    return ValueOperator(inputs.network(net), in_keys=inputs.keys)
