"""Each key of a colony's settings changes what a run does. A key without a case fails.

Keys that act around the iterations are tested with other algorithms, whose loop is the same.
"""

import dataclasses
from functools import cache

import pytest
import torch
from colony_runs import SMALL, make, parameters
from config_runs import RUN_KEYS
from declared import ADAM, repeated, unread
from states import run

from torchrl_perf.systems.durotaxis.config import DurotaxisConfig

WEAK = {"entropy_coeff": 0.0, "anneal_learning_rate": False}
# (what both runs have, the value that is tried)
LEARNING = {
    "num_envs": ({}, 8),
    "num_steps": ({}, 8),
    "gamma": ({}, 0.5),
    "seed": ({}, 1),
    "precision": ({}, "bf16"),
    "epochs": ({"target_kl": None}, 3),
    "minibatches": ({}, 4),
    "learning_rate": ({}, 0.02),
    "anneal_learning_rate": ({}, False),
    "schedule_steps": ({"anneal_learning_rate": True}, 16),
    "lmbda": ({}, 0.5),
    "clip_epsilon": ({"target_kl": None, "learning_rate": 1e-2}, 0.001),
    "clip_value": ({"clip_epsilon": 1e-4}, True),
    "value_clip_epsilon": ({"clip_value": True}, 1e-4),
    "normalize_advantage": ({}, False),
    "desired_kl": ({"target_kl": None}, 1e-6),
    "min_learning_rate": ({"desired_kl": 1e-9, "learning_rate": 1e-3}, 9e-4),
    "max_learning_rate": ({"desired_kl": 100.0, "learning_rate": 9e-3}, 2e-2),
    "entropy_coeff": ({}, 0.5),
    "entropy_coeff_final": ({}, 0.5),
    "entropy_frames": ({"entropy_coeff_final": 0.5}, 32),
    "entropy_floor": (WEAK, 10.0),
    "entropy_floor_coeff": ({"entropy_floor": 10.0}, 5.0),
    "critic_coeff": ({}, 5.0),
    **ADAM,
    "max_grad_norm": ({}, 1e-3),
    "target_kl": ({"learning_rate": 1e-2}, 0.0),
    "kl_estimate": ({"target_kl": 1e-4, "learning_rate": 1e-3}, "samples"),
    "hidden_size": ({}, 64),
    "activation": ({}, "relu"),
}
COLONY = {
    "critical_nodes": ({}, 20),
    "width": ({}, 90.0),
    "height": ({}, 90.0),
    "field": ({}, "exponential"),
    "slope": ({}, 0.05),
    "intercept": ({}, 2.0),
    "delete_max": ({}, 0.7),
    "reward_mode": ({}, "full"),
    "max_episode_steps": ({}, 2),
    "actions": ({}, "per_node"),
    "stage_one_frames": ({}, 1000),
    "stage_frames": ({"stage_goals": "0.3, 0.95", "stage_frames": "0, 100000"}, "0, 16"),
    "stage_goals": ({}, "0.3"),
    "stage_nodes": ({}, "8"),
    "encoder_width": ({}, 16),
    "encoder_layers": ({}, 2),
    "encoder_heads": ({}, 4),
    "simplex_groups": ({}, 4),
    "simplex_temperature": ({}, 0.1),
    "value_heads": ({}, "total"),
    "standardize_components": ({}, True),
}
CASES = {**LEARNING, **COLONY}
# one value, which says that the other one of PPO does not exist; a name for two presets of one task
ALONE = ("loss", "env", *DurotaxisConfig.not_taken, *DurotaxisConfig.not_normalized)


@cache
def learnt(options):
    """All parameters after four small iterations."""
    trainer = run(make(**dict(options)), 4)
    trainer.close()
    return torch.cat([value.flatten().double() for value in parameters(trainer).values()]).numpy().tobytes()


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(field.name, marks=repeated(DurotaxisConfig, field.name))
        for field in dataclasses.fields(DurotaxisConfig)
    ],
)
def test_key_has_an_effect(field):
    if field in RUN_KEYS or field in ALONE:
        assert field not in CASES
        return
    assert field in CASES, f"DurotaxisConfig.{field} has no case here: add one that shows what the key does"
    shared, value = CASES[field]
    assert {**SMALL, **shared}.get(field, getattr(DurotaxisConfig(), field)) != value
    assert learnt(tuple(shared.items())) != learnt(tuple({**shared, field: value}.items()))


def test_the_same_settings_learn_the_same():
    first = learnt(())
    learnt.cache_clear()
    assert learnt(()) == first


def test_every_inherited_key_is_read(monkeypatch):
    trainer = make(entropy_coeff_final=0.5, desired_kl=0.01)
    trainer.close()

    def iterate(config):
        run(type(trainer)(config), 5).close()

    left = unread(trainer.config, iterate, monkeypatch) - set(RUN_KEYS) - set(ALONE)
    assert not [field for field in left if repeated(DurotaxisConfig, field)]
