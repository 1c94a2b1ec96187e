"""The tables of learning over seeds in the documentation, from the committed figures of several benchmarks."""

import math
from pathlib import Path
from typing import Any

from torchrl_perf.bench.curves import FOLDER
from torchrl_perf.bench.curves_seeds import over_seeds, read_over_seeds
from torchrl_perf.bench.curves_studies import STUDIES
from torchrl_perf.bench.report import RESULTS, format_table, read_results

__all__ = ["curves_table", "memory_table", "robots_table"]

TRAINED = "trained"
COLUMNS = ("study", "run", "figure", "seeds", "trained [interval]", "beside it", "chosen on")


def curves_table(folder: Path = FOLDER) -> str:
    """Markdown: the interquartile mean and its interval of the figures that each study is about.

    Args:
        folder: of the runs; studies that are not in it are left out.
    """
    lines = []
    for name, study in STUDIES.items():
        if study.together or not (folder / "over_seeds" / f"{name}.json").is_file():
            continue  # a study of very many runs has a table of its own
        found = read_over_seeds(name, folder)
        for figure in study.figures:
            for run in found["shown"]:
                cells = {row["of"]: row for row in found["rows"] if (row["run"], row["figure"]) == (run, figure)}
                others = ", ".join(
                    f"{who} {_short(row['middle'])}" for who, row in cells.items() if _beside(who, study)
                )
                line = {"study": name, "run": run, "figure": figure, "beside it": others}
                line["seeds"] = ", ".join(str(seed) for seed in cells[TRAINED]["seeds"])
                lines.append(line | {"trained [interval]": _cell(cells[TRAINED]), "chosen on": found["chosen_on"]})
    return format_table(lines, COLUMNS)


def robots_table(folder: Path = RESULTS) -> str:
    """Markdown: what PPO has learnt of each robot, from ``bench robots --learn``."""
    rows = [row for row in read_results("robots_learning", folder)["rows"] if row["algorithm"] == "ppo"]
    return _of_runs(rows, "task", "return [interval]")


def memory_table(folder: Path = RESULTS) -> str:
    """Markdown: what policies with and without a memory have learnt, from ``bench recurrent --parts learning``."""
    return _of_runs(read_results("recurrent_learning", folder)["rows"], "variant", "mean return at the end [interval]")


def _of_runs(rows: list[dict[str, Any]], name: str, words: str) -> str:
    """A line for each run: its seeds, and the interquartile mean of its return with its interval."""
    runs = [
        {"run": row[name], "seed": row["seed"], "evaluation": {TRAINED: {"mean_return": row["mean_return"]}}}
        for row in rows
    ]
    lines = [
        {name: f"`{line['run']}`", "seeds": ", ".join(map(str, line["seeds"])), words: _cell(line)}
        for line in over_seeds(runs)
    ]
    return format_table(lines, (name, "seeds", words))


def _beside(who: str, study: Any) -> bool:
    """Whether it is another way to do the same, and not a part of what was trained."""
    return who != TRAINED and who in study.beside


def _cell(row: dict[str, Any]) -> str:
    if row["low"] is None or math.isnan(row["low"]):
        return f"{_short(row['middle'])}, one seed"
    return f"{_short(row['middle'])} [{_short(row['low'])}, {_short(row['high'])}]"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
