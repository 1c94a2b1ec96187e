"""Tables of ordinary TorchRL scripts with lines replaced: in ``docs/results.md`` and ``docs/drop_in.md``."""

from pathlib import Path
from typing import Any

from torchrl_perf.bench.report import RESULTS, format_table, read_results

FILES = ("dropin", "dropin_cpu")
"""Files of results, the better one first."""
NAMES = {"ppo": "PPO", "dqn": "DQN", "sac": "SAC"}
UNITS = {"ppo": "frames", "dqn": "updates", "sac": "updates"}
"""What the speed of an algorithm is told in."""
LABELS = {
    "torchrl": "TorchRL's script",
    "collector": "collector",
    "exploration": "exploration",
    "advantages": "advantages",
    "loss": "loss",
    "buffer": "replay buffer",
    "optimizer": "optimiser and clipping",
    "targets": "target update",
    "first": "collector, advantages, loss",
    "all": "all five lines",
    "captured": "all, in one graph",
    "trainer": "our trainer instead",
}
"""What is replaced, by variant, in the order of the rows."""
STEPS = ("torchrl", "collector", "first", "all", "captured", "trainer")
"""Variants of PPO that follow each other in ``docs/drop_in.md``, from its step 0 on."""


def measured(folder: Path = RESULTS) -> dict[str, Any] | None:
    """The results of a GPU, or of a CPU where there are none; None without either."""
    return next((read_results(name, folder) for name in FILES if (folder / f"{name}.json").exists()), None)


def dropin_table(folder: Path = RESULTS) -> str:
    """Markdown: speed by replaced lines and algorithm, at last and of the first frames; empty where not measured."""
    results = measured(folder)
    if results is None:
        return ""
    rows = {(row["algorithm"], row["variant"]): row for row in results["rows"] if "frames_per_second" in row}
    algorithms = [name for name in NAMES if (name, "torchrl") in rows]
    table = []
    for variant, label in LABELS.items():
        found = {name: rows[name, variant] for name in algorithms if (name, variant) in rows}
        cells = {}
        for name, row in found.items():
            cells[f"{NAMES[name]}, {UNITS[name]}/s"] = speed_cell(row)
            cells[f"{NAMES[name]}, start"] = times_of(row, "times_first")
        if found:
            table.append({"replaced": label, **cells})
    first = [f"{rows[name, 'torchrl']['first_frames']:,} of {NAMES[name]}" for name in algorithms]
    columns = [column for name in algorithms for column in (f"{NAMES[name]}, {UNITS[name]}/s", f"{NAMES[name]}, start")]
    return (
        "## Lines of a script replaced\n\n`examples/drop_in.py`, `drop_in_dqn.py` and `drop_in_sac.py` are ordinary "
        "TorchRL scripts. [Five steps](drop_in.md) replace their lines one by one. A cell is the speed in the last "
        "half of a run, and how many times TorchRL's speed it is. `start` is the same multiple for the first frames "
        f"({', '.join(first)}) from nothing, with all compiling and recording.\n\n"
        + format_table(table, ["replaced", *columns])
    )


def speed_cell(row: dict[str, Any]) -> str:
    """Speed in the algorithm's unit, and how many times TorchRL's it is."""
    speed = f"{row[UNITS[row['algorithm']] + '_per_second']:,.0f}"
    return speed if row["variant"] == "torchrl" else f"{speed} ({times_of(row, 'times_steady')})"


def times_of(row: dict[str, Any], column: str) -> str:
    """A multiple of TorchRL's speed, such as ``3.1x``; empty for TorchRL's own row."""
    if row["variant"] == "torchrl" or column not in row:
        return ""
    return f"{row[column]:.0f}x" if row[column] >= 10 else f"{row[column]:.1f}x"


def runs_line(results: dict[str, Any]) -> str:
    """How the results were measured."""
    rounds = {row.get("rounds", 1) for row in results["rows"]}
    several = f"up to {max(rounds)} processes, of which the fastest counts"
    processes = several if max(rounds) > 1 else "a process of its own"
    on_cpu = any("one thread" in row.get("clock", "") for row in results["rows"])
    clock = " The clock is the process's own time, on one thread." if on_cpu else ""
    load = max((row.get("load") or 0.0 for row in results["rows"]), default=0.0)
    busy = f" Other programs ran beside it (load up to {load:.0f})." if load > results["machine"]["cores"] else ""
    return f"Each variant ran in {processes}. The caches of compilers were empty.{clock}{busy}"


def steps_table(folder: Path = RESULTS) -> str:
    """Markdown: what the steps of the page on PPO are worth; empty where not measured."""
    results = measured(folder)
    if results is None:
        return ""
    rows = {row["variant"]: row for row in results["rows"] if row["algorithm"] == "ppo" and "run_s" in row}
    table = [_step(number, rows[variant]) for number, variant in enumerate(STEPS) if variant in rows]
    return format_table(table, list(table[0])) if table else ""


def _step(number: int, row: dict[str, Any]) -> dict[str, str]:
    lines = row.get("lines")
    return {
        "step": f"{number}. {LABELS[row['variant']]}",
        "lines changed": "" if lines is None else f"{lines}",
        f"first {row['first_frames']:,} frames": f"{row['first_per_second']:,.0f} frames/s",
        "at last": f"{row['frames_per_second']:,.0f} frames/s",
        "times TorchRL's": times_of(row, "times_steady"),
        f"{row['run_frames']:,} frames": f"{row['run_s']:,.1f} s",
    }


def off_policy_table(folder: Path = RESULTS) -> str:
    """Markdown: updates/s of DQN and SAC with each line alone, all, and one graph; empty where not measured."""
    results = measured(folder)
    if results is None:
        return ""
    rows = {(row["algorithm"], row["variant"]): row for row in results["rows"] if "updates_per_second" in row}
    table = []
    for variant, label in LABELS.items():
        found = {name: rows[name, variant] for name in ("dqn", "sac") if (name, variant) in rows}
        lines = next((row["lines"] for row in found.values()), None)
        cells = {f"{NAMES[name]}, updates/s": speed_cell(row) for name, row in found.items()}
        if found:
            table.append({"replaced": label, "lines changed": "" if lines is None else f"{lines}", **cells})
    names = [NAMES[name] for name in ("dqn", "sac") if (name, "torchrl") in rows]
    return format_table(table, ["replaced", "lines changed", *(f"{name}, updates/s" for name in names)])
