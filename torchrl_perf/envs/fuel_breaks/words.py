"""Fires as bits of words, and the random numbers that a fire is made of.

Dimension key: ``N`` rows, ``M`` fires of a row (at most 64), ``H``, ``W`` cells.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["burn_probability", "burned_cells", "burned_fraction", "fire_numbers", "high_bits", "pack", "word_dtype"]

MAX_FIRES = 64
"""Most fires of a row: the bits of the longest word."""


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_WEYL = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def high_bits(bits: Tensor, places: int) -> Tensor:
    """Shift right, zeros coming in from the left."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    bits = (bits ^ high_bits(bits, 30)).mul_(_FIRST)
    bits = bits.bitwise_xor_(high_bits(bits, 27)).mul_(_SECOND)
    return bits.bitwise_xor_(high_bits(bits, 31))


def fire_numbers(seed: Tensor, fires: int, cells: int) -> Tensor:
    """Random 64-bit words of every fire of every row: SplitMix64, read at any place.

    Args:
        seed: int64 ``[N]``, any numbers.
        fires: M.
        cells: H W.

    Returns:
        int64 ``[N, M, H W + 1]``: one word for each cell and a last one for the ignition.
    """
    place = torch.arange(1, fires * (cells + 1) + 1, device=seed.device).view(fires, cells + 1)
    return _mix(_mix(seed).view(-1, 1, 1) + place * _WEYL)


def word_dtype(fires: int) -> torch.dtype:
    """The shortest integers that have a bit for each of M fires.

    Raises:
        ValueError: for fewer than one fire, or more than 64.
    """
    if not isinstance(fires, int) or isinstance(fires, bool) or not 1 <= fires <= MAX_FIRES:
        raise ValueError(
            f"fires: expected 1 to {MAX_FIRES}, received {fires!r}. Remedy: for more fires, simulate several rows "
            "with the same breaks, as assess() does."
        )
    return next(d for d, bits in ((torch.int16, 16), (torch.int32, 32), (torch.int64, 64)) if fires <= bits)


def pack(bits: Tensor) -> Tensor:
    """Words ``[N, *]`` of bool ``[N, M, *]``: fire m is bit m."""
    fires = bits.shape[1]
    dtype = word_dtype(fires)
    place = torch.arange(fires, dtype=dtype, device=bits.device).view(-1, *(1,) * (bits.ndim - 2))
    return bits.to(dtype).bitwise_left_shift_(place).sum(1, dtype=dtype)


def _bits(words: Tensor, fires: int) -> Tensor:
    """Bits ``[N, M, H, W]`` of words ``[N, H, W]``, in words' dtype."""
    place = torch.arange(fires, dtype=words.dtype, device=words.device).view(-1, 1, 1)
    return (words.unsqueeze(1) >> place) & 1


def burned_cells(words: Tensor, fires: int) -> Tensor:
    """Number of cells that each fire has burned, int64 ``[N, M]``, of words ``[N, H, W]``."""
    return _bits(words, fires).flatten(2).sum(-1, dtype=torch.int64)


def burned_fraction(words: Tensor, fires: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Share of all cells that has burned, mean over the fires: ``[N]`` of words ``[N, H, W]``."""
    cells = _bits(words, fires).flatten(1).sum(-1, dtype=torch.int64)
    return cells.to(dtype) / (fires * math.prod(words.shape[1:]))


def burn_probability(words: Tensor, fires: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Share of the fires that has burned each cell: ``[N, H, W]`` of words ``[N, H, W]``."""
    return _bits(words, fires).sum(1, dtype=torch.int64).to(dtype) / fires
