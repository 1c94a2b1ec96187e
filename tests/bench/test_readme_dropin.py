"""The tables of replaced lines: what they show of the results, which machine, and that they work without any."""

import json
from pathlib import Path

import pytest

from torchrl_perf.bench import readme, readme_dropin
from torchrl_perf.bench.dropin_loops import LOOPS
from torchrl_perf.bench.dropin_run import variants_of


def row(algorithm: str, variant: str, speed: float, times: float, lines: int | None = 1) -> dict[str, object]:
    return {
        "algorithm": algorithm,
        "variant": variant,
        "lines": lines,
        "first_frames": 40_960,
        "first_per_second": speed / 2,
        "frames_per_second": speed,
        "updates_per_second": speed / 10,
        "times_first": times / 2,
        "times_steady": times,
        "run_s": 204_800 / speed,
        "run_frames": 204_800,
    }


def write(folder: Path, name: str, rows: list[dict[str, object]], cpu: str = "a CPU") -> None:
    packages = {"torch": "2", "torchrl": "0.14"}
    card = {"cpu": cpu, "gpu": None, "cores": 2, "packages": packages, "python": "3"}
    (folder / f"{name}.json").write_text(json.dumps({"machine": card, "rows": rows}))


def cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


PPO = [
    row("ppo", "torchrl", 5000.0, 1.0, 0),
    row("ppo", "collector", 6000.0, 1.2),
    row("ppo", "all", 60_000.0, 12.0, 5),
]


def test_nothing_without_results(tmp_path: Path) -> None:
    assert readme_dropin.measured(tmp_path) is None
    assert readme_dropin.dropin_table(tmp_path) == readme_dropin.steps_table(tmp_path) == ""
    assert readme_dropin.off_policy_table(tmp_path) == readme.steps_block(tmp_path) == ""
    assert readme.dropin_lines(tmp_path) == []


def test_a_row_for_each_replacement_and_two_columns_for_each_algorithm(tmp_path: Path) -> None:
    failed = {"algorithm": "dqn", "variant": "loss", "ok": False, "note": "broken"}
    dqn = [row("dqn", "torchrl", 500.0, 1.0, 0), row("dqn", "all", 4000.0, 8.0, 5), failed]
    write(tmp_path, "dropin_cpu", [*PPO, *dqn])
    table = readme_dropin.dropin_table(tmp_path)
    assert cells(table)[0] == ["replaced", "PPO, frames/s", "PPO, start", "DQN, updates/s", "DQN, start"]
    assert cells(table)[2:] == [
        ["TorchRL's script", "5,000", "", "50", ""],
        ["collector", "6,000 (1.2x)", "0.6x", "", ""],
        ["all five lines", "60,000 (12x)", "6.0x", "400 (8.0x)", "4.0x"],
    ]
    assert "(40,960 of PPO, 40,960 of DQN)" in table


def test_the_gpu_takes_the_place_of_the_cpu(tmp_path: Path) -> None:
    write(tmp_path, "dropin_cpu", PPO)
    write(tmp_path, "dropin", PPO[:1], cpu="the host of a GPU")
    assert readme.dropin_lines(tmp_path)[1].startswith("Measured on the host of a GPU, 2 CPU cores")
    assert len(cells(readme_dropin.dropin_table(tmp_path))) == 3


def test_steps(tmp_path: Path) -> None:
    write(tmp_path, "dropin_cpu", [*PPO, row("sac", "torchrl", 1.0, 1.0)])
    heads, _, *body = cells(readme_dropin.steps_table(tmp_path))
    assert heads == [
        "step", "lines changed", "first 40,960 frames", "at last", "times TorchRL's", "204,800 frames"
    ]  # fmt: skip
    assert body == [
        ["0. TorchRL's script", "0", "2,500 frames/s", "5,000 frames/s", "", "41.0 s"],
        ["1. collector", "1", "3,000 frames/s", "6,000 frames/s", "1.2x", "34.1 s"],
        ["3. all five lines", "5", "30,000 frames/s", "60,000 frames/s", "12x", "3.4 s"],
    ]
    assert readme.steps_block(tmp_path).endswith(
        "Each variant ran in a process of its own. The caches of compilers were empty."
    )


def test_off_policy_rows(tmp_path: Path) -> None:
    sac = [row("sac", "torchrl", 700.0, 1.0, 0), row("sac", "trainer", 7000.0, 10.0, None)]
    write(tmp_path, "dropin", [*sac, row("dqn", "torchrl", 50.0, 1.0, 0), row("dqn", "loss", 60.0, 1.2)])
    heads, _, *body = cells(readme_dropin.off_policy_table(tmp_path))
    assert heads == ["replaced", "lines changed", "DQN, updates/s", "SAC, updates/s"]
    assert body == [
        ["TorchRL's script", "0", "5", "70"],
        ["loss", "1", "6 (1.2x)", ""],
        ["our trainer instead", "", "", "700 (10x)"],
    ]


def test_how_they_were_measured() -> None:
    plain = row("ppo", "torchrl", 1.0, 1.0, 0)
    rows = [{**plain, "clock": "process, one thread", "rounds": n, "load": float(n)} for n in (3, 2)]
    words = (
        "Each variant ran in up to 3 processes, of which the fastest counts. The caches of compilers were empty. The "
        "clock is the process's own time, on one thread."
    )
    for cores, busy in ((2, " Other programs ran beside it (load up to 3)."), (4, "")):
        assert readme_dropin.runs_line({"rows": rows, "machine": {"cores": cores}}) == f"{words}{busy}"


@pytest.mark.parametrize("algorithm", LOOPS)
def test_every_variant_has_a_label(algorithm: str) -> None:
    assert set(variants_of(algorithm)) <= set(readme_dropin.LABELS)
    assert readme_dropin.UNITS[algorithm] == LOOPS[algorithm].unit


def test_the_pages_name_the_numbers_that_were_measured() -> None:
    """The committed results: every number of the page's tables is one of them."""
    results = readme_dropin.measured()
    assert results is not None
    theirs = next(each for each in results["rows"] if (each["algorithm"], each["variant"]) == ("ppo", "torchrl"))
    assert f"{theirs['frames_per_second']:,.0f}" in readme_dropin.dropin_table()
    assert f"{theirs['run_s']:,.1f} s" in readme_dropin.steps_table()
