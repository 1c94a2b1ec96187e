"""A run that goes on with another number of ranks: what was learnt is kept, or it is refused by name."""

import csv

import pytest
import torch
from rank_processes import run, said

pytestmark = pytest.mark.slow
RUN_DIR = "runs/ppo-CartPole-0"


def parts(path):
    """The parts of a checkpoint."""
    return torch.load(path, weights_only=True)["parts"]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 2), (2, 1)])
def test_ppo_goes_on_with_what_it_has_learnt(tmp_path, before, after):
    assert run(tmp_path, before, "half_run") == {"half_run": [0] * before}, said(tmp_path, "half_run", 0)
    folder = tmp_path / RUN_DIR / "checkpoints"
    stopped = parts(folder / "000000006.pt")
    assert run(tmp_path, after, "longer_run") == {"longer_run": [0] * after}, said(tmp_path, "longer_run", 0)
    told = said(tmp_path, "longer_run", 0)
    number = "1 rank" if after == 1 else f"{after} ranks"
    assert f"goes on from 000000006.pt, with {number}; the envs begin anew, 576 of 960 steps" in told
    assert sorted(path.name for path in folder.glob("rank*")) == [f"rank{rank}" for rank in range(1, after)]
    with (tmp_path / RUN_DIR / "progress.csv").open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [192, 384, 576, 768, 960]
    ended = [parts(folder / (f"rank{rank}" if rank else "") / "000000010.pt") for rank in range(after)]
    for name in ("actor", "critic"):
        for one in ended[1:]:
            assert all(torch.equal(a, b) for a, b in zip(one[name].values(), ended[0][name].values(), strict=True))
    counts = {state["reward_normalization"]["statistics.count"].item() for state in (stopped, ended[0])}
    assert counts == {576, 960}, "moments count all rows, before and after"
    first = stopped["optimizer"]["state"][0]["step"], ended[0]["optimizer"]["state"][0]["step"]
    assert first[1] > first[0] > 0


def replayed(folder, name, ranks):
    """Rows ``[T, N, bytes]`` of the replay of all ranks, in order of streams."""
    storages = [parts(folder / (f"rank{rank}" if rank else "") / name)["replay"]["_storage"] for rank in range(ranks)]
    found = []
    for storage in storages:
        ring = storage["ring"]
        times = torch.arange(ring["cursor"] - ring["length"], ring["cursor"]) % ring["steps"]
        found.append(storage["rows"][0].unflatten(0, (-1, ring["num_streams"]))[times])
    return torch.cat(found, 1)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
@pytest.mark.parametrize("name", ["dqn", "ddpg", "pqn"])
def test_replay_and_exploration_are_dealt_out_anew(tmp_path, name, before, after):
    check = f"reshard_checks.{name}"
    assert run(tmp_path, before, check) == {check: [0] * before}, said(tmp_path, check, 0)
    (run_dir,) = (tmp_path / "runs").iterdir()
    folder = run_dir / "checkpoints"
    newest = max(path.name for path in folder.glob("0*.pt"))
    stopped = parts(folder / newest)
    rows = replayed(folder, newest, before) if "replay" in stopped else None
    assert run(tmp_path, after, check) == {check: [0] * after}, said(tmp_path, check, 0)
    assert f"goes on from {newest}, with {after} rank" in said(tmp_path, check, 0)
    first = parts(folder / newest)
    for rank in range(1, after):
        own = parts(folder / f"rank{rank}" / newest)
        weights = [torch.cat([value.flatten() for value in state["optimizer" if name != "ddpg" else "actor_optimizer"][
            "state"][0].values()]) for state in (own, first)]  # fmt: skip
        assert torch.equal(*weights)
    frames = [next(value for key, value in state["policy"].items() if key.endswith("frames") and "decay" not in key)
              for state in (stopped, first)]  # fmt: skip
    assert frames[0].item() * before == frames[1].item() * after
    if rows is not None:
        dealt = replayed(folder, newest, after)
        assert dealt.shape == rows.shape
        assert torch.equal(dealt[:-1], rows[:-1])
        assert (dealt[-1] != rows[-1]).sum() <= 2 * rows.shape[1], "but for done and truncated"
    ended = [parts(folder / (f"rank{rank}" if rank else "") / max(path.name for path in folder.glob("0*.pt")))
             for rank in range(after)]  # fmt: skip
    assert all(torch.equal(one["policy"][key], ended[0]["policy"][key])
               for one in ended for key in one["policy"] if "weight" in key)  # fmt: skip


def test_what_ranks_have_of_their_own_is_refused(tmp_path):
    assert run(tmp_path, 2, "other_dqn") == {"other_dqn": [0, 0]}, said(tmp_path, "other_dqn", 0)
    assert run(tmp_path, 3, "other_dqn") == {"other_dqn": [1, 1, 1]}
    told = "".join(said(tmp_path, "other_dqn", rank) for rank in range(3))
    assert told.count("torchrl-perf: ") == 1
    assert "expected the 2 ranks that the run was begun with, since its replay is compact" in told
    assert run(tmp_path, 3, "other_dqn_auto") == {"other_dqn_auto": [1, 1, 1]}
    told = "".join(said(tmp_path, "other_dqn_auto", rank) for rank in range(3))
    assert told.count("torchrl-perf: ") == 1
    assert "expected the 2 ranks that the run was begun with" in told
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["dqn-CartPole-0"], "none was begun in its place"


def test_auto_finds_a_run_of_other_ranks(tmp_path):
    assert run(tmp_path, 2, "half_run") == {"half_run": [0, 0]}, said(tmp_path, "half_run", 0)
    assert run(tmp_path, 3, "longer_auto") == {"longer_auto": [0] * 3}, said(tmp_path, "longer_auto", 0)
    told = said(tmp_path, "longer_auto", 0)
    assert "goes on from 000000006.pt, with 3 ranks; the envs begin anew, 576 of 960 steps" in told
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["ppo-CartPole-0"]
