"""Histograms that live on the device, grow their range as values arrive and never read the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

HEADER = 3
"""Words in front of the counts of a histogram row: smallest value, largest value, number of non-finite values."""

# Cells narrower than 2**-40 of the largest magnitude would make the cell number too large to be exact in float64.
_RELATIVE_RESOLUTION = 2.0**-40
_SMALLEST_WIDTH = 2.0**-60
# With larger numbers the range and the edges around it would not be finite in float64.
_LARGEST = 2.0**1000


class Histogram(NamedTuple):
    """A finished histogram on the host.

    Attributes:
        counts: number of elements in each bin, length ``bins``.
        edges: bin edges in the unit of the metric, length ``bins + 1``, evenly spaced.
        nonfinite: number of elements that are NaN, infinite or beyond 2**1000, which are in no bin.
    """

    counts: list[float]
    edges: list[float]
    nonfinite: int


def empty_row(bins: int, device: torch.device) -> Tensor:
    """Make the row of an empty histogram.

    Args:
        bins: number of bins, at least 2.
        device: where the row lives.

    Returns:
        float64 ``[HEADER + bins]``: ``+inf, -inf, 0`` and zero counts.
    """
    row = torch.zeros(HEADER + bins, dtype=torch.float64, device=device)
    row[0] = torch.inf
    row[1] = -torch.inf
    return row


def _grid(low: Tensor, high: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Choose cells of a power-of-two width so that ``bins`` of them, aligned to its multiples, cover the range.

    The width is a function of the range alone and never shrinks while the range grows, so cells merge exactly and the
    result does not depend on how the values were cut into batches.

    Args:
        low: smallest value, float64 ``[]``; ``+inf`` when there is none.
        high: largest value, float64 ``[]``; ``-inf`` when there is none.
        bins: number of bins.

    Returns:
        The width, float64 ``[]``, and the number of the first cell, float64 ``[]`` (a whole number).
    """
    empty = low > high
    low, high = torch.where(empty, 0.0, low), torch.where(empty, 0.0, high)
    magnitude = torch.maximum(low.abs(), high.abs()) * _RELATIVE_RESOLUTION
    target = torch.maximum((high - low) / (bins - 1), magnitude).clamp(min=_SMALLEST_WIDTH)
    mantissa, exponent = torch.frexp(target)
    exponent = exponent.to(torch.int64) - (mantissa == 0.5).to(torch.int64)
    # The bits of a power of two are written directly: pow and exp2 may be off by one unit in the last place on a GPU,
    # and then cells would no longer merge exactly.
    width = ((exponent + 1023) << 52).view(torch.float64)
    return width, torch.floor(low / width)


def update_row_no_sync(row: Tensor, values: Tensor, mask: Tensor | None) -> None:
    """Add values to a histogram row in place, without a host read and with static shapes.

    Args:
        row: float64 ``[HEADER + bins]``, changed in place.
        values: any shape and real dtype, on the row's device, at least one element.
        mask: bool, same shape as ``values``, true where an element counts; ``None`` counts all.
    """
    bins = row.shape[0] - HEADER
    values = values.reshape(-1).to(torch.float64)
    finite = values.abs() <= _LARGEST
    wanted = finite if mask is None else finite & mask.reshape(-1)
    excluded = ~finite if mask is None else ~finite & mask.reshape(-1)

    low = torch.minimum(row[0], torch.where(wanted, values, torch.inf).amin())
    high = torch.maximum(row[1], torch.where(wanted, values, -torch.inf).amax())
    old_width, old_first = _grid(row[0], row[1], bins)
    width, first = _grid(low, high, bins)

    old_cells = old_first + torch.arange(bins, dtype=torch.float64, device=row.device)
    merged = torch.floor(old_cells / (width / old_width)) - first
    cells = torch.floor(torch.where(wanted, values, 0.0) / width) - first
    index = torch.cat([merged, cells]).clamp(0, bins - 1).to(torch.int64)
    weight = torch.cat([row[HEADER:], wanted.to(torch.float64)])
    counts = torch.zeros(bins, dtype=torch.float64, device=row.device).scatter_add_(0, index, weight)

    row.copy_(torch.cat([torch.stack([low, high, row[2] + excluded.sum(dtype=torch.float64)]), counts]))


def read_row(row: Tensor) -> Histogram | None:
    """Turn a row that is already on the host into a ``Histogram``.

    Args:
        row: float64 ``[HEADER + bins]`` on the CPU.

    Returns:
        The histogram, or ``None`` when no element was added.
    """
    counts = row[HEADER:]
    nonfinite = int(row[2])
    if nonfinite == 0 and not bool(counts.any()):
        return None
    width, first = _grid(row[0], row[1], counts.shape[0])
    edges = (first + torch.arange(counts.shape[0] + 1, dtype=torch.float64)) * width
    return Histogram(counts.tolist(), edges.tolist(), nonfinite)
