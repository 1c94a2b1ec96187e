"""Exact resume of an off-policy run: bitwise, across processes, and refusals."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from states import assert_same_state, flatten, run

from torchrl_perf.trainers import DQNConfig, DQNTrainer
from torchrl_perf.trainers.run.checkpoint import load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TINY = DQNConfig.without_task(
    num_envs=4,
    num_steps=8,
    total_steps=640,
    capacity=72,  # wraps within three iterations, and is no multiple of an iteration
    minibatch_size=16,
    updates_per_iteration=2,
    learning_starts=32,
    target_interval=3,
    hidden_size=32,
    logger="none",
    device="cpu",
)
KINDS = {
    "plain": {},
    "prioritized, n-step, compact": {
        "sampler": "prioritized",
        "beta_final": 1.0,
        "n_step": 3,
        "compact": True,
        "anneal_learning_rate": True,
    },
}


def make(**options):
    return DQNTrainer(dataclasses.replace(TINY, **options))


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("before", [1, 3])
def test_some_and_two_are_the_same_as_all_at_once(options, before, tmp_path):
    trainer = run(make(**options), before)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = run(trainer, 2).state_dict()
    resumed = make(**options)
    resumed.load(path)
    assert_same_state(run(resumed, 2).state_dict(), expected)
    assert resumed.metrics.flush(320) == trainer.metrics.flush(320)


def test_loading_goes_back_in_a_trainer_in_use(tmp_path):
    trainer = run(make(), 3)
    path = trainer.save(tmp_path / "checkpoint.pt")
    first = run(trainer, 2).state_dict()
    trainer.load(path)
    assert trainer.iterations_done == 3
    assert_same_state(run(trainer, 2).state_dict(), first)


def test_a_checkpoint_is_a_copy_and_holds_the_filled_part_only(tmp_path):
    trainer = run(make(capacity=1_000_000), 1)
    state = trainer.state_dict()
    copy = {key: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for key, leaf in flatten(state).items()}
    assert trainer.save(tmp_path / "checkpoint.pt").stat().st_size < 100_000
    run(trainer, 3)
    for key, leaf in flatten(state).items():
        same = torch.equal(leaf, copy[key]) if isinstance(leaf, torch.Tensor) else leaf == copy[key] or leaf != leaf
        assert same, key


@pytest.mark.parametrize("changed", [{"capacity": 144}, {"compact": True}])
def test_another_layout_is_refused_and_changes_nothing(changed, tmp_path):
    path = run(make(), 3).save(tmp_path / "checkpoint.pt")
    other = run(make(**changed), 2)
    before = other.state_dict()
    with pytest.raises(ValueError, match="expected"):
        other.load(path)
    assert_same_state(other.state_dict(), before)


KILLED = """
import os, signal, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from test_off_policy_resume import make, run
trainer = run(make(**{options!r}), 3)
trainer.save({path!r})
run(trainer, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_from_a_process_that_was_killed(tmp_path):
    options, path = KINDS["prioritized, n-step, compact"], tmp_path / "checkpoint.pt"
    code = KILLED.format(tests=str(Path(__file__).parent), options=options, path=str(path))
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == -9, result.stderr
    assert load_checkpoint(path)["counters"]["iterations_done"] == 3
    resumed = make(**options)
    resumed.load(path)
    assert_same_state(run(resumed, 2).state_dict(), run(make(**options), 5).state_dict())
