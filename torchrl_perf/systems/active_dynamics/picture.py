"""Pictures of a learned dynamical system: its phase portrait beside the true one, and its error against samples.

Dimension key: ``G`` points of an axis, ``M`` states.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from torchrl_perf.metrics.comparison import Curve, band_of
from torchrl_perf.metrics.figure import new_figure, save_figure

__all__ = ["PhasePortrait", "draw_phase_portrait", "draw_prediction_curves"]

SHOWN = 4_000
"""Most visited states that are drawn."""
TRUE, LEARNED, VISITED = "#1f4e79", "#b3541e", "#b8b8b8"


@dataclass(frozen=True)
class PhasePortrait:
    """Two vector fields on one grid, on the host.

    Attributes:
        axis: coordinates of the grid, ``[G]``, the same in both directions.
        true: velocities ``[G, G, 2]``, y first, x second.
        learned: likewise, in the same coordinates.
        visited: states ``[M, 2]`` that were visited, or None.
        title: of the picture.
    """

    axis: Tensor
    true: Tensor
    learned: Tensor
    visited: Tensor | None = None
    title: str = ""


def draw_phase_portrait(portrait: PhasePortrait, path: str | os.PathLike[str]) -> Path:
    """Draw the true field on the left and the learned one on the right, over the states that were visited; save it.

    Args:
        portrait: what to draw.
        path: of the image; its suffix says which kind.

    Returns:
        The path.

    Raises:
        ValueError: for fields that do not fit the axis.
    """
    size = len(portrait.axis)
    if portrait.true.shape != (size, size, 2) or portrait.learned.shape != (size, size, 2):
        raise ValueError(
            f"portrait: expected two fields [{size}, {size}, 2], received {list(portrait.true.shape)} and "
            f"{list(portrait.learned.shape)}. Remedy: both fields on the same square grid."
        )
    figure = new_figure(9.0, 4.6)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    grid = portrait.axis.numpy()
    fields = (("true", portrait.true, TRUE), ("learned", portrait.learned, LEARNED))
    for axis, (name, field, colour) in zip(axes, fields, strict=True):
        if portrait.visited is not None:
            states = portrait.visited[:: max(1, len(portrait.visited) // SHOWN)]
            axis.plot(states[:, 0].numpy(), states[:, 1].numpy(), ".", color=VISITED, markersize=1.5, zorder=0)
        axis.streamplot(
            grid, grid, field[..., 0].numpy(), field[..., 1].numpy(), color=colour, linewidth=0.8, density=1.1
        )
        axis.set(title=name, aspect="equal", xlabel="$z_1$")
        axis.set_xlim(float(grid[0]), float(grid[-1]))
        axis.set_ylim(float(grid[0]), float(grid[-1]))
    axes[0].set_ylabel("$z_2$")
    if portrait.title:
        figure.suptitle(portrait.title)
    return save_figure(figure, path, dpi=120)


Points = Sequence[tuple[float, float]]


def draw_prediction_curves(
    curves: Mapping[str, Points | Sequence[Points]],
    path: str | os.PathLike[str],
    *,
    horizon: int | None = None,
    title: str = "",
) -> Path:
    """Draw the error of prediction against the number of samples, a line for each way to choose inputs; save it.

    Args:
        curves: by name, pairs of samples and R^2 of one run, or such pairs of each of several seeds, whose
            interquartile mean is drawn with its 95% interval; the error is ``1 - R^2``, on a log scale. Values that are
            not finite leave a gap in the line of one run, and are left out of several.
        path: of the image; its suffix says which kind.
        horizon: steps ahead, for the label.
        title: of the picture.

    Returns:
        The path.

    Raises:
        ValueError: without a curve, and for seeds of which one has no finite value.
    """
    by_name = {name: _seeds_of(points) for name, points in curves.items()}
    if not by_name or not all(runs and all(runs) for runs in by_name.values()):
        raise ValueError(
            f"curves: expected at least one point for each name, received {dict(curves)}. Remedy: leave empty curves "
            "out."
        )
    figure = new_figure(6.4, 4.0)
    axis = figure.subplots()
    for name, runs in by_name.items():
        if len(runs) == 1:
            errors = [1.0 - value if math.isfinite(value) else math.nan for _, value in runs[0]]
            axis.plot([samples for samples, _ in runs[0]], errors, marker="o", markersize=3, label=name)
            continue
        band = band_of([_errors_of(name, run) for run in runs])
        line = axis.plot(band.steps, band.middle, label=f"{name}, {len(runs)} seeds")[0]
        axis.fill_between(band.steps, band.low, band.high, alpha=0.2, color=line.get_color(), linewidth=0)
    ahead = "" if horizon is None else f", {horizon} steps ahead"
    axis.set(xlabel="samples", ylabel=f"1 - R²{ahead}", yscale="log", title=title)
    axis.grid(alpha=0.3, which="both")
    axis.legend(frameon=False)
    return save_figure(figure, path, dpi=120)


def _seeds_of(points: Points | Sequence[Points]) -> list[Points]:
    """The runs of a name: one where it has pairs of numbers, several where it has lists of such pairs."""
    several = bool(points) and (not points[0] or isinstance(points[0][0], Sequence))
    return [*cast("Sequence[Points]", points)] if several else [cast("Points", points)]


def _errors_of(name: str, run: Points) -> Curve:
    finite = [(samples, 1.0 - value) for samples, value in run if math.isfinite(value)]
    if not finite:
        raise ValueError(
            f"curves: expected a finite R^2 in each seed of {name!r}, received {list(run)}. Remedy: without that seed."
        )
    return Curve(*zip(*finite, strict=True))
