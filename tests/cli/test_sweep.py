"""``torchrl-perf sweep`` with Ray: bad settings are stopped early, and what is done is not done again."""

import csv

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from torchrl_perf import cli
from torchrl_perf.cli.sweep_table import CUT

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RUN = [
    *("--env", "CartPole", "--device", "cpu", "--num-envs", "8", "--num-steps", "16", "--total-steps", "6400"),
    *("--hidden-size", "32", "--log-interval", "10"),
]


def rows(folder):
    """The rows of a sweep."""
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_cuts_bad_runs_and_goes_on_where_it_was(tmp_path, capsys):
    words = ["sweep", "ppo", "--set", "learning_rate=1e-3,1e-6", "--at-once", "1", "--halving", "2"]
    words += ["--dir", str(tmp_path), "--name", "rates", "--", *RUN]
    assert cli.main(words) == 0
    folder = tmp_path / "rates"
    found = rows(folder)
    assert [(row["learning_rate"], row["state"]) for row in found] == [("1e-3", "finished"), ("1e-6", "cut")]
    assert found[0]["env_steps"] == "6400"
    assert int(found[1]["env_steps"]) < 6400
    assert capsys.readouterr().out.splitlines()[-3].startswith("1e-3")
    assert len(list(folder.glob(f"runs/*/{CUT}"))) == 1
    # neither is begun again
    written = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/progress.csv")}
    assert cli.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/progress.csv")} == written
    assert rows(folder) == found


def test_runs_that_fail_are_named(tmp_path, capsys):
    words = ["sweep", "ppo", "--dir", str(tmp_path), "--", *RUN, "--env", "Nowhere-v7"]
    assert cli.main(words) == 1
    assert "failed; " in capsys.readouterr().out
    (told,) = tmp_path.glob("ppo/runs/*/output.txt")
    assert "Nowhere-v7" in told.read_text()
    assert [row["state"] for row in rows(tmp_path / "ppo")] == ["not begun"]
