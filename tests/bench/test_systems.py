"""The bench of whole systems: every form runs, counts are right, targets are judged, failures are told."""

import json
from itertools import pairwise

import pytest
import torch

from torchrl_perf.bench import systems
from torchrl_perf.bench.systems import SYSTEMS, System, Work, main, verdicts


def test_every_system_is_timed(tmp_path, capsys):
    assert main(["--quick", "--no-compile", "--repeats", "5", "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "systems_cpu.json").read_text())["rows"]
    timed = [row for row in rows if row.get("part") != "verdict"]
    assert [row["system"] for row in timed] == list(SYSTEMS)
    for row in timed:
        work = SYSTEMS[row["system"]].make(True, torch.device("cpu"))
        assert row["per_second"] == pytest.approx(work.count / row["us"] * 1e6)
    assert {row["verdict"] for row in rows if row.get("part") == "verdict"} == {"n/a here"}
    assert "iCEM" in capsys.readouterr().out


def test_a_rollout_steps_the_env():
    work = SYSTEMS["market"].make(True, torch.device("cpu"))
    first, second = work.call(), work.call()
    assert work.count == systems.ROLLOUT * 16
    seen = [step["next", "observation"] for step in (*first, *second)]
    assert len(seen) == 2 * systems.ROLLOUT
    assert not any(torch.equal(one, other) for one, other in pairwise(seen))


def test_targets_are_judged_by_the_best_form():
    rows = [{"system": "market", "per_second": value} for value in (1e3, 3e7)] + [{"system": "planner"}]
    words = [line["verdict"] for line in verdicts(rows, torch.device("cuda"), quick=False)]
    assert words == ["confirmed", "not reproduced"]


def test_a_form_that_cannot_run_is_told(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no such thing")

    monkeypatch.setitem(SYSTEMS, "market", System(lambda small, device: Work("1", broken, 1, "x"), 1.0, "x"))
    assert main(["--quick", "--no-compile", "--device", "cpu", "--only", "market"]) == 1
    assert "failed: RuntimeError: no such thing" in capsys.readouterr().out


def test_an_unknown_name_is_refused(capsys):
    assert main(["--only", "chess"]) == 2
    assert "expected names among marine" in capsys.readouterr().err
