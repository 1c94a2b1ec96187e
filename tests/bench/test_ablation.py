"""The ablation: which variants there are, what is checked before timing, verdicts, and the quick run itself."""

import json
import math

import pytest
import torch

from torchrl_perf.bench import ablation
from torchrl_perf.bench.ablation_loops import LOOPS, ConvLoop, MatmulLoop, PPOLoop, SACLoop, Variant

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ALL = ablation.available_switches(ablation.BenchAblation(), CUDA)


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
    monkeypatch.setattr(ablation, "write_results", lambda *args: pytest.fail("written"))
    monkeypatch.setattr(ablation.Ablation, "rows", lambda self: [])
    assert ablation.main(["--quick", "--loops", "matmul", "--device", "cpu"]) == 0


def test_quick_run_writes_complete_rows(tmp_path, capsys):
    assert ablation.main(["--quick", "--rounds", "1", "--calls", "1", "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "ablation_cpu.json").read_text())["rows"]
    assert {row["loop"] for row in rows} == {"ppo", "dqn", "sac", "conv", "matmul"} <= set(LOOPS)
    assert all(row["ok"] and math.isfinite(row["ms"]) and row["p10_ms"] <= row["p90_ms"] for row in rows)
    assert all(row["speedup"] > 0 for row in rows if row["variant"] != "all off")
    assert "| ppo " in capsys.readouterr().out


def test_an_unknown_loop_is_named(capsys):
    assert ablation.main(["--loops", "a2c"]) == 2
    assert "expected names among ppo, dqn" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.timeout(400)  # three compilations of PPO
@pytest.mark.parametrize("loop", ["ppo", "conv", "matmul"])
def test_all_variants_agree_on_a_gpu(loop):
    options = ablation.BenchAblation(quick=True, rounds=1, calls=1)
    instance = ablation.Ablation(loop, options, torch.device("cuda", 0))
    rows = instance.rows()
    instance.close()
    assert [row["variant"] for row in rows if not row["ok"]] == []
