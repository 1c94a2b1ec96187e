"""The judgement of a run that is over: each verdict is brought about by a folder that deserves it."""

import csv
import json
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from torchrl_perf.cli import main, run_report
from torchrl_perf.cli.run_report import check_run, read_log
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder
from torchrl_perf.trainers.run.state import TrainState

BATCH = 64  # num_envs * num_steps


def write_rows(run, rows):
    """Write a ``progress.csv`` of dicts; a key that a row lacks is an empty cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (run / "progress.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def good_rows(count=40, **columns):
    """Rows of ten iterations each; ``columns`` are functions of the row's number."""
    row = {
        "step": lambda k: 10 * BATCH * (k + 1),
        "wall_time": lambda k: k + 1,
        "train/loss": lambda k: 1 / (k + 1),
        "train/first_bad_iteration": lambda k: -1,
        "episode/mean_return": lambda k: math.nan if k < 2 else k,
        "time/steps_per_second": lambda k: 100 if k == 0 else 1000 + k % 3,
        "gpu/utilization": lambda k: 5 if k == 0 else 80,
        "memory/allocated_mib": lambda k: 100.0,
        "memory/heap_mib": lambda k: 300.0,
        "nonfinite/loss": lambda k: 0,
        "option/usage_wait": lambda k: 0.4,
        "option/usage_long": lambda k: 0.3,
        "option/usage_short": lambda k: 0.3,
    }
    return [{name: value(k) for name, value in (row | columns).items()} for k in range(count)]


@pytest.fixture
def run(tmp_path):
    """The folder of a run that went well."""
    folder = tmp_path / "ppo-CartPole-0"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_envs": 8, "num_steps": 8, "on_nan": "stop"}))
    (folder / "status.json").write_text(json.dumps({"pid": 1, "state": "finished", "step": 400 * BATCH}))
    write_rows(folder, good_rows())
    checkpoints = CheckpointFolder(folder / "checkpoints")
    state = TrainState(counters={"iterations_done": 400}).snapshot()
    checkpoints.write(state, 300)
    checkpoints.write(state, 400)
    checkpoints.mark_best(300)
    return folder


def find(run, name):
    """The check of a name."""
    return next(check for check in check_run(run) if check.name == name)


def test_a_good_run(run):
    checks = check_run(run)
    assert {check.name: check.verdict for check in checks} == dict.fromkeys(
        ("state", "rows", "finite numbers", "speed", "GPU utilisation", "device memory", "process memory", "checkpoint",
         "options"),
        "ok",
    )  # fmt: skip
    assert find(run, "speed").found == "1,001 steps/s, +0% from the first third to the last."
    assert find(run, "GPU utilisation").found == "80 % on average, 80 to 80 %."  # the first interval is left out
    assert find(run, "checkpoint").found == "000000400.pt and best.pt load, up to the last row."


@pytest.mark.parametrize(
    ("state", "pid", "verdict"),
    [("failed", 1, "fail"), ("stopped", 1, "warn"), ("dancing", 1, "n/a"), (None, 1, "n/a")],
)
def test_state(run, state, pid, verdict):
    (run / "status.json").write_text(json.dumps({"pid": pid, "state": state}))
    assert find(run, "state").verdict == verdict


def test_a_killed_run(run, monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (run / "status.json").write_text(json.dumps({"pid": child.pid, "state": "running"}))
    monkeypatch.setattr("torchrl_perf.cli.run_folder.QUIET_SECONDS", -1.0)
    assert find(run, "state").found == f"says running, process {child.pid} is gone: killed."


class TestRows:
    def test_steps_that_do_not_rise(self, run):
        rows = good_rows()
        write_rows(run, [*rows, rows[-1]])
        check = find(run, "rows")
        assert (check.verdict, check.found) == ("fail", "41 rows, 0 broken lines, 1 steps that do not rise.")

    @pytest.mark.parametrize("line", ["1,2", "x" + ",1" * 12, ",1" * 12, "\0\0\0"])
    def test_broken_lines(self, run, line):
        with (run / "progress.csv").open("a") as file:
            file.write(f"{line}\n")
        assert find(run, "rows").verdict == "fail"

    def test_holes(self, run):
        rows = good_rows()
        del rows[5]["train/loss"], rows[6]["gpu/utilization"]
        check = find(run, "rows") if write_rows(run, rows) is None else None
        assert (check.verdict, check.found) == ("warn", "40 rows, with empty cells in train/loss.")

    def test_a_column_that_comes_late_is_no_hole(self, run):
        rows = good_rows()
        for row in rows[:7]:
            del row["train/loss"]
        write_rows(run, rows)
        assert find(run, "rows").verdict == "ok"

    def test_none(self, run):
        write_rows(run, [])
        (run / "progress.csv").write_text("step,wall_time\n")
        assert find(run, "rows").verdict == "fail"
        assert find(run, "finite numbers").verdict == find(run, "speed").verdict == "n/a"
        (run / "progress.csv").unlink()
        assert find(run, "rows").verdict == "n/a"


class TestFinite:
    def test_a_run_that_diverged(self, run):
        write_rows(run, good_rows(**{"train/first_bad_iteration": lambda k: -1 if k < 39 else 395}))
        check = find(run, "finite numbers")
        assert (check.verdict, check.found) == ("fail", "not finite from iteration 395, on_nan=stop.")

    def test_a_run_that_went_on(self, run):
        (run / "config.json").write_text(json.dumps({"num_envs": 8, "num_steps": 8, "on_nan": "skip"}))
        bad = {"train/first_bad_iteration": lambda k: -1 if k < 9 else 95, "nonfinite/loss": lambda k: 3 * (k == 9)}
        write_rows(run, good_rows(**bad))
        check = find(run, "finite numbers")
        assert (check.verdict, check.found) == ("warn", "not finite from iteration 95, on_nan=skip: loss 3.")

    def test_counts_alone(self, run):
        write_rows(run, good_rows(**{"nonfinite/loss": lambda k: 2}))
        assert (
            find(run, "finite numbers").found == "values that were not finite: loss 80; the run went on without them."
        )

    @pytest.mark.parametrize(("bad", "verdict"), [(5, "warn"), (39, "fail")])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_cells(self, run, bad, verdict, value):
        write_rows(run, good_rows(**{"train/loss": lambda k: value if k == bad else 1.0}))
        check = find(run, "finite numbers")
        assert check.verdict == verdict
        assert "train/loss" in check.found

    def test_returns_before_the_first_episode_may_be_nan(self, run):
        write_rows(run, good_rows(**{"episode/mean_return": lambda k: math.nan}))
        assert find(run, "finite numbers").verdict == "ok"
        write_rows(run, good_rows(**{"episode/mean_return": lambda k: math.nan if k == 9 else 1.0}))
        assert find(run, "finite numbers").verdict == "warn"


class TestSpeed:
    @pytest.mark.parametrize(
        ("last", "verdict"), [(1.0, "ok"), (0.85, "ok"), (0.7, "warn"), (0.3, "fail"), (3.0, "ok")]
    )
    def test_trend(self, run, last, verdict):
        write_rows(run, good_rows(**{"time/steps_per_second": lambda k: 1000 * (1 + (last - 1) * (k >= 26))}))
        assert find(run, "speed").verdict == verdict

    def test_too_few(self, run):
        write_rows(run, good_rows(2))
        assert find(run, "speed").verdict == "n/a"
        write_rows(run, good_rows(4))
        assert "too few intervals for a trend" in find(run, "speed").found

    def test_little_use_of_the_gpu(self, run):
        write_rows(run, good_rows(**{"gpu/utilization": lambda k: 20}))
        assert find(run, "GPU utilisation").verdict == "warn"


class TestMemory:
    @pytest.mark.parametrize("column", ["allocated", "heap"])
    def test_a_leak(self, run, column):
        noise = np.random.default_rng(0).normal(size=40)
        write_rows(run, good_rows(**{f"memory/{column}_mib": lambda k: 100 + k + 0.1 * noise[k]}))
        check = find(run, "device memory" if column == "allocated" else "process memory")
        assert check.verdict == "fail"
        assert "+100" in check.found or "+99" in check.found  # 1 MiB in ten iterations

    def test_noise_is_no_leak(self, run):
        noise = np.random.default_rng(0).normal(size=40)
        write_rows(run, good_rows(**{"memory/allocated_mib": lambda k: 100 + noise[k]}))
        assert find(run, "device memory").verdict == "ok"

    def test_a_slope_of_a_few_kib_is_no_leak(self, run):
        write_rows(run, good_rows(**{"memory/heap_mib": lambda k: 100 + 0.01 * k}))
        assert find(run, "process memory").verdict == "ok"

    def test_the_resident_size_only_warns(self, run):
        rows = good_rows(**{"memory/rss_mib": lambda k: 100 + k})
        for row in rows:
            del row["memory/heap_mib"]
        write_rows(run, rows)
        assert find(run, "process memory").verdict == "warn"

    def test_too_few_readings(self, run):
        write_rows(run, good_rows(5))
        assert find(run, "device memory").verdict == "n/a"


class TestCheckpoint:
    def test_behind(self, run):
        (run / "checkpoints" / "000000400.pt").unlink()
        check = find(run, "checkpoint")
        assert check.verdict == "warn"
        assert f"{100 * BATCH:,} steps behind the last row" in check.found

    def test_cut_off(self, run):
        path = run / "checkpoints" / "000000400.pt"
        path.write_bytes(path.read_bytes()[:100])
        check = find(run, "checkpoint")
        assert check.verdict == "fail"
        assert "000000400.pt does not load" in check.found
        assert "000000300.pt, the one before" in check.remedy

    def test_code_is_not_executed(self, run, tmp_path):
        class Payload:
            def __reduce__(self):
                return (exec, (f"open({str(tmp_path / 'executed')!r}, 'w')",))

        (run / "checkpoints" / "best.pt").unlink()
        (run / "checkpoints" / "best.pt").write_bytes(pickle.dumps(Payload()))
        assert find(run, "checkpoint").verdict == "fail"
        assert not (tmp_path / "executed").exists()

    def test_none(self, run):
        for path in (run / "checkpoints").iterdir():
            path.unlink()
        assert find(run, "checkpoint").found == "there is none."


class TestOptions:
    @pytest.mark.parametrize(
        ("shares", "verdict"),
        [((0.5, 0.3, 0.2), "ok"), ((0.51, 0.29, 0.2), "warn"), ((0.48, 0.48, 0.04), "warn"), ((1 / 6,) * 6, "ok")],
    )
    def test_collapse(self, run, shares, verdict):
        rows = [{"step": k + 1, **{f"option/usage_{n}": share for n, share in enumerate(shares)}} for k in range(8)]
        write_rows(run, rows)
        assert find(run, "options").verdict == verdict

    def test_two_options_are_no_collapse(self, run):
        write_rows(run, [{"step": 1, "option/usage_a": 0.5, "option/usage_b": 0.5}])
        assert find(run, "options").verdict == "ok"

    def test_the_end_of_the_run_counts(self, run):
        write_rows(run, good_rows(**{"option/usage_wait": lambda k: 0.9 if k > 30 else 0.4}))
        assert find(run, "options").verdict == "warn"

    def test_a_run_without_options(self, run):
        write_rows(run, [{"step": 1}])
        assert find(run, "options").verdict == "n/a"


class TestCommand:
    def test_exit_codes(self, run, capsys):
        assert main(["doctor", "--after", str(run)]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == "ok: 9 ok, 0 warn, 0 fail, 0 n/a"
        (run / "status.json").write_text('{"state": "failed"}')
        assert main(["doctor", "--after", str(run), "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["verdict"] == "fail"
        assert report["checks"][0] == {
            "name": "state",
            "verdict": "fail",
            "found": "ended with an error.",
            "remedy": "read what it printed; go on with --resume, from the newest checkpoint.",
        }

    @pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "\0\1\2", "\xff\xfe"])
    def test_a_foreign_table(self, run, capsys, content):
        (run / "progress.csv").write_bytes(content.encode("latin-1"))
        assert main(["doctor", "--after", str(run)]) == 2
        assert "expected a table with a column step" in capsys.readouterr().err

    def test_folders_without_a_run(self, tmp_path, capsys):
        for path in (tmp_path / "none", tmp_path):
            assert main(["doctor", "--after", str(path)]) == 2
            assert "run: expected" in capsys.readouterr().err

    def test_a_torch_that_does_not_import_is_reported(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "torchrl_perf.runtime.doctor", None)
        assert main(["doctor"]) == 1
        assert capsys.readouterr().out.startswith("fail  torch")
        assert main(["doctor", "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["verdict"] == "fail"

    def test_the_machine(self, tmp_path, capsys):
        code = main(["doctor", "--json", "--run-dir", str(tmp_path)])
        report = json.loads(capsys.readouterr().out)
        assert code == (report["verdict"] == "fail")
        assert {"name", "verdict", "found", "remedy"} == set(report["checks"][0])

    @pytest.mark.parametrize("device", ["cpu", "cuda:x", "0"])
    def test_a_device_is_one_of_cuda(self, device, capsys):
        with pytest.raises(SystemExit):
            main(["doctor", "--device", device])
        assert "expected cuda or cuda:<number>" in capsys.readouterr().err


def test_only_the_series_are_kept(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text("step,a,option/usage_0\n" + "".join(f"{k},{k},1\n" for k in range(1, 1001)))
    log = read_log(path)
    assert log.rows == 1000
    assert set(log.series) == {"step", "option/usage_0"}
    assert log.columns["a"].total == 500_500
    assert run_report.LEAST_ROWS == 8
