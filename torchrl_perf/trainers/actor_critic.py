"""Actor and critic of a PPO run, as TensorDict modules."""

import torch
from tensordict.nn import NormalParamExtractor
from torch import nn
from torchrl.data import Bounded, Categorical
from torchrl.envs import EnvBase
from torchrl.modules import IndependentNormal, ValueOperator

from torchrl_perf.modules import DeviceActor, FusedMLP, GumbelCategorical
from torchrl_perf.trainers.config import PPOConfig


class _StateIndependentScale(nn.Module):
    """The network's location, and a learnt log-scale independent of the state, as usual for PPO (arXiv:2006.05990)."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(size, device=device))

    def forward(self, loc: torch.Tensor) -> torch.Tensor:
        return torch.cat([loc, self.log_scale.expand_as(loc)], -1)


def make_actor(env: EnvBase, config: PPOConfig) -> DeviceActor:
    """A policy for the env's action spec: reads ``observation``, writes ``action`` and ``action_log_prob``.

    Discrete (index) actions get a categorical over logits; bounded continuous ones a normal with a learnt scale, in the
    action's own units (the env clips, as Gymnasium's do).

    Raises:
        ValueError: for another kind of action spec.
    """
    spec = env.action_spec
    size = env.observation_spec["observation"].shape[-1]
    options = {
        "hidden_size": config.hidden_size,
        "activation": config.activation,
        "precision": config.precision,
        "output_gain": 0.01,
        "device": env.device,
    }
    if isinstance(spec, Categorical):
        net = FusedMLP(size, spec.space.n, **options)
        keys, distribution = ["logits"], GumbelCategorical
    elif isinstance(spec, Bounded):
        actions = spec.shape[-1]
        net = nn.Sequential(
            FusedMLP(size, actions, **options), _StateIndependentScale(actions, env.device), NormalParamExtractor("exp")
        )
        keys, distribution = ["loc", "scale"], IndependentNormal
    else:
        raise ValueError(
            f"action_spec: expected Categorical (index) or Bounded, received {type(spec).__name__}. Remedy: pass "
            "actor=."
        )
    return DeviceActor(net, distribution_class=distribution, param_keys=keys, spec=env.full_action_spec)


def make_critic(env: EnvBase, config: PPOConfig) -> ValueOperator:
    """A value network: reads ``observation``, writes ``state_value [*, 1]``."""
    size = env.observation_spec["observation"].shape[-1]
    net = FusedMLP(
        size,
        1,
        hidden_size=config.hidden_size,
        activation=config.activation,
        precision=config.precision,
        device=env.device,
    )
    return ValueOperator(net, in_keys=["observation"])
