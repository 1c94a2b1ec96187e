"""``torchrl-perf sweep`` with Ray: bad settings are stopped early, and what is done is not done again."""

import csv

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from torchrl_perf import cli
from torchrl_perf.cli.sweep_table import CUT

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RUN = [
    *("--env", "CartPole", "--device", "cpu", "--num-envs", "8", "--num-steps", "16", "--total-steps", "12800"),
    *("--hidden-size", "32", "--log-interval", "10"),
]


def rows(folder):
    """The rows of a sweep."""
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_cuts_bad_runs_and_goes_on_where_it_was(tmp_path, capsys):
    words = ["sweep", "ppo", "--set", "learning_rate=1e-3,1e-6", "--seeds", "2", "--at-once", "1", "--halving", "2"]
    words += ["--dir", str(tmp_path), "--name", "rates", "--", *RUN]
    assert cli.main(words) == 0
    folder = tmp_path / "rates"
    found = rows(folder)
    assert [row["learning_rate"] for row in found] == ["1e-3", "1e-3", "1e-6", "1e-6"]
    assert {row["state"] for row in found} == {"finished", "cut"}
    best = max(found, key=lambda row: float(row["last"]))
    assert (best["learning_rate"], best["state"], best["env_steps"]) == ("1e-3", "finished", "12800")
    assert "1e-3" in capsys.readouterr().out.splitlines()[-3]
    cut = list(folder.glob(f"runs/*/{CUT}"))
    assert len(cut) == sum(row["state"] == "cut" for row in found)
    # one that was interrupted is run to its end, the others are left as they are
    whole = next(row for row in found if row["state"] == "finished")
    written = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/progress.csv")}
    assert cli.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/progress.csv")} == written
    assert whole in rows(folder)


def test_runs_that_fail_are_named(tmp_path, capsys):
    words = ["sweep", "ppo", "--dir", str(tmp_path), "--", *RUN, "--env", "Nowhere-v7"]
    assert cli.main(words) == 1
    assert "Nowhere-v7" in capsys.readouterr().err
