"""Triton kernel that sums gradients over the GPUs of a host: packs them, adds those of all, and finds their norms.

Each program has 1,024 numbers of one tensor. It writes them where the other GPUs can read, tells its counterpart on
each of them, waits for theirs, and adds what all have written in the order of ranks, so that the sums are equal on all
to the last bit. There are two places to write, used in turn: who writes the third sum knows by the second that all have
read the first. So nobody waits at the end. Flags count the sums and are never reset, which a CUDA graph may hold.

Reference: :meth:`torchrl_perf.parallel.SharedGradients.reduced` by ``all_reduce``. Import this only where Triton is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.flat_adam import BLOCK, MANY, _chosen, _layout, _span
from torchrl_perf.kernels.launch import launch

__all__ = ["MANY", "Exchange", "parts_of", "summed"]


@triton.jit
def _place(part, PLACES: tl.constexpr, FIRST: tl.constexpr):
    """Where the tensor of a part begins among all, and where it ends with what pads it."""
    place = part * 0
    end = part * 0 + PLACES[1]
    for number in tl.static_range(1, len(FIRST)):
        is_later = part >= FIRST[number]
        place = tl.where(is_later, PLACES[number], place)
        end = tl.where(is_later, PLACES[number + 1], end)
    return tl.multiple_of(place, 4), tl.multiple_of(end, 4)


@triton.jit
def sums_kernel(
    epoch_ptr, count_ptr, part_ptr, norm_ptr, out_ptr, tensors, buffers, flags, SIZES: tl.constexpr,
    FIRST: tl.constexpr, PLACES: tl.constexpr, NORMED: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr,
    PAD: tl.constexpr, WIDE: tl.constexpr, SPAN: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The sum of a part over ranks, and its squares; the program that is done last adds those, in a fixed order."""
    wait_for_previous(EARLY)
    WORLD: tl.constexpr = len(buffers)
    part = tl.program_id(0)
    tensor, piece, size = _span(part, SIZES, FIRST)
    at = piece * SPAN + tl.arange(0, SPAN)
    own = tl.load(_chosen(tensors, part, FIRST) + at, mask=at < size, other=0.0)
    place, end = _place(part, PLACES, FIRST)
    to = place + at
    mask = to < end
    epoch = tl.load(epoch_ptr + part) + 1
    half = (epoch & 1) * HALF
    tl.store(buffers[RANK] + half + to, own, mask=mask)
    tl.debug_barrier()  # what all threads of the program have written is released by the one that tells
    for other in tl.static_range(WORLD):
        if other != RANK:
            tl.atomic_xchg(flags[other] + part * WORLD + RANK, epoch, sem="release", scope="sys")
    for other in tl.static_range(WORLD):
        if other != RANK:
            seen = tl.atomic_add(flags[RANK] + part * WORLD + other, 0, sem="acquire", scope="sys")
            while seen - epoch < 0:  # counts may pass the largest number
                seen = tl.atomic_add(flags[RANK] + part * WORLD + other, 0, sem="acquire", scope="sys")
    # past the first cache, in which another GPU's memory may be as it was
    total = tl.load(buffers[0] + half + to, mask=mask, other=0.0, cache_modifier=".cg")
    for other in tl.static_range(1, WORLD):
        total += tl.load(buffers[other] + half + to, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(out_ptr + to, total, mask=mask)
    tl.store(epoch_ptr + part, epoch)
    tl.store(part_ptr + tensor * COLS + piece, tl.sum(total * total, 0))
    done = tl.atomic_add(count_ptr, 1)  # releases what was stored, and acquires what the others stored
    if done == PARTS - 1:
        row = tl.arange(0, PAD)
        parts = row * 0  # of each tensor
        for number in tl.static_range(NORMED):
            parts = tl.where(row == number, tl.cdiv(SIZES[number], SPAN), parts)
        squares = tl.zeros((PAD,), dtype=tl.float32)
        for first in range(0, COLS, WIDE):
            col = first + tl.arange(0, WIDE)
            known = col[None, :] < parts[:, None]
            at_part = part_ptr + (row * COLS)[:, None] + col[None, :]
            squares += tl.sum(tl.load(at_part, mask=known, other=0.0, cache_modifier=".cg"), 1)
        tl.store(norm_ptr + row, tl.sqrt(squares), mask=row < NORMED)
        tl.store(count_ptr, 0)


class Exchange(NamedTuple):
    """What sums of tensors of certain sizes keep between two calls."""

    places: tuple[int, ...]
    """Where each tensor begins, and where the last one ends; multiples of 4."""
    buffers: tuple[Tensor, ...]
    """Of each rank, ``[2, places[-1]]`` float32, that all can reach."""
    flags: tuple[Tensor, ...]
    """Of each rank, ``[parts, ranks]`` int32, that all can reach; 0 at first."""
    rank: int
    epochs: Tensor
    """``[parts]`` int32, 0 at first."""
    count: Tensor
    """0-d int32, 0 at first."""
    room: Tensor
    """Of partial sums, float32."""


def parts_of(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Programs for these tensors, and how many partial sums they leave; each program waits for those of other ranks."""
    _, _, parts, cols = _layout(tensors)
    return parts, cols * len(tensors)


def summed(tensors: Sequence[Tensor], exchange: Exchange, normed: int) -> tuple[Tensor, Tensor]:
    """The sums over ranks, and norms of the first ones.

    Args:
        tensors: contiguous float32, at most 48, of the sizes that the exchange was made for.
        exchange: of this rank.
        normed: how many norms are wanted.

    Returns:
        All sums one after the other, ``[places[-1]]`` with zeros between them, and the norms ``[normed]``.
    """
    sizes, first, parts, cols = _layout(tensors)
    out = exchange.room.new_empty(exchange.places[-1])
    norms = exchange.room.new_empty(normed)
    constants: dict[str, Any] = {
        "SIZES": sizes, "FIRST": first, "PLACES": exchange.places, "NORMED": normed, "PARTS": parts, "COLS": cols,
        "PAD": triton.next_power_of_2(len(tensors)), "WIDE": min(64, triton.next_power_of_2(cols)), "SPAN": BLOCK,
        "HALF": exchange.places[-1], "RANK": exchange.rank,
    }  # fmt: skip
    args = (
        exchange.epochs,
        exchange.count,
        exchange.room,
        norms,
        out,
        tuple(tensors),
        exchange.buffers,
        exchange.flags,
    )
    launch(sums_kernel, (parts,), args, constants, num_warps=4)
    return out, norms
