"""The benchmark of several ranks: what is measured, rates beside one rank's, the estimate, and a run on the CPU."""

import json
import math
import signal
import time
from pathlib import Path

import pytest

from torchrl_perf.bench import scaling
from torchrl_perf.bench.report import read_results
from torchrl_perf.bench.scaling_estimate import Assumptions, collective_us, estimate, iteration_ms, table

SECONDS = 240
"""Of a small run on a CPU, which two free cores make in half a minute; tests share them with others."""
MACHINES = Path(__file__).parents[2] / "docs" / "machines.md"


def row(ranks, rate, sums="nccl", scaling="weak"):
    """A row as a rank writes it."""
    return {
        **{"algorithm": "ppo", "shape": "8x8", "precision": "tf32", "scaling": scaling},
        **{"sums": sums, "ranks": ranks, "steps_per_second": rate},
    }


def test_cases_follow_the_options():
    sizes = {"ppo": ("2048x128-bf16", "8x4"), "dqn": ("16x4",), "sac": ("64x8192-tf32",)}
    options = scaling.BenchScaling(**sizes, sums=("nccl", "ddp"))
    found = [(case.algorithm, case.envs, case.rows, case.precision) for case in scaling.cases(options, 1, "cuda")]
    of_ddp = [("ppo", 2048, 128, "bf16"), ("ppo", 8, 4, "tf32")]
    assert found == [*of_ddp, ("dqn", 16, 4, "tf32"), ("sac", 64, 8192, "tf32"), *of_ddp]
    assert [case.scaling for case in scaling.cases(options, 2, "cuda")] == ["weak", "strong"] * 6


@pytest.mark.parametrize(
    ("ranks", "device", "sums"),
    [(1, "cuda", ["nccl", "ddp"]), (2, "cuda", ["fused", "one-shot", "nccl", "ddp"]), (2, "cpu", ["nccl", "ddp"])],
)
def test_symmetric_memory_is_measured_where_it_can_be(ranks, device, sums):
    options = scaling.BenchScaling(ppo=("8x8",), dqn=(), sac=(), scaling=("weak",))
    assert [case.sums for case in scaling.cases(options, ranks, device)] == sums


def test_a_rate_is_compared_with_one_rank_of_the_same_loop():
    rows = [row(1, 100.0), row(1, 10.0, "ddp"), row(2, 190.0, "one-shot"), row(2, 12.0, "ddp"), row(2, 150.0)]
    speedups = [one["speedup"] for one in scaling.with_speedups(rows)]
    assert speedups == pytest.approx([1.0, 1.0, 1.9, 1.2, 1.5])
    assert "speedup" not in scaling.with_speedups([row(4, 400.0)])[0]


def test_a_sum_costs_what_was_measured_within_a_host_and_a_tree_between_hosts():
    assumed = Assumptions()
    assert [collective_us(ranks, assumed) for ranks in (1, 2, 4)] == [0.0, 6.6, pytest.approx(8.2)]
    within = collective_us(8, assumed)
    step = assumed.hop_us + 4 * assumed.numbers / (assumed.network_gb_s * 1e3)
    for hosts in (2, 4, 128):
        assert collective_us(8 * hosts, assumed) == pytest.approx(within + 2 * math.log2(hosts) * step)


def test_an_iteration_by_hand():
    assumed = Assumptions(floor_ms=3.0, row_ns=10.0, one_shot_us=(5.0, 6.0), updates=16, spread=0.0)
    assert iteration_ms(100_000, 1, assumed) == pytest.approx(4.0)
    assert iteration_ms(100_000, 2, assumed) == pytest.approx(4.0 + 17 * 0.005)
    assert iteration_ms(100_000, 2, assumed, local_updates=8) == pytest.approx(4.0 + 3 * 0.005)
    assert estimate(100_000, 2, assumed) == pytest.approx(2 * 100_000 / (4.0 + 17 * 0.005) * 1e3)
    slow = Assumptions(floor_ms=3.0, row_ns=10.0, one_shot_us=(5.0, 6.0), spread=0.01)
    assert iteration_ms(100_000, 2, slow) == pytest.approx(4.0 * (1 + 0.01 * math.sqrt(2 * math.log(2))) + 17 * 0.005)


def test_the_estimate_meets_what_was_measured_on_one_and_two_gpus():
    assumed = Assumptions()
    rows = [row for row in read_results("scaling")["rows"] if (row["shape"], row["scaling"]) == ("2048x128", "weak")]
    measured = {
        ranks: min(row["ms"] for row in rows if row["ranks"] == ranks and row["sums"] != "ddp") for ranks in (1, 2)
    }
    assert iteration_ms(2_048 * 128, 1, assumed) == pytest.approx(measured[1], rel=0.02)
    assert iteration_ms(2_048 * 128, 2, assumed) == pytest.approx(measured[2], rel=0.05)


def test_the_page_has_the_table_and_its_numbers():
    page = MACHINES.read_text()
    assert table(Assumptions()) in page
    assumed = Assumptions()
    for number in (assumed.floor_ms, assumed.row_ns, *assumed.one_shot_us, assumed.updates + 1, assumed.spread * 100):
        assert f"{number:g}" in page


def test_two_ranks_of_a_cpu(tmp_path):
    words = "--ranks 1 2 --ppo 8x8 --dqn 8x4 --sac 4x16 --repeats 2 --scaling weak --sums nccl --device cpu"
    began, handler = time.monotonic(), signal.getsignal(signal.SIGINT)
    assert scaling.main([*words.split(), "--out", str(tmp_path)]) == 0
    assert signal.getsignal(signal.SIGINT) is handler, "the launcher of ranks sets its own, and leaves it"
    assert time.monotonic() - began < SECONDS
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    algorithms = ("ppo", "dqn", "sac")
    assert [(one["algorithm"], one["ranks"]) for one in rows] == [(name, n) for n in (1, 2) for name in algorithms]
    assert all(one["sums"] == "gloo" and one["equal"] and one["speedup"] > 0 for one in rows)
    # 16 updates and one of the advantages; one update of DQN; two for each of SAC's four updates
    assert [one["collectives"] for one in rows] == [0, 0, 0, 17, 1, 8]
    assert all(0 < one["share"] < 1 for one in rows[3:])


@pytest.mark.slow
def test_ddp_of_a_cpu(tmp_path):
    words = "--ranks 2 --ppo 8x8 --dqn --sac --repeats 2 --sums ddp --device cpu"
    assert scaling.main([*words.split(), "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert [(one["scaling"], one["sums"], one["equal"]) for one in rows] == [
        ("weak", "ddp", True),
        ("strong", "ddp", True),
    ]
