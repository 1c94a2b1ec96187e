"""Envs write what their specs say, whatever torch's default dtype is."""

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from torchrl_perf import envs

NAMES = [
    *("Acrobot", "CartPole", "Durotaxis", "Ferry", "FuelBreaks", "HybridTarget", "LatentField", "MarineNavigation"),
    *("MountainCar", "MountainCarContinuous", "NoisyStatelessCartPole", "NoisyStatelessPendulum", "OptionMarket"),
    *("Pendulum", "RepeatFirst", "RepeatPrevious", "StatelessCartPole", "StatelessPendulum", "TMaze"),
]


@pytest.fixture
def double_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("double_by_default")
def test_dtypes_do_not_follow_the_default(name):
    env = getattr(envs, name)(4, device="cpu")
    check_env_specs(env)
    data = env.rollout(3, break_when_any_done=False)
    floating = [value for value in data.values(True, True) if value.dtype.is_floating_point]
    assert {value.dtype for value in floating} == {torch.float32}
