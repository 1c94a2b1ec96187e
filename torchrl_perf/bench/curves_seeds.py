"""What the evaluations of several seeds say together: interquartile means and bootstrap intervals (arXiv:2108.13264).

Of three seeds the 95% interval is from the least to the greatest: all three draws are the same one in 1 of 27 samples.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrl_perf.bench.report import json_text
from torchrl_perf.metrics.aggregates import bootstrap_interval, interquartile_mean
from torchrl_perf.runtime.files import write_text

__all__ = ["over_seeds", "read_over_seeds", "table_of", "write_over_seeds"]

FOLDER = "over_seeds"
"""Below the folder of the runs, so that a study's file is not taken for one of them."""


def over_seeds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each figure of an evaluation, over the seeds of its run.

    Args:
        rows: of a study's runs, each with ``run``, ``seed`` and ``evaluation``.

    Returns:
        Rows of ``run``, ``of`` whom, ``figure``; ``seeds`` and their ``values``, without those that are not finite;
        ``middle``, the interquartile mean; ``low`` and ``high``, the ends of its 95% interval, NaN for one seed. A
        figure that no seed has is left out.
    """
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        for who, figures in row["evaluation"].items():
            for name, value in figures.items():
                if value is not None and math.isfinite(value):
                    found.setdefault((row["run"], who, name), {})[row["seed"]] = float(value)
    lines = []
    for (run, who, name), by_seed in found.items():
        values = list(by_seed.values())
        low, high = bootstrap_interval(values, interquartile_mean)
        ends = {"middle": float(interquartile_mean(values)), "low": low, "high": high}
        lines.append({"run": run, "of": who, "figure": name, "seeds": list(by_seed), "values": values, **ends})
    return lines


def table_of(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line of :func:`over_seeds` for each run and of whom, with a cell for each figure: middle and interval."""
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        row = table.setdefault((line["run"], line["of"]), {"run": line["run"], "of": line["of"]})
        row["seeds"] = max(row.get("seeds", 0), len(line["seeds"]))
        row[line["figure"]] = _cell(line)
    return list(table.values())


def _cell(line: dict[str, Any]) -> str:
    middle = f"{line['middle']:.4g}"
    if math.isnan(line["low"]) or line["low"] == line["high"]:  # one seed, or the same for all, as baselines are
        return middle
    return f"{middle} [{line['low']:.4g}, {line['high']:.4g}]"


def write_over_seeds(name: str, title: str, chosen_on: str, rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Writes :func:`over_seeds` of a study, with the seeds of each run and those on which settings were chosen.

    It depends on the rows alone, so that it can be made again from them.
    """
    shown: dict[str, list[int]] = {}
    for row in rows:
        shown.setdefault(row["run"], []).append(row["seed"])
    said = {"study": name, "title": title, "chosen_on": chosen_on, "shown": shown}
    path = folder / FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json_text({**said, "rows": over_seeds(rows)}, indent=1) + "\n", lasting=False)
    return path


def read_over_seeds(name: str, folder: Path) -> dict[str, Any]:
    """Reads a file of :func:`write_over_seeds`."""
    return json.loads((folder / FOLDER / f"{name}.json").read_text())
