"""Batches and TorchRL's own networks that the cells of the losses are made of."""

from functools import cache
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import (
    MLP,
    Actor,
    IndependentNormal,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.envs.device_env import DeviceEnv

NUM_ENVS, NUM_STEPS = 6, 8
SMALL: dict[str, Any] = {"num_cells": [16], "activation_class": nn.Tanh}


def make_env(discrete: bool) -> DeviceEnv:
    """CartPole, or Pendulum with episodes short enough to end within a batch."""
    return CartPole(NUM_ENVS) if discrete else Pendulum(NUM_ENVS, max_episode_steps=5)


def logits() -> TensorDictModule:
    """Logits of CartPole's two actions."""
    return TensorDictModule(MLP(4, 2, **SMALL), ["observation"], ["logits"])


def discrete_actor() -> ProbabilisticActor:
    """TorchRL's actor for CartPole."""
    return ProbabilisticActor(logits(), ["logits"], distribution_class=Categorical, return_log_prob=True)


def continuous_actor(distribution: type = IndependentNormal, log_prob: bool = True) -> ProbabilisticActor:
    """TorchRL's actor for Pendulum."""
    net = nn.Sequential(MLP(3, 2, **SMALL), NormalParamExtractor())
    limits = {"low": -2.0, "high": 2.0} if distribution is TanhNormal else {}
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        ["loc", "scale"],
        distribution_class=distribution,
        distribution_kwargs=limits,
        return_log_prob=log_prob,
        spec=Pendulum(1).full_action_spec_unbatched,
    )


def deterministic_actor() -> TensorDictSequential:
    """TorchRL's deterministic actor for Pendulum."""
    return Actor(nn.Sequential(MLP(3, 1, **SMALL), nn.Tanh()), in_keys=["observation"], spec=None)


def state_value(size: int) -> ValueOperator:
    """TorchRL's V(s)."""
    return ValueOperator(MLP(size, 1, **SMALL), in_keys=["observation"])


def action_value(size: int = 4, out: int = 1) -> ValueOperator:
    """TorchRL's Q(s, a) of a continuous action."""
    return ValueOperator(MLP(size, out, **SMALL), in_keys=["observation", "action"], out_keys=["state_action_value"])


def q_actor() -> QValueActor:
    """TorchRL's Q(s, .) of CartPole's actions."""
    return QValueActor(MLP(4, 2, **SMALL), in_keys=["observation"], spec=CartPole(1).action_spec_unbatched)


@cache
def _collected(discrete: bool) -> TensorDictBase:
    torch.manual_seed(1)
    policy = discrete_actor() if discrete else continuous_actor(TanhNormal)
    collector = DeviceCollector(make_env(discrete), policy, frames_per_batch=NUM_ENVS * NUM_STEPS)
    for _ in range(3):  # an episode ends in the third batch
        batch = collector.collect()
    return batch.clone()


def batch_of(discrete: bool) -> TensorDictBase:
    """A fresh copy of a ``[6, 8]`` batch of our collector that TorchRL's actor acted in."""
    return _collected(discrete).clone()
