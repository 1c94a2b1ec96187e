"""Each key of a trader's settings changes what a run does. A key without a case fails.

Keys that act around the iterations are tested with other algorithms, whose loop is the same.
"""

import dataclasses
from functools import cache

import pytest
import torch
from config_runs import RUN_KEYS
from declared import ADAM, repeated, unread
from states import run
from trading_runs import EXPOSURE, SMALL, make, parameters, write_prices

from torchrl_perf.systems.options_market.config import OptionsMarketConfig

REPLAY = {"sampler": "prioritized"}
# (what both runs have, the value that is tried)
LEARNING = {
    "schedule_steps": ({**REPLAY, "beta_final": 1.0}, 16),
    "num_envs": ({}, 2),
    "num_steps": ({}, 2),
    "gamma": ({}, 0.5),
    "seed": ({}, 1),
    "precision": ({}, "bf16"),
    "capacity": ({}, 48),
    "minibatch_size": ({}, 8),
    "updates_per_iteration": ({}, 3),
    "learning_starts": ({}, 32),
    "n_step": ({}, 3),
    "sampler": ({}, "prioritized"),
    "alpha": (REPLAY, 0.9),
    "beta": (REPLAY, 0.9),
    "beta_final": (REPLAY, 1.0),
    "hidden_size": ({}, 32),
    "activation": ({}, "tanh"),
    "actor_learning_rate": ({}, 0.02),
    "critic_learning_rate": ({}, 0.02),
    "anneal_learning_rate": ({}, True),
    "tau": ({}, 0.5),
    **ADAM,
    "reward_clip": ({}, 1e-6),
    "max_grad_norm": ({}, 1e-3),
    "target_interval": ({}, 3),
    "temperature_learning_rate": ({}, 0.02),
    "initial_temperature": ({}, 0.1),
    "learn_temperature": ({}, False),
    "target_entropy": ({}, 3.0),
    "num_critics": ({}, 3),
    "loss_function": ({}, "smooth_l1"),
    "option_learning": ({"option_capacity": 2_000}, "critic"),
    "option_relabel": ({}, 1.0),
    "option_interrupt": ({"option_learning": "critic", "option_capacity": 2_000}, True),
    "option_learning_rate": ({}, 0.02),
    "option_temperature": ({}, 0.5),
    "option_entropy_coeff": ({}, 0.5),
    "option_clip": ({"updates_per_iteration": 8, "option_learning_rate": 0.1}, 0.01),
    "option_capacity": ({}, 24),
    "option_temperature_final": ({}, 0.1),
    "option_temperature_frames": ({"option_temperature_final": 0.1}, 32),
}
TRANSFORMER = {"network": "transformer"}
BROWNIAN, RECORDED = {"market": "brownian"}, {"market": "recorded", "prices_file": "first"}
MARKET = {
    "market": ({}, "brownian"),
    "sentiment_correlation": ({}, 0.8),
    "drift": (BROWNIAN, 0.05),
    "volatility": (BROWNIAN, 0.1),
    "prices_file": (RECORDED, "second"),
    "first_date": (RECORDED, "2001-01-15"),
    "last_date": (RECORDED, "2001-05-01"),
    "bars_per_week": ({}, 5),
    "semantics": ({}, "target"),
    "reward": ({}, "realised_pnl"),
    "reward_scale": ({}, 1.0),
    "options": ({"semantics": "target"}, "sides"),
    "directed": ({}, True),
    "trend_unit": ({}, "price"),
    "commission": ({}, 0.02),
    "slippage": ({}, 0.02),
    "max_weight": (EXPOSURE, 3.0),
    "dead_band": (EXPOSURE, 0.3),
    "window": ({}, 4),
    "network": ({}, "transformer"),
    "transformer_size": (TRANSFORMER, 32),
    "transformer_layers": (TRANSFORMER, 1),
    "transformer_heads": (TRANSFORMER, 2),
    "max_episode_steps": ({}, 2),
    "ruin": ({**EXPOSURE, **BROWNIAN, "volatility": 0.5}, 0.95),
}
CASES = {**LEARNING, **MARKET}
# what a row of metrics or the memory shows, and no number that is learnt
OTHERS = {"max_option_share": 0.9, "min_options_used": 3, "compact": True}
# a name for presets; what they change is seen key by key
ALONE = ("env", *OptionsMarketConfig.not_taken, *OptionsMarketConfig.not_normalized)


@cache
def files(folder):
    return {
        name: str(write_prices(folder / f"{name}.csv.gz", seed=seed)) for seed, name in enumerate(("first", "second"))
    }


@cache
def learnt(options, folder):
    """All parameters after five small iterations."""
    chosen = dict(options)
    if "prices_file" in chosen:
        chosen["prices_file"] = files(folder)[chosen["prices_file"]]
    trainer = run(make(**chosen), 5)
    trainer.close()
    return torch.cat([value.flatten().double() for value in parameters(trainer).values()]).numpy().tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("prices")


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(field.name, marks=repeated(OptionsMarketConfig, field.name))
        for field in dataclasses.fields(OptionsMarketConfig)
    ],
)
def test_key_has_an_effect(field, folder):
    if field in RUN_KEYS or field in ALONE or field in OTHERS:
        assert field not in CASES
        return
    assert field in CASES, f"OptionsMarketConfig.{field} has no case here: add one that shows what the key does"
    shared, value = CASES[field]
    assert {**SMALL, **shared}.get(field, getattr(OptionsMarketConfig.without_task(), field)) != value
    assert learnt(tuple(shared.items()), folder) != learnt(tuple({**shared, field: value}.items()), folder)


def test_the_others():
    plain, other = make(), make(**OTHERS)
    assert (plain.usage.max_share, plain.usage.min_used) == (1.0, 1)
    assert (other.usage.max_share, other.usage.min_used) == (0.9, 3)
    stored = [trainer.buffer.state_dict() for trainer in (run(plain, 2), run(other, 2))]
    leaves = [torch.utils._pytree.tree_leaves(state) for state in stored]
    sizes = [
        sum(leaf.numel() * leaf.element_size() for leaf in part if isinstance(leaf, torch.Tensor)) for part in leaves
    ]
    assert sizes[1] < 0.7 * sizes[0]


def test_the_same_settings_learn_the_same(folder):
    first = learnt((), folder)
    learnt.cache_clear()
    assert learnt((), folder) == first


def test_every_inherited_key_is_read(monkeypatch):
    trainer = make(sampler="prioritized", beta_final=1.0)
    trainer.close()

    def iterate(config):
        run(type(trainer)(config), 5).close()

    left = unread(trainer.config, iterate, monkeypatch) - set(RUN_KEYS) - set(ALONE)
    assert not [field for field in left if repeated(OptionsMarketConfig, field)]
