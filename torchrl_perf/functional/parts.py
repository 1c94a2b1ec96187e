"""Reductions of all numbers of a tensor in two stages, for a compiler that gives one to few processors.

Inductor splits a sum over many numbers into blocks of 8,192 (torch 2.11 to 2.14): of 65,536 rows that is 8 blocks on a
GPU of 132 processors, 28 us on an H200 for the losses of PPO where the bytes take less than 1. Given rows of a matrix
to reduce, it has a block for each.

The rows have 128 numbers. Inductor splits a longer row again if its numbers lie apart in memory, as those of a sum over
two logits do, and there are fewer than 8,448 rows. The other losses then share a launch with the first half of that
split sum, and take its block size of 16 rows: for 512 rows of 512 numbers that is 32 blocks, and 85 us on an H200. Rows
of 128 are not split, so that all losses are one reduction.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["joined_in_parts", "mean_of_all", "moments_of_all", "sum_of_all"]

UNSPLIT = 8_192
"""Numbers that one block reduces in a single launch."""
BLOCKS = 512
"""Parts of a long vector: a few for each processor."""
SHORTEST = 128
"""Numbers of a part: those of a row that Inductor does not split again, and the least of a long vector."""


def mean_of_all(values: Tensor) -> Tensor:
    """The mean of all numbers of a tensor ``[*]``, 0-d."""
    size = part_size(values)
    return values.mean() if size is None else values.reshape(-1, size).mean(-1).mean()


def sum_of_all(values: Tensor) -> Tensor:
    """The sum of all numbers of a tensor ``[*]``, 0-d; of flags their number."""
    size = part_size(values)
    return values.sum() if size is None else values.reshape(-1, size).sum(-1).sum()


def moments_of_all(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of two or more numbers ``[*]``: standard deviation (Bessel's), mean, least and greatest, 0-d each."""
    size = part_size(values)
    if size is None:
        return *torch.std_mean(values), *values.aminmax()
    parts = values.reshape(-1, size)
    variances, means = torch.var_mean(parts, -1, correction=0)
    mean = means.mean()
    # Chan, Golub and LeVeque (1979)
    squares = size * (variances + (means - mean).square()).sum()
    return (squares / (values.numel() - 1)).sqrt(), mean, parts.amin(-1).amin(), parts.amax(-1).amax()


def joined_in_parts(pieces: Sequence[Tensor]) -> Tensor:
    """All numbers of tensors ``[n]``, ``[P, S]`` with zeros behind the last, for sums over rows and then over these.

    Args:
        pieces: at least one, of one dtype.

    Returns:
        ``[1, n]`` where the sum is made at once.
    """
    count = sum(piece.numel() for piece in pieces)
    if not splits(pieces[0]) or count <= UNSPLIT:
        return torch.cat(list(pieces)).unsqueeze(0)
    size = longest_part(count)
    rest = pieces[0].new_zeros(-count % size)
    return torch.cat([*pieces, rest]).view(-1, size)


def part_size(values: Tensor) -> int | None:
    """Numbers of a part of a tensor that is to be reduced in parts; None where it is reduced at once."""
    return divisor(values.numel()) if splits(values) else None


def splits(values: Tensor) -> bool:
    """Whether sums are split where this tensor is."""
    return torch.compiler.is_compiling() and values.is_cuda


def longest_part(count: int) -> int:
    """The power of two of at least 128 that makes about 512 parts of ``count`` numbers."""
    return max(SHORTEST, 1 << (count // BLOCKS).bit_length() - 1)


def divisor(count: int) -> int | None:
    """Numbers of a part: a power of two that divides ``count``, or None where no part is needed or none is possible.

    It is 128; more where there would be more than 8,192 parts, and 64 or 32 where 128 does not divide ``count``.
    """
    if count <= UNSPLIT:
        return None
    size = max(SHORTEST, 1 << (-(-count // UNSPLIT) - 1).bit_length())
    while count % size:
        size //= 2
    return size if size >= SHORTEST // 4 else None
