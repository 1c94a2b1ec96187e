"""The bench of whole training on CPU envs: what it runs, what it reads, what it says of a side that is absent."""

import json
import sys

import pytest

from torchrl_perf.bench import training
from torchrl_perf.bench.training import CASES, BenchTraining, Case, command_of

TINY = Case("ppo", "CartPole-v1", 64, 2, 16, 1, 2, cleanrl="ppo.py")


def test_ours_is_timed_in_a_process_of_its_own(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(CASES, "tiny", TINY)
    options = ["--only", "tiny", "--sides", "torchrl_perf", "cleanrl", "--rounds", "1", "--threads", "1"]
    assert training.main([*options, "--out", str(tmp_path)]) == 0
    ours, theirs = json.loads((tmp_path / "training_cpu.json").read_text())["rows"]
    assert ours["frames"] == 128
    assert ours["frames_per_second"] > 0
    assert ours["start_s"] > 0
    assert theirs["note"].startswith("cleanrl: expected a checkout of CleanRL's repository with cleanrl/ppo.py, rec")
    assert "frames_per_second" not in theirs
    assert "as a multiple of the faster peer's speed" in capsys.readouterr().out


def test_scripts_of_cleanrl_run_as_they_are(monkeypatch, tmp_path):
    (tmp_path / "cleanrl").mkdir()
    (tmp_path / "cleanrl" / "ppo.py").write_text("import sys\nprint('SPS: 5')\nprint('SPS:', len(sys.argv))\n")
    options = BenchTraining(cleanrl=str(tmp_path))
    row = training.run_once(TINY, "cleanrl", options)
    command, folder = command_of(TINY, "cleanrl", 64, options)
    assert row["frames_per_second"] == len(command) - 1
    assert folder == str(tmp_path)
    assert command[:2] == [sys.executable, str(tmp_path / "cleanrl" / "ppo.py")]
    given = dict(zip(command[3::2], command[4::2], strict=True))
    assert given["--total-timesteps"] == "64"
    assert given["--num-minibatches"] == "2"
    (tmp_path / "cleanrl" / "ppo.py").write_text("raise SystemExit('broken')\n")
    assert training.run_once(TINY, "cleanrl", options)["note"] == "broken"


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_peers_get_the_same_sizes(algorithm):
    case = next(case for case in CASES.values() if case.algorithm == algorithm)
    theirs, ours = (json.loads(command_of(case, side, 100, BenchTraining())[0][-1]) for side in ("sb3", "torchrl_perf"))
    assert (ours["env"], ours["num_envs"], ours["frames"]) == (case.env, case.num_envs, 100)
    assert {**theirs, "side": ""} == {**ours, "side": ""}


def test_ours_is_compared_with_the_faster_peer(monkeypatch):
    speeds = iter([100.0, 300.0, 50.0, 90.0, 200.0, 40.0])
    monkeypatch.setattr(
        training, "run_once", lambda case, side, options: {"side": side, "frames_per_second": next(speeds)}
    )
    options = BenchTraining(sides=("sb3", "torchrl_perf", "cleanrl"), rounds=2)
    rows = {row["side"]: row for row in training.measure("ppo-CartPole", options)}
    assert {side: row["frames_per_second"] for side, row in rows.items()} == {
        "sb3": 100.0, "torchrl_perf": 300.0, "cleanrl": 50.0
    }  # fmt: skip
    assert rows["torchrl_perf"]["times"] == 3.0
    assert "times" not in rows["sb3"]


def test_names_that_do_not_exist(capsys):
    assert training.main(["--only", "ppo-Cheetah"]) == 1
    assert "only: expected names among ppo-HalfCheetah" in capsys.readouterr().err
