"""Pictures of envs: shape and dtype for each task, and that they show the state."""

import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.record import PixelRenderTransform

from torchrl_perf import envs
from torchrl_perf.envs.drawing import bars, heights

CLASSIC = ["CartPole", "Pendulum", "Acrobot", "MountainCar", "MountainCarContinuous"]
WORLDS = [
    "TMaze",
    "RepeatPrevious",
    "NoisyStatelessCartPole",
    "Ferry",
    "HybridTarget",
    "FuelBreaks",
    "LatentField",
    "OptionMarket",
    "Durotaxis",
]


@pytest.mark.parametrize("name", CLASSIC + WORLDS)
def test_one_picture_for_each_env(name):
    env = getattr(envs, name)(2)
    env.reset()
    before = {key: value.clone() for key, value in env.state_dict().items()}
    generator = torch.get_rng_state()
    picture = env.render(height=24, width=36)
    assert picture.shape == (2, 24, 36, 3)
    assert picture.dtype == torch.uint8
    assert picture.float().std() > 5
    assert all(torch.equal(value, before[key]) for key, value in env.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(("angle", "row", "column"), [(0.0, 0, 1), (torch.pi, 2, 1), (-torch.pi / 2, 1, 2)])
def test_the_rod_points_where_the_angle_says(angle, row, column):
    env = envs.Pendulum(2)
    env.state[:, 0] = angle
    red = env.render(height=60, width=60)[0].float()
    tip = (red[..., 0] - red[..., 2]) > 60
    centre = tip.nonzero().float().mean(0) / 20
    assert (
        centre.long().tolist() == [row, column] or (centre - torch.tensor([row + 0.5, column + 0.5])).abs().max() < 0.8
    )


def test_bars_have_the_height_of_the_numbers():
    picture = bars(torch.tensor([[0.0, 0.5, 1.0]]), 10, 30)
    filled = (picture[0, :, :, 0] < 200).sum(0)
    assert filled[5] == 0
    assert filled[15] == 5
    assert filled[25] == 10
    assert heights(torch.tensor([[torch.nan, 0.0, torch.inf]])).tolist() == [[0.0, 0.5, 1.0]]


def test_torchrl_takes_them_for_pixels():
    env = TransformedEnv(envs.CartPole(3), PixelRenderTransform(height=16, width=24))
    assert env.rollout(2)["pixels"].shape == (3, 2, 16, 24, 3)
