"""Each key of the settings of fuel breaks changes what a run does. A key without a case fails.

Keys that act around the iterations are tested with other algorithms, whose loop is the same.
"""

import dataclasses
import gc
from functools import cache

import pytest
import torch
from config_runs import RUN_KEYS
from declared import ADAM, repeated, unread
from fire_runs import SMALL, make, parameters
from states import run

from torchrl_perf.runtime.memory import MemoryGuard
from torchrl_perf.systems.fuel_breaks import FUEL_BREAKS_PRESETS, FuelBreaksConfig
from torchrl_perf.systems.fuel_breaks.task import BreaksTask
from torchrl_perf.trainers import train
from torchrl_perf.trainers.run import loop

PRIORITIES = {"sampler": "prioritized"}
FRACTAL = {"landscape": "fractal"}
# (what both runs have, the value that is tried)
LEARNING = {
    "num_envs": ({}, 8),
    "num_steps": ({}, 8),
    "total_steps": ({"anneal_learning_rate": True}, 640),
    "gamma": ({}, 0.5),
    "seed": ({}, 1),
    "precision": ({}, "bf16"),
    "capacity": ({}, 16),
    "minibatch_size": ({}, 8),
    "updates_per_iteration": ({}, 3),
    "learning_starts": ({}, 48),
    "n_step": ({}, 3),
    "sampler": ({}, "prioritized"),
    "alpha": (PRIORITIES, 0.0),
    "beta": (PRIORITIES, 1.0),
    "beta_final": (PRIORITIES, 1.0),
    "double": ({}, False),
    "dueling": ({}, True),
    "loss": ({"reward": "terminal", "learning_rate": 0.3}, "l2"),
    "learning_rate": ({}, 0.02),
    "anneal_learning_rate": ({}, True),
    "schedule_steps": ({"anneal_learning_rate": True}, 16),
    **ADAM,
    "normalize_rewards": ({}, True),
    "reward_clip": ({}, 0.01),
    "max_grad_norm": ({}, 1e-3),
    "tau": ({}, 0.5),
    "target_interval": ({}, 1),
    "eps_start": ({}, 0.0),
    "eps_end": ({}, 1.0),
    "eps_frames": ({}, 16),
    "hidden_size": ({}, 8),
    "activation": ({}, "tanh"),
}
FIRE = {
    "size": ({}, 5),
    "budget": ({}, 0.2),
    "landscape": ({}, "fractal"),
    "landscapes": (FRACTAL, 2),
    "landscape_seed": (FRACTAL, 1),
    "base": ({}, 0.6),
    "neighbours": ({}, 4),
    "fires": ({}, 8),
    "reward": ({}, "terminal"),
    "common_random_numbers": ({}, False),
    "blocks": ({}, 2),
    "demonstrations": ({}, 0),
    "demonstration_noise": ({}, 1.0),
    "line_exploration": ({}, 0.0),
    "line_envs": ({}, 0.5),
}
CASES = {**LEARNING, **FIRE}
# one value, a name for presets of one task, and what changes memory alone
ALONE = ("env", "compact", *FuelBreaksConfig.not_taken, *FuelBreaksConfig.not_normalized)


@cache
def learnt(options):
    """All parameters after five small iterations."""
    trainer = run(make(**dict(options)), 5)
    trainer.close()
    return torch.cat([value.flatten().double() for value in parameters(trainer).values()]).numpy().tobytes()


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(field.name, marks=repeated(FuelBreaksConfig, field.name, BreaksTask))
        for field in dataclasses.fields(FuelBreaksConfig)
    ],
)
def test_key_has_an_effect(field):
    if field in ALONE or (field in RUN_KEYS and field not in CASES):
        return
    assert field in CASES, f"FuelBreaksConfig.{field} has no case here: add one that shows what the key does"
    shared, value = CASES[field]
    assert {**SMALL, **shared}.get(field, getattr(FuelBreaksConfig.without_task(), field)) != value
    assert learnt(tuple(shared.items())) != learnt(tuple({**shared, field: value}.items()))


def test_the_same_settings_learn_the_same():
    first = learnt(())
    learnt.cache_clear()
    assert learnt(()) == first


def test_a_compact_buffer_holds_the_same():
    plain, compact = (run(make(compact=compact), 2).buffer[:] for compact in (False, True))
    assert set(plain.keys(True, True)) == set(compact.keys(True, True))
    assert all(torch.equal(plain[key], compact[key]) for key in plain.keys(True, True))


@pytest.mark.parametrize(
    ("name", "rule", "interval"), [("FuelBreaks", "unused", 5_000), ("FuelBreaksOriginal", "allocated", 5_000)]
)
def test_memory_rules_of_the_presets_reach_the_loop(name, rule, interval, tmp_path, monkeypatch):
    """Ours and the original's; what each rule does is seen at the guard itself."""
    received = []

    def watched(device, **options):
        received.append(options)
        return MemoryGuard(device, **options)

    monkeypatch.setattr(loop, "MemoryGuard", watched)
    usual = FUEL_BREAKS_PRESETS[name]
    trainer = make(memory_rule=usual.memory_rule, gc_interval=usual.gc_interval, total_steps=64)
    train(trainer, tmp_path, progress=False)
    assert received == [{"rule": rule, "gc_interval": interval}]


def test_no_tensor_more_after_more_episodes():
    trainer = run(make(capacity=32), 10)
    trainer.metrics.flush(1)

    def alive():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    before = alive()
    run(trainer, 50)  # 200 episodes
    trainer.metrics.flush(2)
    assert alive() <= before


def test_every_inherited_key_is_read(monkeypatch):
    trainer = make(sampler="prioritized", beta_final=1.0)
    trainer.close()

    def iterate(config):
        run(type(trainer)(config), 5).close()

    left = unread(trainer.config, iterate, monkeypatch) - set(RUN_KEYS) - set(ALONE)
    assert not [field for field in left if repeated(FuelBreaksConfig, field, BreaksTask)]
