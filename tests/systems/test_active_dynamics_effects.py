"""Each key of the settings changes what a run does. A key without a case fails.

Keys that act around the iterations are tested with other algorithms, whose loop is the same.
"""

import dataclasses
from functools import cache

import pytest
from config_runs import RUN_KEYS
from declared import ADAM, repeated, unread
from dynamics_runs import SMALL, learnt, make
from states import run

from torchrl_perf.systems.active_dynamics import ActiveDynamicsConfig

PLANNED = {"random_steps": 0, "plan_horizon": 4, "candidates": 8, "plan_rounds": 3}
KNOWN = {"known_map": True, "decoder": "log_linear"}
CASES = {
    "env": ({}, "duffing"),
    "num_envs": ({}, 4),
    "num_steps": ({}, 9),
    "gamma": (PLANNED, 0.1),
    "seed": ({}, 1),
    "observation": ({}, "linear"),
    "observation_size": ({}, 7),
    "action_max": ({}, 0.1),
    "process_noise": ({}, 0.0),
    "integrator": ({}, "rk4"),
    "substeps": ({}, 3),
    "input_cost": ({}, 5.0),
    "action_encoder": ({}, "linear"),
    "start": ({}, (0.5, 0.0)),
    "start_range": ({}, 0.5),
    "goal": ({**PLANNED, **KNOWN, "inputs": "goal", "goal": (1.0, 0.0)}, (0.0, 1.0)),
    "goal_weight": ({**PLANNED, **KNOWN, "goal": (1.0, 0.0)}, 50.0),
    "region_weight": ({**PLANNED, **KNOWN, "region": 0.5}, 50.0),
    "known_map": ({**KNOWN, "known_map": False}, True),
    "centres": ({}, 4),
    "centres_range": ({}, 3.0),
    "max_episode_steps": ({}, 3),
    "extent": ({"action_max": 20.0}, 1.6),
    "latent_size": ({}, 3),
    "encoder": ({}, "mlp"),
    "encoder_size": ({}, 9),
    "decoder": ({}, "mlp"),
    "likelihood": ({}, "gaussian"),
    "dynamics": ({}, "mlp"),
    "dynamics_size": ({"dynamics": "mlp"}, 64),
    "members": ({"dynamics": "ensemble", "inputs": "disagreement"}, 3),
    "inputs": (PLANNED, "random"),
    "random_steps": ({}, 48),
    "random_share": (PLANNED, 0.5),
    "plan_horizon": (PLANNED, 2),
    "candidates": (PLANNED, 9),
    "plan_rounds": (PLANNED, 1),
    "elites": (PLANNED, 2),
    "window": ({}, 5),
    "history": ({}, 9),
    "minibatch_size": ({}, 5),
    "updates": ({}, 3),
    "learning_rate": ({}, 1e-2),
    **ADAM,
    "max_grad_norm": ({}, 1e-6),
    "bound": ({}, "predictive"),
    "kl_horizon": ({}, 2),
    "kl_decay": ({}, 0.5),
    "samples": ({}, 3),
    "mask_rate": ({}, 0.0),
    "beta": ({"beta_anneal": 1}, 5.0),
    "beta_schedule": ({"beta_anneal": 2}, "constant"),
    "beta_warmup": ({"beta_schedule": "constant"}, 2),
    "beta_anneal": ({}, 2),
}
SHARED = {"observation": {"likelihood": "gaussian"}}
# the first chooses between precisions of CUDA, the others what is reported
ALONE = ("precision", "prediction_horizon", "region", "schedule_steps")
"""The last is refused: nothing is annealed over the run."""


@cache
def learned(options):
    """All parameters after two small iterations."""
    trainer = run(make(**dict(options)), 2)
    trainer.close()
    return learnt(trainer).double().numpy().tobytes()


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(field.name, marks=repeated(ActiveDynamicsConfig, field.name))
        for field in dataclasses.fields(ActiveDynamicsConfig)
    ],
)
def test_key_has_an_effect(field):
    if field in ALONE or (field in RUN_KEYS and field not in CASES):
        return
    assert field in CASES, f"ActiveDynamicsConfig.{field} has no case here: add one that shows what the key does"
    shared, value = CASES[field]
    shared = {**shared, **SHARED.get(field, {})}
    assert {**SMALL, **shared}.get(field, getattr(ActiveDynamicsConfig.without_task(), field)) != value
    assert learned(tuple(shared.items())) != learned(tuple({**shared, field: value}.items()))


def test_the_horizon_of_the_report():
    rows = []
    for horizon in (2, 3):
        trainer = run(make(prediction_horizon=horizon), 1)
        rows.append(trainer.metrics.flush(24))
        trainer.close()
    assert rows[0]["prediction/r2"] != rows[1]["prediction/r2"]
    assert rows[0]["train/loss_kl"] == rows[1]["train/loss_kl"]


def test_the_region_of_the_report():
    rows = []
    for region in (1.0, 2.0):
        trainer = run(make(region=region), 1)
        rows.append((trainer.metrics.flush(24), trainer.region_error()))
        trainer.close()
    assert rows[0][0]["train/loss_kl"] == rows[1][0]["train/loss_kl"]
    assert rows[0][1] != rows[1][1]


def test_every_inherited_key_is_read(monkeypatch):
    trainer = make()
    trainer.close()

    def iterate(config):
        run(type(trainer)(config), 5).close()

    left = unread(trainer.config, iterate, monkeypatch) - set(RUN_KEYS) - set(ALONE)
    assert not [field for field in left if repeated(ActiveDynamicsConfig, field)]
