"""The ablation: which variants there are, what is checked before timing, verdicts, and the quick run itself."""

import json
import math
import time

import pytest
import torch

from torchrl_perf.bench import ablation, report
from torchrl_perf.bench.ablation_loops import LOOPS, ConvLoop, MatmulLoop, PPOLoop, SACLoop, Variant
from torchrl_perf.runtime import Stopwatch

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ALL = ablation.available_switches(CUDA)


def names(loop, available=ALL):
    return [variant.name for variant in ablation.variants_of(loop, available)]


def test_each_switch_is_turned_on_alone_and_off_alone():
    switches = ["bf16", "compile", "graph", "fused"]
    on = [f"+ {name}" for name in ("tf32", *switches)]
    assert names(PPOLoop) == ["all off", *on, "all on", *(f"- {name}" for name in switches)]


def test_switches_without_effect_are_left_out():
    assert names(SACLoop)[-4:] == ["all on", "- bf16", "- compile", "- graph"]
    assert names(MatmulLoop) == ["all off", "+ tf32", "+ bf16"]
    assert names(PPOLoop, {"bf16"}) == ["all off", "+ bf16"]
    assert "+ channels-last" in names(ConvLoop)


def test_precision_of_a_variant():
    assert [Variant("", frozenset(on)).precision for on in ((), ("tf32",), ("tf32", "bf16"))] == [
        "ieee",
        "tf32",
        "bf16",
    ]


@pytest.mark.parametrize(
    ("switch", "speedup", "device", "expected"),
    [
        ("tf32", 8.1, CUDA, "confirmed (8x claimed)"),
        ("tf32", 3.0, CUDA, "partly (8x claimed)"),
        ("tf32", 1.1, CUDA, "not reproduced (8x claimed)"),
        ("tf32", 1.0, CPU, "n/a on this device"),
        ("bf16", 0.7, CUDA, "not reproduced (2x claimed)"),
        ("compile", 1.5, CPU, "confirmed (1.15x claimed)"),
        ("graph", 9.0, CUDA, ""),
    ],
)
def test_verdicts(switch, speedup, device, expected):
    assert ablation.verdict(switch, speedup, device) == expected


def test_outputs_out_of_tolerance_are_told(monkeypatch):
    original = MatmulLoop.outputs
    monkeypatch.setattr(MatmulLoop, "outputs", lambda self: original(self) * (1.1 if self.precision == "bf16" else 1))
    rows = ablation.Ablation("matmul", ablation.BenchAblation(quick=True, rounds=1, calls=1), CPU).rows()
    assert [row["ok"] for row in rows] == [True, False]
    assert rows[1]["outputs_off_by"] == pytest.approx(0.1, abs=0.01)


def test_quick_writes_nothing_unasked(monkeypatch):
    monkeypatch.setattr(report, "write_results", lambda *args: pytest.fail("written"))
    monkeypatch.setattr(ablation.Ablation, "rows", lambda self: [])
    assert ablation.main(["--quick", "--loops", "matmul", "--device", "cpu"]) == 0


def test_quick_run_writes_complete_rows(tmp_path, capsys):
    options = ["--quick", "--rounds", "1", "--calls", "1", "--budget", "0", "--device", "cpu", "--out", str(tmp_path)]
    assert ablation.main(options) == 0
    rows = json.loads((tmp_path / "ablation_cpu.json").read_text())["rows"]
    assert {row["loop"] for row in rows} == {"ppo", "dqn", "sac", "conv", "matmul"} <= set(LOOPS)
    assert all(row["ok"] and math.isfinite(row["ms"]) and row["p10_ms"] <= row["p90_ms"] for row in rows)
    assert all(row["speedup"] > 0 for row in rows if row["variant"] != "all off")
    printed = capsys.readouterr().out
    assert "| ppo " in printed and "ppo  + fused" in printed
    assert not any("compile" in row["switches"] for row in rows)


def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path, monkeypatch):
    def cut_off(steps, options, device):
        rows = json.loads((tmp_path / "ablation_cpu.json").read_text())["rows"]
        assert [row["variant"] for row in rows] == ["all off", "+ bf16"] and all(row["ok"] for row in rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(ablation, "_alternate", cut_off)
    with pytest.raises(KeyboardInterrupt):
        ablation.main(["--quick", "--loops", "matmul", "--device", "cpu", "--out", str(tmp_path)])


def test_what_the_budget_leaves_out_is_named_and_no_failure(monkeypatch, capsys):
    monkeypatch.setattr(ablation.Ablation, "out_of_time", property(lambda self: "all off" in self.done))
    checked = ablation.Ablation.checked_step

    def noted(self, variant):
        self.done.add(variant.name)
        return checked(self, variant)

    monkeypatch.setattr(ablation.Ablation, "done", set(), raising=False)
    monkeypatch.setattr(ablation.Ablation, "checked_step", noted)
    assert ablation.main(["--quick", "--loops", "matmul", "--device", "cpu"]) == 0
    assert "matmul  + bf16  left out: time is up" in capsys.readouterr().out


@pytest.mark.parametrize(("quick", "budget", "expected"), [(False, None, 95), (True, None, 25), (True, 7.0, 7)])
def test_budget(monkeypatch, quick, budget, expected):
    watch = Stopwatch("cpu").start()
    options = ablation.BenchAblation(quick=quick, budget=budget)
    instance = ablation.Ablation("matmul", options, CPU, watch=watch)
    for seconds in (expected - 1, expected + 1):
        monkeypatch.setattr(Stopwatch, "host_seconds", property(lambda self, seconds=seconds: seconds))
        assert instance.out_of_time == (seconds > expected)


def test_slow_variants_are_timed_a_few_times_only():
    calls = []

    def slow():
        calls.append(time.sleep(0.06))

    times, fast = ablation._alternate([slow, lambda: None], ablation.BenchAblation(rounds=12), CPU)
    assert 3 <= len(times) <= 8 and len(calls) == len(times) + 2  # about half a second
    assert len(fast) == 12 * 4


def test_an_unknown_loop_is_named(capsys):
    assert ablation.main(["--loops", "a2c"]) == 2
    assert "expected names among ppo, dqn" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.timeout(400)  # three compilations of PPO
@pytest.mark.parametrize("loop", ["ppo", "conv", "matmul"])
def test_all_variants_agree_on_a_gpu(loop):
    options = ablation.BenchAblation(quick=True, rounds=1, calls=1, budget=0.0)
    instance = ablation.Ablation(loop, options, torch.device("cuda", 0))
    rows = instance.rows()
    instance.close()
    assert [row["variant"] for row in rows if not row["ok"]] == []
