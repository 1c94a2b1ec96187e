"""The drop-in benchmark around its runs: order, comparison, failures, budget, and a run of its own process."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from torchrl_perf.bench import dropin
from torchrl_perf.bench.dropin import CACHES, LINES_OF_GRAPH, BenchDropIn, compared, faster, jobs_of, run_apart
from torchrl_perf.bench.dropin_loops import LOOPS
from torchrl_perf.bench.dropin_run import variants_of

CPU = torch.device("cpu")


def row_of(algorithm, variant, speed, replaced=(), **changes):
    figures = {"first_per_second": speed / 2, "frames_per_second": speed, "updates_per_second": speed}
    row = {"algorithm": algorithm, "variant": variant, "replaced": list(replaced), **figures, "run_s": 1000 / speed}
    return row | changes


def test_a_variant_runs_in_a_process_of_its_own_and_is_compared(tmp_path, capsys):
    options = ["--only", "sac", "--parts", "targets", "--frames", "256", "--limit", "0.1", "--device", "cpu"]
    assert dropin.main([*options, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "dropin_cpu.json").read_text())
    theirs, ours = result["rows"]
    assert [theirs["variant"], ours["variant"]] == ["torchrl", "targets"]
    assert [theirs["lines"], ours["lines"]] == [0, 1]
    assert ours["times_steady"] == pytest.approx(ours["frames_per_second"] / theirs["frames_per_second"])
    assert ours["times_run"] == pytest.approx(theirs["run_s"] / ours["run_s"])
    assert ours["frames"] == 256
    assert result["machine"]["packages"]["torch"]
    assert "| sac       | targets |" in capsys.readouterr().out


def test_what_says_most_comes_first():
    jobs = jobs_of(BenchDropIn())
    assert len(jobs) == len(set(jobs)) == sum(len(variants_of(name)) for name in LOOPS)
    assert jobs[:5] == [("ppo", name) for name in ("torchrl", "all", "captured", "first", "trainer")]
    assert jobs[-2:] == [("dqn", "trainer"), ("sac", "trainer")]
    assert jobs_of(BenchDropIn(only=("sac",), parts=("loss",))) == [("sac", "torchrl"), ("sac", "loss")]


def test_rows_are_compared_by_hand():
    theirs = row_of("dqn", "torchrl", 100.0)
    row = compared(row_of("dqn", "captured", 400.0, LOOPS["dqn"].parts), theirs)
    assert (row["times_first"], row["times_steady"], row["times_run"]) == (4.0, 4.0, 4.0)
    assert row["lines"] == 5 + LINES_OF_GRAPH
    assert compared(row_of("dqn", "trainer", 400.0, LOOPS["dqn"].parts), theirs)["lines"] is None
    assert "times_steady" not in compared(row_of("dqn", "all", 1.0), None)
    failed = {"algorithm": "dqn", "variant": "all", "ok": False, "note": "no"}
    assert compared(failed, theirs) == failed


def test_the_faster_of_two_rounds_counts():
    slow, fast, failed = row_of("ppo", "all", 10.0), row_of("ppo", "all", 20.0), {"ok": False}
    assert faster(fast, slow) is faster(slow, fast) is fast
    assert faster(slow, None) is faster(failed, slow) is faster(slow, failed) is slow
    assert faster(failed, None) is failed


@pytest.fixture
def runs(monkeypatch):
    """Replaces the processes; what it holds is the commands, and their environments."""
    seen = []

    def run(command, env, **options):
        seen.append((command, env, options["timeout"]))
        names = command[command.index("--algorithm") + 1], command[command.index("--variant") + 1]
        return SimpleNamespace(returncode=0, stdout=f"hello\n{json.dumps(row_of(*names, 10.0))}\n", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return seen


@pytest.mark.parametrize("warm", [False, True])
def test_the_compilers_caches_are_empty_or_ones_own(runs, warm, monkeypatch):
    for name in CACHES:
        monkeypatch.setenv(name, "mine")
    assert run_apart("ppo", "all", CPU, BenchDropIn(warm=warm))["variant"] == "all"
    (command, env, _), *_ = runs
    assert command[1:3] == ["-m", "torchrl_perf.bench.dropin_run"]
    assert {env[name] == "mine" for name in CACHES} == {warm}


def test_a_failure_is_a_row_with_its_reason(monkeypatch):
    done = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: no CUDA\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    row = run_apart("ppo", "all", CPU, BenchDropIn())
    assert row == {"algorithm": "ppo", "variant": "all", "ok": False, "note": "RuntimeError: no CUDA"}
    done.stderr = ""
    assert run_apart("ppo", "all", CPU, BenchDropIn())["note"] == "exit code 1"

    def hang(*args, timeout, **options):
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert run_apart("ppo", "all", CPU, BenchDropIn(limit=2.0))["note"] == f"ended after {dropin.PATIENCE + 2:.0f} s"


def test_a_failed_variant_leaves_the_others(runs, monkeypatch, tmp_path):
    succeed = subprocess.run

    def run(command, **options):
        if "loss" in command:
            return SimpleNamespace(returncode=1, stdout="", stderr="broken")
        return succeed(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    options = ["--only", "sac", "--parts", "loss", "all", "--rounds", "2", "--device", "cpu", "--out", str(tmp_path)]
    assert dropin.main(options) == 1
    rows = json.loads((tmp_path / "dropin_cpu.json").read_text())["rows"]
    assert [(row["variant"], row.get("note"), row["rounds"]) for row in rows] == [
        ("torchrl", None, 2),
        ("all", None, 2),
        ("loss", "broken", 2),
    ]
    assert len(runs) == 4


def test_what_the_budget_does_not_allow_is_named(runs, capsys, tmp_path):
    assert dropin.main(["--only", "sac", "--budget", "1e-9", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert not runs
    assert "sac torchrl, round 1; sac all, round 1" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--only", "--parts"])
def test_unknown_names_are_refused(option, runs, capsys):
    assert dropin.main([option, "wings", "--device", "cpu"]) == 2
    assert f"{option[2:]}: expected names among" in capsys.readouterr().err
    assert not runs
