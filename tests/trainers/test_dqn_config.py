"""DQNConfig and what off-policy configs share: checks, derived values."""

import dataclasses
import json

import pytest

from torchrl_perf.trainers import DQN_PRESETS, DQNConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity: expected a positive integer, received 0"),
        ({"updates_per_iteration": 0}, "updates_per_iteration: expected a positive integer"),
        ({"n_step": 0}, "n_step: expected a positive integer"),
        ({"learning_starts": -1}, "learning_starts: expected 0 or a positive integer"),
        ({"learning_starts": 2.5}, "learning_starts: expected 0 or a positive integer"),
        ({"learning_starts": 10**6, "total_steps": 1000}, "or nothing is learnt, received 1000000. Remedy"),
        ({"alpha": -0.1}, "alpha: expected a number of at least 0"),
        ({"beta": 1.1}, r"beta: expected a number in \[0, 1\]"),
        ({"beta_final": -1.0}, "beta_final: expected None or a number in"),
        ({"beta_final": 1.0}, "beta_final: expected None with sampler='random', where nothing reads it, received 1.0"),
        ({"sampler": "epoch"}, "sampler: expected one of"),
        ({"loss": "l1"}, "loss: expected one of"),
        ({"gamma": 1.5}, "gamma: expected a number in"),
        ({"tau": 0.0}, "tau: expected a number in"),
        ({"target_interval": 0}, "target_interval: expected a positive integer"),
        ({"eps_end": 2.0}, "eps_end: expected a number in"),
        ({"eps_frames": 0}, "eps_frames: expected a positive integer"),
        ({"learning_rate": 0.0}, "learning_rate: expected a positive number"),
        ({"capacity": 100}, "capacity: expected at least num_envs"),
        ({"minibatch_size": 5000, "learning_starts": 0, "num_steps": 8}, "minibatch_size: expected at most 1024"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DQNConfig.without_task(**options)


def test_derived_values():
    config = DQNConfig(
        num_envs=8, num_steps=4, minibatch_size=64, updates_per_iteration=3, learning_starts=65, total_steps=100
    )
    assert (config.batch_size, config.iterations, config.fill_iterations) == (32, 4, 3)
    assert config.utd_ratio == 6.0
    assert DQNConfig(**json.loads(json.dumps(config.to_dict()))) == config


def test_presets_and_frozen():
    assert all(preset.env == name for name, preset in DQN_PRESETS.items())
    with pytest.raises(dataclasses.FrozenInstanceError):
        DQNConfig().gamma = 0.5
