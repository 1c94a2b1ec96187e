"""The bench of whole training on CPU envs: what it runs, what it reads, what it says of a side that is absent."""

import json
import sys

import pytest

from torchrl_perf.bench import training
from torchrl_perf.bench.training import CASES, BenchTraining, Case, command_of, speed_of

TINY = Case("ppo", "CartPole-v1", 64, 2, 16, 1, 2, cleanrl="ppo.py")


def test_ours_is_timed_in_a_process_of_its_own(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(CASES, "tiny", TINY)
    options = ["--only", "tiny", "--sides", "torchrl_perf", "cleanrl", "--rounds", "1", "--threads", "1"]
    assert training.main([*options, "--out", str(tmp_path)]) == 0
    ours, theirs = json.loads((tmp_path / "training_cpu.json").read_text())["rows"]
    assert ours["frames"] == 64
    assert ours["frames_per_second"] > 0
    assert ours["frames_per_cpu_second"] > 0
    assert theirs["note"].startswith("cleanrl: expected a checkout of CleanRL's repository with cleanrl/ppo.py, rec")
    assert "frames_per_second" not in theirs
    assert "how many times as fast" in capsys.readouterr().out


def test_scripts_of_cleanrl_run_as_they_are(monkeypatch, tmp_path):
    (tmp_path / "cleanrl").mkdir()
    (tmp_path / "cleanrl" / "ppo.py").write_text("import sys\nprint('SPS: 5')\nprint('SPS:', len(sys.argv))\n")
    row = training.run_once(TINY, "cleanrl", BenchTraining(cleanrl=str(tmp_path)))
    command, folder = command_of(TINY, "cleanrl", 64, str(tmp_path))
    assert row["frames_per_second"] == len(command) - 1
    assert folder == str(tmp_path)
    assert command[:2] == [sys.executable, str(tmp_path / "cleanrl" / "ppo.py")]
    given = dict(zip(command[3::2], command[4::2], strict=True))
    assert given["--total-timesteps"] == "64"
    assert given["--num-minibatches"] == "2"
    (tmp_path / "cleanrl" / "ppo.py").write_text("raise SystemExit('broken')\n")
    assert training.run_once(TINY, "cleanrl", BenchTraining(cleanrl=str(tmp_path)))["note"] == "broken"


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_peers_get_the_same_sizes(algorithm):
    case = next(case for case in CASES.values() if case.algorithm == algorithm)
    settings = json.loads(command_of(case, "sb3", 100, None)[0][-1])
    assert (settings["env"], settings["num_envs"], settings["frames"]) == (case.env, case.num_envs, 100)
    assert {**settings, "side": ""} == {**json.loads(command_of(case, "torchrl_perf", 100, None)[0][-1]), "side": ""}


def test_what_a_run_prints():
    assert speed_of("SPS: 100\nother\nSPS: 250\n", "cleanrl") == 250.0
    assert speed_of("frames_per_second: 12.5\n", "sb3") == 12.5
    assert speed_of("nothing", "sb3") is None
    assert speed_of("SPS: 0", "cleanrl") is None


def test_names_that_do_not_exist(capsys):
    assert training.main(["--only", "ppo-Cheetah"]) == 1
    assert "only: expected names among ppo-HalfCheetah" in capsys.readouterr().err
