"""A random permutation that is computed where it is read, for a size that the device alone knows."""

import torch
from torch import Tensor

from torchrl_perf.functional.rows.permutation import _mix

ROUNDS = 24
"""Rounds of :func:`shuffled_index`: no round moves a position with probability 2^-24."""


def shuffled_index(position: Tensor, size: Tensor, keys: Tensor) -> Tensor:
    """Where a random permutation of ``0..size-1`` sends these positions, without making the permutation.

    The swap-or-not shuffle (Hoang, Morris, Rogaway, An Enciphering Scheme Based on a Card Shuffle, arXiv:1208.1176):
    each round pairs x with ``key - x`` modulo the size and swaps the pair if a hash of its larger member says so. It is
    one-to-one for any size, so the size may be a number that the device alone knows.

    Args:
        position: ``[*]`` int64 in ``[0, size)``.
        size: 0-d int64, at least 1.
        keys: ``[R]`` int64, random in ``[0, 2**31)``, or ``[R, *]`` where positions belong to several permutations.

    Returns:
        ``[*]`` int64 in ``[0, size)``.
    """
    index = position
    for key in keys.unbind(0):
        partner = torch.remainder(key - index, size)
        is_swap = (_mix(torch.maximum(index, partner), key) & 1).bool()
        index = torch.where(is_swap, partner, index)
    return index
