"""Pictures of a run, drawn from its ``progress.csv``."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

from torchrl_perf.metrics.figure import new_figure, save_figure

RETURN_COLUMN = "episode/mean_return"
"""Column that the learning curve shows by default."""
EVALUATION_COLUMN = "eval/mean_return"
"""Column that is drawn beside it, where there is one."""


def read_progress(progress_csv: str | os.PathLike[str], column: str = RETURN_COLUMN) -> dict[str, list[float]]:
    """Read the rows of a ``progress.csv`` in which a column has a finite value.

    Args:
        progress_csv: file written by ``ProgressCSVLogger``.
        column: name of the metric.

    Returns:
        Lists of equal length: ``"step"`` (environment steps), ``"wall_time"`` (seconds) and the column.

    Raises:
        KeyError: if the file has no such column; the message lists those it has.
    """
    with Path(progress_csv).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        available = list(reader.fieldnames or ())
        names = ("step", "wall_time", column)
        if any(name not in available for name in names):
            raise KeyError(
                f"{progress_csv}: expected the columns {list(names)}, received {available}. Remedy: pass one of them "
                "as the column."
            )
        rows = [tuple(float(row[name]) for name in names) for row in reader if row[column]]
    finite = [row for row in rows if math.isfinite(row[-1])]
    return {name: [row[index] for row in finite] for index, name in enumerate(names)}


def save_learning_curve(
    progress_csv: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    column: str = RETURN_COLUMN,
    title: str | None = None,
) -> Path:
    """Draw the return against environment steps and against wall time, side by side, and save the picture.

    Beside returns of episodes, those of evaluations are drawn, where there are any.

    Args:
        progress_csv: file written by ``ProgressCSVLogger``.
        path: picture to write; the suffix gives the format, for example ``.png``.
        column: metric to draw.
        title: heading of the picture.

    Returns:
        The path that was written.

    Raises:
        KeyError: if the file has no such column.
    """
    from matplotlib.ticker import EngFormatter

    data = read_progress(progress_csv, column)
    figure = new_figure(9.0, 3.6)
    curves = [("while learning, with exploration", data, data[column])]
    if column == RETURN_COLUMN and (evaluated := _evaluations(progress_csv)):
        curves.append(("evaluated, without exploration", evaluated, evaluated[EVALUATION_COLUMN]))
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for axes, name, label in ((by_step, "step", "environment steps"), (by_time, "wall_time", "wall time (s)")):
        for curve, rows, values in curves:
            # a line of one point is invisible
            axes.plot(rows[name], values, marker="o" if len(values) < 2 else None, linewidth=1.5, label=curve)
        axes.set_xlabel(label)
        axes.grid(visible=True, alpha=0.3)
    by_step.locator_params(axis="x", nbins=6)
    by_step.xaxis.set_major_formatter(EngFormatter())
    by_step.set_ylabel("mean return of finished episodes" if column == RETURN_COLUMN else column)
    if len(curves) > 1:
        by_step.legend(fontsize="small")
    if title is not None:
        figure.suptitle(title)
    return save_figure(figure, path)


def _evaluations(progress_csv: str | os.PathLike[str]) -> dict[str, list[float]]:
    """The rows with an evaluation; empty for a run without one."""
    try:
        found = read_progress(progress_csv, EVALUATION_COLUMN)
    except KeyError:
        return {}
    return found if found["step"] else {}
