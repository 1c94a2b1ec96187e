"""Where the first NaN or infinity is, how many there are, and rows without any: static shapes, no host read."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

KINDS = ("NaN", "inf", "-inf")
"""What a value that is not finite can be, in the order of the codes of :func:`first_nonfinite`."""


LARGEST_NUMBER_OF_GROUPS = 1024
"""Groups of rows that are reduced on their own first: a compiler gives a reduction to few numbers few processors."""


def count_nonfinite(values: Tensor) -> Tensor:
    """Number of NaN and infinities in each column of ``values [R, F]``, of any real dtype; int64 ``[F]``."""
    bad, groups = ~values.isfinite(), _groups(values)
    return bad.reshape(groups, values.shape[0] // groups, values.shape[1]).sum(1).sum(0)


def first_nonfinite(values: Tensor) -> Tensor:
    """Place and kind of the first NaN or infinity of ``values [R, F]``, row by row and column by column.

    Returns:
        int64 0-d: ``(row * F + column) * 3 + kind`` with kind an index of :data:`KINDS`; -1 where all are finite, or
        there are none.
    """
    if not values.numel():
        return torch.full((), -1, device=values.device)
    groups = values.reshape(_groups(values), -1)
    kind = torch.where(groups.isnan(), 0, torch.where(groups > 0, 1, 2))
    place = torch.arange(groups.numel(), device=values.device).view(groups.shape) * len(KINDS) + kind
    none = groups.numel() * len(KINDS)
    first = torch.where(groups.isfinite(), none, place).amin(1).amin(0)
    return torch.where(first < none, first, -1)


def _groups(values: Tensor) -> int:
    """A number of groups that divides the rows; 1 for no rows."""
    return math.gcd(values.shape[0], LARGEST_NUMBER_OF_GROUPS) if values.shape[0] else 1


def finite_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all values of a row are finite, bool ``[R]``.

    Args:
        tensors: at least one, of any dtype, ``[R, *]``.

    Raises:
        ValueError: for no tensor, or such of different numbers of rows.
    """
    sizes = [tensor.shape[:1] for tensor in tensors]
    if not sizes or any(size != sizes[0] or not size for size in sizes):
        raise ValueError(
            f"tensors: expected at least one, all of one number of rows, received {[list(size) for size in sizes]}. "
            "Remedy: entries of one batch."
        )
    rows = [tensor.isfinite().flatten(1).all(1) if tensor.ndim > 1 else tensor.isfinite() for tensor in tensors]
    return torch.stack(rows).all(0)


def repaired_rows(good: Tensor) -> Tensor:
    """For each row itself, or the nearest good row before it, or the first good one: rows to read in its place.

    Args:
        good: bool ``[R]``.

    Returns:
        int64 ``[R]``; the identity where all rows are good, and no row's repair where none is.
    """
    rows = torch.arange(good.shape[0], device=good.device)
    if not good.shape[0]:
        return rows
    before = torch.where(good, rows, -1).cummax(0).values
    first = torch.where(good, rows, good.shape[0] - 1).amin()
    return torch.where(before < 0, first, before)
