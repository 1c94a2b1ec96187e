"""``torchrl-perf bench memory``: the loops do what their settings say, and verdicts follow the rows."""

import gc
import json
import math

import pytest
import torch

from torchrl_perf.bench import memory, report
from torchrl_perf.bench.memory_loops import AGGRESSIVE, LEAKY, OPTIMISED, SETTINGS, ListLoop, native
from torchrl_perf.cli import main

CPU = torch.device("cpu")


def test_rows_and_verdicts(tmp_path, capsys, small_heap):
    options = ["--seconds", "0.05", "--rounds", "2", "--leak-steps", "400", "--objects", "0", "--intervals", "1", "0"]
    assert main(["bench", "memory", *options, "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "memory_cpu.json").read_text(encoding="utf-8"))["rows"]
    loops = {row["variant"]: row for row in rows if row["part"] == "loop"}
    assert set(loops) == {setting.name for setting in SETTINGS} | {"native"}
    assert all(row["per_second"] > 0 for row in loops.values())
    assert loops["leaky"]["leaks"] and loops["leaky"]["slope_mib_per_1000"] > 1
    assert not loops["native"]["leaks"]
    verdicts = {row["claim"]: row["verdict"] for row in rows if row["part"] == "verdict"}
    assert len(verdicts) == 13
    assert set(verdicts.values()) <= {"confirmed", "partly", "not reproduced", "n/a on this device"}
    assert verdicts["of the aggressive loop copies cost 50%"] == "n/a on this device"
    assert verdicts["leaky leaks"] == verdicts["native does not leak"] == "confirmed"
    printed = capsys.readouterr().out
    assert "verdict" in printed
    assert printed.count("loop  leaky  per_second") == 2  # again with the median of both rounds


def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path, capsys, monkeypatch):
    def added(bench):
        bench.add("loop", "leaky", per_second=5.0)

    def cut_off(bench):
        assert "loop  leaky  per_second 5" in capsys.readouterr().out
        assert json.loads((tmp_path / "memory_cpu.json").read_text())["rows"] == bench.sheet.rows != []
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "loops", added)
    monkeypatch.setattr(memory, "own_loop", cut_off)
    assert main(["bench", "memory", "--device", "cpu", "--out", str(tmp_path)]) == 130
    assert (tmp_path / "memory_cpu.json").is_file()


def test_the_list_is_full_behind_the_warm_up():
    loop = ListLoop(AGGRESSIVE, CPU)
    loop.warm_up()
    assert len(loop.memory) == 2_000 and loop.trained > 0


def run(setting, steps):
    loop = ListLoop(setting, CPU)
    for _ in range(steps):
        loop.step()
    return loop


def test_leaky_keeps_graphs_and_has_no_bound():
    loop = run(LEAKY, 300)
    assert len(loop.memory) == 300 * 8
    assert loop.memory[0][-1].grad_fn is not None
    assert loop.losses[0][0].grad_fn is not None


@pytest.mark.parametrize(("setting", "most"), [(AGGRESSIVE, 2_000), (OPTIMISED, 2_400)])
def test_lists_stay_within_their_tolerance(setting, most, small_heap):
    loop, longest = ListLoop(setting, CPU), 0
    for _ in range(310):
        loop.step()
        longest = max(longest, len(loop.memory))
    assert 2_000 <= len(loop.memory) <= longest <= most
    assert all(value.grad_fn is None for row in loop.memory[:50] for value in row)


def test_aggressive_collects_and_optimised_does_not(monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append(True))
    run(AGGRESSIVE, 101)
    assert len(calls) >= 2
    calls.clear()
    run(OPTIMISED, 101)
    assert not calls


@pytest.mark.parametrize("compiles", [True, False])
def test_native_makes_as_many_updates_of_as_many_rows_for_each_frame(device, compiles):
    trainer, step = native(device, compiles=compiles)
    for _ in range(10):
        step()
    config = trainer.config
    assert config.batch_size / config.updates_per_iteration == 4 * 8 and config.minibatch_size == 32
    trainer.close()


@pytest.mark.parametrize(
    ("grows_until", "leaks", "calls"), [(0, False, 100), (90, False, 200), (190, False, 300), (math.inf, True, 300)]
)
def test_what_grows_at_the_start_alone_is_no_leak(monkeypatch, grows_until, leaks, calls):
    bench, made = memory.Bench(memory.BenchMemory(), CPU), []
    monkeypatch.setattr(bench, "mib", lambda: 100 + 1e-3 * min(len(made), grows_until))
    report = memory.leak(bench, lambda: made.append(0), 100)
    assert report.leaks is leaks and len(made) == calls
    assert report.slope_mib_per_1000 == pytest.approx(1.0 if leaks else 0.0, abs=1e-6)


def test_verdicts_say_what_was_not_reproduced():
    assert memory._verdict("claim", "1", 1.0, 0.9, 0.5)["verdict"] == "confirmed"
    assert memory._verdict("claim", "1", 0.6, 0.9, 0.5)["verdict"] == "partly"
    assert memory._verdict("claim", "1", 0.4, 0.9, 0.5)["verdict"] == "not reproduced"


def test_quick_writes_nothing_unasked(monkeypatch):
    parts = ("loops", "own_loop", "cleanup_costs", "frequencies", "trims", "guard_costs")
    for name in parts:
        monkeypatch.setattr(memory, name, lambda bench: None)
    monkeypatch.setattr(memory, "verdicts", lambda bench: [])
    monkeypatch.setattr(report, "write_results", lambda *args: pytest.fail("written"))
    assert memory.main(["--quick", "--device", "cpu"]) == 0
