"""One row of metrics from those of several ranks."""

import math
from collections.abc import Mapping, Sequence

from torchrl_perf.functional.rows.nonfinite import KINDS
from torchrl_perf.parallel.ranks import share
from torchrl_perf.trainers.run.numerics import OWN, ROW, UPDATE

__all__ = ["joint_row", "rank_of_fault", "window_of"]

SUMMED = ("episode/count", "buffer/rows")
"""Totals that each rank reports as its last value."""
AGREED = ("nonfinite/loss", "nonfinite/gradient")
"""Sums that are the same on all ranks, since losses and gradients are."""
FIRST_BAD = "train/first_bad_iteration"
WINDOW = 100
"""Episodes that the mean of a run is over."""


def window_of(ranks: int) -> int:
    """Episodes that a rank's mean is over, at most: its part of the run's, so that both lag alike.

    Args:
        ranks: of the run.
    """
    return share(WINDOW, ranks)


def joint_row(rows: Sequence[Mapping[str, float]], reductions: Mapping[str, str]) -> dict[str, float]:
    """The row of a run, the same on all ranks.

    Sums are added, greatest values compared, means averaged: those of episodes by their number in the windows, of the
    others over the ranks that have them. What is no metric of the device, such as speed and memory, is the first
    rank's.

    Args:
        rows: of each rank, in their order.
        reductions: how metrics of the device are combined, by name.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    found = {}
    for name in names:
        values = [row[name] for row in rows if name in row]
        if name in reductions:
            found[name] = _joined(name, reductions[name], values, rows)
        elif name in rows[0]:
            found[name] = rows[0][name]
    return found


def rank_of_fault(rows: Sequence[Mapping[str, float]]) -> int | None:
    """The rank that found the first number that was not finite, in its batches or its part of a loss; None for all.

    Args:
        rows: of each rank, in their order.
    """
    batches = {rank: row[ROW] for rank, row in enumerate(rows) if ROW in row}
    if batches and not any(UPDATE in row and row[UPDATE] > max(batches.values()) for row in rows):
        return max(batches, key=batches.__getitem__)
    # where, without the kind of the number
    losses = {rank: int(-row[OWN]) // len(KINDS) for rank, row in enumerate(rows) if OWN in row}
    first = [rank for rank, place in losses.items() if place == min(losses.values())]
    return first[0] if len(first) == 1 else None


def _joined(name: str, reduction: str, values: list[float], rows: Sequence[Mapping[str, float]]) -> float:
    if reduction == "max" or name in AGREED:
        return max(values)
    if reduction == "sum" or name in SUMMED:
        return math.fsum(values)
    if name == FIRST_BAD:
        return min((value for value in values if value >= 0), default=-1.0)
    if name.startswith("episode/mean_"):
        weights = [min(row.get("episode/count", 1.0), window_of(len(rows))) for row in rows if name in row]
        return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)
    return math.fsum(values) / len(values)
