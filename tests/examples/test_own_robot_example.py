"""The example of a robot of one's own: its three functions, and a short run."""

import math

import pytest
import torch
from test_examples import load

pytest.importorskip("mujoco_warp", reason="the extra mujoco-warp is not installed")


def test_it_swings_and_prints_its_last_line(capsys):
    example = load("own_robot")
    value = example.main(example.Config(num_envs=16, total_steps=4_352, device="cpu"))
    assert -350 < value < 250, "sums of the tip's height over 250 steps"
    assert "Remedy" not in capsys.readouterr().out, "no contact found no room, and no world broke"


def test_its_functions_are_those_of_the_words():
    example = load("own_robot")
    up = {
        "qpos": torch.tensor([[0.0, math.pi], [1.95, 0.0]]),
        "qvel": torch.zeros(2, 2),
        "site_xpos": torch.tensor([[[0.0, 0.0, 0.6]], [[1.95, 0.0, -0.6]]]),
    }
    rewards = example.reward(up, torch.zeros(2, 1), up)
    torch.testing.assert_close(rewards, torch.tensor([1.0, -1.0 - 0.1 * 1.95**2]))
    assert example.terminated(up).tolist() == [False, True]
    assert example.observe(up).shape == (2, 5)
