"""Curves of several runs over one axis: what the middle half of the seeds does, and how sure that is."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchrl_perf.metrics.aggregates import RESAMPLES, SEED, interquartile_mean
from torchrl_perf.metrics.figure import new_figure, save_figure

__all__ = ["Band", "Curve", "band_of", "save_comparison"]

POINTS = 200
AT_A_TIME = 1_000  # resamples, so that many curves need little memory


class Curve(NamedTuple):
    """One run.

    Attributes:
        steps: env steps, rising, ``[n]``.
        values: of the metric, ``[n]``.
    """

    steps: Sequence[float]
    values: Sequence[float]


class Band(NamedTuple):
    """Several runs that differ by the seed, at the same steps.

    Attributes:
        steps: ``[P]``.
        middle: interquartile mean over the runs, ``[P]``.
        low: lower end of its 95% bootstrap interval, ``[P]``; NaN for one run.
        high: upper end.
    """

    steps: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band_of(curves: Sequence[Curve], points: int = POINTS) -> Band:
    """Interquartile mean and interval of runs, where all of them have values; between rows on straight lines.

    Args:
        curves: at least one, none of them empty.
        points: P.

    Raises:
        ValueError: for runs that have no step in common.
    """
    first, last = max(curve.steps[0] for curve in curves), min(curve.steps[-1] for curve in curves)
    if last < first:
        raise ValueError(
            f"curves: expected runs with steps in common, received one that ends at {last:g} and one that begins at "
            f"{first:g}. Remedy: runs of the same length."
        )
    steps = np.linspace(first, last, points if last > first else 1)
    values = np.stack([np.interp(steps, curve.steps, curve.values) for curve in curves], -1)
    middle = interquartile_mean(values)
    if len(curves) < 2:
        return Band(steps, middle, np.full_like(middle, math.nan), np.full_like(middle, math.nan))
    generator = np.random.default_rng(SEED)
    found = []
    for _ in range(RESAMPLES // AT_A_TIME):
        chosen = generator.integers(len(curves), size=(AT_A_TIME, len(curves)))
        found.append(interquartile_mean(values[:, chosen]))
    low, high = np.quantile(np.concatenate(found, -1), [0.025, 0.975], axis=-1)
    return Band(steps, middle, low, high)


def save_comparison(
    groups: Mapping[str, Sequence[Curve]],
    path: str | os.PathLike[str],
    *,
    label: str,
    finals: Mapping[str, Sequence[float]],
) -> Path:
    """Draw the bands of groups of runs, and beside them the final value of each run.

    Args:
        groups: runs that differ by the seed, by name.
        path: picture to write; the suffix gives the format.
        label: of the metric.
        finals: final values of the runs of each group.

    Returns:
        The path that was written.
    """
    from matplotlib.ticker import EngFormatter

    figure = new_figure(9.0, 3.8)
    curves, last = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    for number, (name, runs) in enumerate(groups.items()):
        band, colour = band_of(runs), f"C{number % 10}"
        curves.plot(band.steps, band.middle, color=colour, linewidth=1.8, label=f"{name} ({len(runs)})")
        curves.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.2, linewidth=0)
        values = list(finals[name])
        last.plot([number] * len(values), values, "o", color=colour, alpha=0.5, markersize=4)
        middle = float(interquartile_mean(values))
        last.plot([number - 0.25, number + 0.25], [middle, middle], color=colour, linewidth=2.5)
    curves.set_xlabel("environment steps")
    curves.xaxis.set_major_formatter(EngFormatter())
    curves.locator_params(axis="x", nbins=6)
    curves.set_ylabel(label)
    curves.legend(fontsize="small", title="group (runs)", title_fontsize="small")
    last.set_xticks([])
    last.set_xlim(-0.6, len(groups) - 0.4)
    last.set_xlabel("final values")
    for axes in (curves, last):
        axes.grid(visible=True, alpha=0.3)
    return save_figure(figure, path)
