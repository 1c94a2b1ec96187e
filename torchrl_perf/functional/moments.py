"""Mean and variance of rows that come in batches, exact whatever the order and size of the batches.

Each batch is summed up in float64, and summaries are merged by the formula of Chan, Golub and LeVeque (1979), which
loses no digits where the mean is large beside the deviation. Dimension key: ``O`` numbers of a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Moments", "merged_moments", "moments_of"]


class Moments(NamedTuple):
    """A summary of rows; all of it float64."""

    count: Tensor
    """Rows, 0-d."""
    mean: Tensor
    """``[O]``, 0 where there is no row."""
    squares: Tensor
    """``[O]``, the sum of the squared deviations from the mean."""


def moments_of(rows: Tensor, valid: Tensor | None = None) -> Moments:
    """The summary of rows, without waiting for the host.

    A row with a number that is not finite never counts.

    Args:
        rows: ``[*, O]``, float.
        valid: bool ``[*]``, the rows that count; all by default.
    """
    flat = rows.reshape(-1, rows.shape[-1]).to(torch.float64)
    counts = flat.isfinite().all(-1)
    if valid is not None:
        counts = counts & valid.reshape(-1)
    counts = counts.unsqueeze(-1)
    number = counts.sum().to(torch.float64)
    mean = torch.where(counts, flat, 0.0).sum(0) / number.clamp_min(1.0)
    squares = torch.where(counts, flat - mean, 0.0).square().sum(0)
    return Moments(number, mean, squares)


def merged_moments(one: Moments, other: Moments) -> Moments:
    """The summary of the rows of both: ``M = M_1 + M_2 + (m_2 - m_1)^2 n_1 n_2 / (n_1 + n_2)``.

    Args:
        one: a summary.
        other: another one of rows of the same size.
    """
    count = one.count + other.count
    share = other.count / count.clamp_min(1.0)
    difference = other.mean - one.mean
    squares = one.squares + other.squares + difference.square() * (one.count * share)
    return Moments(count, one.mean + difference * share, squares)
