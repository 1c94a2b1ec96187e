"""Off-policy trainers on rows of agents: what is stored, drawn and counted, and how a run goes on."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from config_runs import KINDS, SMALL, TRAINERS
from states import run

from torchrl_perf.envs.agent_streams import AgentStreams

sys.path.append(str(Path(__file__).resolve().parents[1] / "envs"))
from walkers import Walkers

OPTIONS = {"num_envs": 6, "num_steps": 8, "total_steps": 960, "capacity": 960, "learning_starts": 48}
NAMES = {
    "dqn": {},
    "iqn": {"n_step": 3},
    "rainbow": {"n_step": 3, "beta_final": 1.0},
    "ddpg": {"noise": "ou"},
    "sac": {"sampler": "prioritized", "n_step": 2},
    "ac-iqn": {"compact": True},
}


def make(name, **options):
    config = KINDS[name].without_task(**{**SMALL[name], **OPTIONS, **NAMES[name], **options})
    discrete = name in ("dqn", "iqn", "rainbow")
    return TRAINERS[name](config, env=AgentStreams(Walkers(2, 3, discrete=discrete)))


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_do_not_count_are_never_learnt_from(name):
    trainer = make(name)
    assert trainer.valid_key == "valid"
    seen, update = [], trainer.update

    def watch(sample):
        seen.append((sample["valid"].clone(), sample["next", "terminated"].clone()))
        update(sample)

    trainer.update = watch
    run(trainer, 20)
    valid, terminated = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert valid.all()
    assert terminated.any()
    stored = trainer.buffer.storage
    assert not stored.field("valid").all()
    assert not (stored.field(("next", "terminated")) & ~stored.field("valid")).any()
    trainer.close()


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_terminals_and_episodes_are_the_events(name):
    trainer = make(name)
    measured, measure = [], trainer.measure

    def watch(batch):
        measured.append((batch["next", "event"].sum(), (batch["valid"] & batch["next", "done"]).sum()))
        measure(batch)

    trainer.measure = watch
    run(trainer, 20)
    events, ends = (int(sum(parts)) for parts in zip(*measured, strict=True))
    assert int(trainer.buffer.storage.field(("next", "terminated")).sum()) == events > 5
    assert int(trainer.episodes.count) == ends >= events
    assert int(trainer.frames) == 960
    row = trainer.metrics.flush(960)
    assert row["episode/count"] == ends
    assert 1 <= row["episode/mean_length"] <= 12


@pytest.mark.parametrize("name", NAMES)
def test_what_is_drawn_after_a_load(name, tmp_path):
    trainer = run(make(name), 6)
    path = trainer.save(tmp_path / "checkpoint.pt")
    tree = getattr(trainer.buffer.sampler, "_tree", None)
    run(trainer, 3)
    expected = [part.clone() for part in leaves(trainer)]
    other = run(make(name, seed=5), 2)
    other.load(path)
    # the env of these tests begins anew with a load; what is learnt from is the same up to there
    trainer.load(path)
    assert getattr(trainer.buffer.sampler, "_tree", None) is tree
    for ours, theirs in zip(drawn(trainer), drawn(other), strict=True):
        assert torch.equal(ours, theirs)
    assert all(value.isfinite().all() for value in expected)


def leaves(trainer):
    return [p for part in trainer.parts().values() if isinstance(part, torch.nn.Module) for p in part.parameters()]


def drawn(trainer):
    torch.manual_seed(3)
    sample = trainer.buffer.sample(64)
    assert sample["valid"].all()
    return [sample["index"], sample["observation"], sample["next", "reward"]]


def test_config_words():
    config = KINDS["dqn"](**{**SMALL["dqn"], **OPTIONS})
    assert (config.num_streams, config.rows_per_iteration, config.rows_in_words) == (6, 48, "num_envs * num_steps")
    with pytest.raises(ValueError, match=r"env: expected batch_size \[6\], the config's num_envs, received \[8\]"):
        TRAINERS["dqn"](config, env=AgentStreams(Walkers(4, 2)))
    assert dataclasses.replace(config, num_envs=3).num_streams == 3
