"""Whose priorities an update may set: those of the rows it was drawn from, and of bad rows alone while one repairs."""

import pytest
import torch
from states import run
from test_numerics import make

from torchrl_perf.functional.priority_tree import LEAST_PRIORITY

SLOTS = 256


def priorities(trainer):
    return trainer.buffer.sampler.tree.weights.clone()


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_an_update_leaves_the_rows_alone_that_were_written_over_its_sample(name):
    trainer = run(make(name, sampler="prioritized"), SLOTS // 32 + 1)
    samples = trainer.samples()
    # copies: the tensor of slots that a sampler returns knows its generations itself, a copy of it does not
    old, fresh = next(samples).clone(), next(samples).clone()
    for _ in range(SLOTS // 32):  # all slots are written anew
        trainer.fill()
    before = priorities(trainer)
    trainer.update(old)
    assert torch.equal(priorities(trainer), before)
    fresh["index_generation"] += 1  # as if it had been drawn now
    trainer.update(fresh)
    changed = priorities(trainer) != before
    assert set(changed.nonzero().flatten().tolist()) == set(fresh["index"].tolist())


def test_the_entry_of_a_sample_keeps_a_row_that_has_come_since():
    """Half of the drawn rows are gone: the new ones are drawn as often as if no update had come."""
    trainer = run(make("dqn", sampler="prioritized"), SLOTS // 32)
    sample = next(trainer.samples()).clone()
    trainer.fill()
    gone = trainer.buffer.storage.ring.generation(sample["index"]) != sample["index_generation"]
    assert gone.any()
    assert not gone.all()
    before = priorities(trainer)
    sample["td_error"] = torch.full((len(sample),), 1e30)
    trainer.buffer.update_tensordict_priority(sample)
    after = priorities(trainer)
    assert torch.equal(after[sample["index"][gone]], before[sample["index"][gone]])
    assert (after[sample["index"][~gone]] > before.max()).all()
    drawn = trainer.buffer.sample(512)["index"]
    assert set(drawn.tolist()) <= set(sample["index"][~gone].tolist())


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_repairing_a_sample_lowers_the_priority_of_its_bad_rows_alone(name):
    trainer = run(make(name, what="reward", iteration=3, on_nan="skip", sampler="prioritized", learning_starts=96), 3)
    bad = torch.zeros(SLOTS, dtype=torch.bool)
    stored = trainer.buffer.storage[:]["next", "reward"].isnan().any(-1)
    bad[: len(stored)] = stored
    assert bad.sum() == 1
    trainer.buffer.update_priority(bad.nonzero().flatten(), torch.full((1,), 1e6))  # so that it is drawn
    before = priorities(trainer)
    sample = next(trainer.samples())
    after = priorities(trainer)
    assert sample["next", "reward"].isfinite().all()
    assert torch.equal(after[~bad], before[~bad])
    assert after[bad] < 0.01 < before[bad]
    least = torch.tensor(LEAST_PRIORITY) ** trainer.buffer.sampler.alpha
    torch.testing.assert_close(after[bad], least.view(1), rtol=1e-4, atol=0.0)
