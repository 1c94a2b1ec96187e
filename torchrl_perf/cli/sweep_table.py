"""The results of a sweep, read from the folders of its runs: a row for each run, and a table of settings over seeds."""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchrl_perf.cli.sweep_plan import Run
from torchrl_perf.run_layout import PROGRESS, STATUS, read_json
from torchrl_perf.runtime.files import write_text

__all__ = ["CUT", "last_row", "row_of", "rows_since", "run_folder", "table", "write_rows"]

CUT = "cut.json"
"""In the folder of a run that was stopped since others were better."""


def run_folder(run: Run) -> Path | None:
    """The newest folder that a run has written to; None before it has begun."""
    found = sorted(run.place.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None


def rows_since(folder: Path | None, count: int) -> list[dict[str, float]]:
    """Rows of metrics behind the first ``count``; those that are whole.

    Args:
        folder: of a run, or None for none.
        count: rows that are known.
    """
    path = None if folder is None else folder / PROGRESS
    if path is None or not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]  # a line may be half written
    return [_numbers(row) for row in list(csv.DictReader(whole.splitlines()))[count:]]


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in row.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue
    return found


def last_row(rows: Sequence[dict[str, float]], metric: str) -> tuple[float, float]:
    """Env steps and value of the last row that has a metric; NaN for the value where none has it."""
    steps = rows[-1]["step"] if rows else 0.0
    return next(((row["step"], row[metric]) for row in reversed(rows) if metric in row), (steps, math.nan))


def row_of(run: Run, metric: str, *, lowest: bool = False) -> dict[str, Any]:
    """What came of a run.

    Args:
        run: of a sweep.
        metric: column of its rows.
        lowest: whether small values are good.
    """
    folder = run_folder(run)
    rows = rows_since(folder, 0)
    values = [row[metric] for row in rows if metric in row]
    _, last = last_row(rows, metric)
    state = "not begun" if folder is None else read_json(folder / STATUS).get("state", "running")
    state = "cut" if state != "finished" and (run.place / CUT).exists() else state
    return {
        **run.settings,
        "seed": run.seed,
        "state": state,
        "env_steps": int(rows[-1]["step"]) if rows else 0,
        "last": last,
        "best": (min if lowest else max)(values, default=math.nan),
        "folder": "" if folder is None else str(folder),
    }


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes rows to ``path`` as CSV, whole or not at all."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names), *(",".join(_cell(row.get(name, "")) for name in names) for row in rows)]
    write_text(path, "\n".join(lines) + "\n", lasting=False)


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return json.dumps(text) if "," in text else text


def table(rows: Sequence[dict[str, Any]], names: Sequence[str], *, lowest: bool = False) -> str:
    """Settings, the best ones first, with the mean, least and greatest last value of their seeds.

    Args:
        rows: of :func:`row_of`.
        names: of the settings.
        lowest: whether small values are good.
    """
    lines = [[*names, "seeds", "env steps", "mean", "least", "greatest"]]
    groups = sorted(_groups(rows, names), key=lambda each: each[0])
    lines += [cells for _, cells in (groups if lowest else _reversed(groups))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _groups(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Iterator[tuple[float, list[str]]]:
    """Of each combination of settings what it is sorted by, and its cells."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(str(row[name]) for name in names), []).append(row)
    for values, of_seeds in found.items():
        last = [row["last"] for row in of_seeds if math.isfinite(row["last"])]
        mean = math.fsum(last) / len(last) if last else math.nan
        steps = max(row["env_steps"] for row in of_seeds)
        numbers = [f"{value:.6g}" for value in (mean, min(last, default=math.nan), max(last, default=math.nan))]
        yield mean, [*values, str(len(of_seeds)), f"{steps:,}", *numbers]


def _reversed(groups: Sequence[tuple[float, list[str]]]) -> list[tuple[float, list[str]]]:
    """The greatest first, and those without a number last."""
    return sorted(groups, key=lambda each: (math.isnan(each[0]), -each[0]))
