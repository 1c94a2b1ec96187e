"""A rank that is killed: the others notice, name it, save what they can, end with one message, and the run resumes."""

import csv
import json

import pytest
import torch
from rank_processes import run, said

from torchrl_perf.parallel.watch import EXPLAIN_SECONDS
from torchrl_perf.trainers import PPOConfig, load_policy
from torchrl_perf.trainers.run.checkpoint import common_names, ranks_of_run
from torchrl_perf.trainers.run.files import find_resumable, make_run_dir
from torchrl_perf.trainers.run.rank_folder import RESCUED, RankFolder, newest_common

KILLED = 137 - 128  # the signal


def rows(run_dir):
    """The rows of a run, without what depends on the clock and the machine."""
    with (run_dir / "progress.csv").open(newline="") as file:
        return [
            {
                name: value
                for name, value in row.items()
                if not name.startswith(("wall_time", "time/", "memory/", "host/"))
            }
            for row in csv.DictReader(file)
        ]


def parameters(path):
    """What a checkpoint holds of the actor."""
    return torch.load(path, weights_only=True)["parts"]["actor"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_is_named_and_the_run_goes_on_as_if_nothing_was(tmp_path, ranks):
    codes = run(tmp_path, ranks, "killed_run", "resumed_run", "whole_run", timeout=900)
    assert codes == {"killed_run": [1] * (ranks - 1) + [-KILLED], "resumed_run": [0] * ranks, "whole_run": [0] * ranks}
    ended = json.loads((tmp_path / "killed_run.json").read_text())["seconds"]
    assert max(ended) - ended[-1] < EXPLAIN_SECONDS + 20  # on a machine with other work
    told = "".join(said(tmp_path, "killed_run", rank) for rank in range(ranks))
    assert told.count("torchrl-perf: ") == 1
    assert f"rank {ranks - 1} of {ranks} was lost in iteration 7 (env step 576)" in told
    assert "on host " in told
    assert "000000004.pt. To go on from it: torchrl-perf train ppo --resume runs/ppo-CartPole-0" in told
    resumed, whole = tmp_path / "runs/ppo-CartPole-0", tmp_path / "runs/ppo-CartPole-0-2"
    assert load_policy(resumed / "checkpoints" / RESCUED) is not None
    assert rows(resumed) == rows(whole)
    assert len(rows(whole)) == 5
    newest = [newest_common(path, ranks) for path in (resumed, whole)]
    assert [path.name for path in newest] == ["000000010.pt"] * 2
    for one, other in zip(*(parameters(path).values() for path in newest), strict=True):
        assert torch.equal(one, other)
    shards = [parameters(newest[0].parent / f"rank{rank}" / newest[0].name) for rank in range(1, ranks)]
    for shard in shards:
        assert all(torch.equal(a, b) for a, b in zip(shard.values(), parameters(newest[0]).values(), strict=True))


@pytest.mark.slow
def test_the_first_rank_may_be_the_one(tmp_path):
    assert run(tmp_path, 3, "killed_first", timeout=600) == {"killed_first": [-KILLED, 1, 1]}
    told = "".join(said(tmp_path, "killed_first", rank) for rank in range(3))
    assert told.count("torchrl-perf: ") == 1
    assert "rank 0 of 3 was lost in iteration 7" in told


def test_a_run_of_two_ranks_is_one_before_both_have_written(tmp_path):
    config = PPOConfig(run_dir=str(tmp_path))
    path = make_run_dir(config)
    RankFolder(path, config, 1)
    first, second = path / "checkpoints", path / "checkpoints" / "rank1"
    (first / "000000005.pt").touch()
    assert ranks_of_run(path) == 2
    assert newest_common(path, 2) is None
    found, left_out = find_resumable(config, {})
    assert found is None, "half of the replay is not the replay"
    assert "no checkpoint that all of its 2 ranks have written" in left_out[0]
    (second / "000000005.pt").touch()
    (first / "000000010.pt").touch()
    assert find_resumable(config, {}) == (path, [])
    assert common_names(path, 2) == {"000000005.pt"}
