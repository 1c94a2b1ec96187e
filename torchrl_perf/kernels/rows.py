"""Triton kernels that move packed rows: a gather by index or of drawn rows, and a write of a batch into a ring.

A row of a replay buffer is a run of bytes. Random rows are read in sectors of 32 bytes, so that one gather of whole
rows moves little more than the bytes asked for; one gather a field would move eight times those of a 4-byte field.
Rows are moved as 4-byte words where alignment allows and as bytes elsewhere.

Import this module only where Triton is. References: ``Tensor.index_select``, ``Tensor.index_copy_`` and
:func:`torchrl_perf.functional.priority_tree.uniform_rows`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.launch import launch
from torchrl_perf.kernels.priority_tree import drawn_row, tree_constants, uniform_slot


@triton.jit
def _move_rows(
    source_ptr, out_ptr, place, row, is_row, source_stride,
    IS_WORDS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """``out[row] = source[place]`` for BLOCK_R rows and BLOCK_W words of this program, or bytes."""
    if IS_WORDS:
        source_ptr = source_ptr.to(tl.pointer_type(tl.int32))
        out_ptr = out_ptr.to(tl.pointer_type(tl.int32))
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    start = tl.multiple_of(place * source_stride, ALIGN)
    mask = is_row[:, None] & (column < WIDTH)[None, :]
    words = tl.load(source_ptr + start[:, None] + column[None, :], mask=mask)
    target = row.to(tl.int64) * WIDTH
    tl.store(out_ptr + target[:, None] + column[None, :], words, mask=mask)


@triton.jit
def _gather(
    source_ptr, index_ptr, out_ptr, num_rows, source_rows, source_stride,
    IS_WORDS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``out[i] = source[index[i]]``; out of range, the nearest row."""
    wait_for_previous(EARLY)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < num_rows
    place = tl.load(index_ptr + row, mask=is_row, other=0).to(tl.int64)
    place = tl.minimum(tl.maximum(place, 0), source_rows - 1)
    _move_rows(source_ptr, out_ptr, place, row, is_row, source_stride, IS_WORDS, WIDTH, ALIGN, BLOCK_W)


@triton.jit
def _draw_and_gather(
    source_ptr, uniform_ptr, index_ptr, out_ptr, cursor_ptr, length_ptr, num_rows, source_stride, steps, num_streams,
    IS_WORDS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Slots among the newest rows of a ring, one a uniform number, and their rows."""
    wait_for_previous(EARLY)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < num_rows
    uniform = tl.load(uniform_ptr + row, mask=is_row, other=0.0)
    place = uniform_slot(uniform, tl.load(cursor_ptr), tl.load(length_ptr), steps, num_streams)
    tl.store(index_ptr + row, place, mask=is_row & (tl.program_id(1) == 0))
    _move_rows(source_ptr, out_ptr, place, row, is_row, source_stride, IS_WORDS, WIDTH, ALIGN, BLOCK_W)


@triton.jit
def _draw_by_weight_and_gather(
    source_ptr, words_ptr, sums_ptr, minima_ptr, running_leaves_ptr, running_ptr, uniform_ptr, index_ptr, weight_ptr,
    generation_ptr, out_ptr, beta_ptr, cursor_ptr, length_ptr, num_rows, source_stride, steps, num_streams, num_top,
    top, second,
    LEVELS: tl.constexpr, FAN: tl.constexpr, TOP: tl.constexpr, IS_WORDS: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Slots of a tree of weights, one a uniform number, their importance weights and generations, and their rows."""
    wait_for_previous(EARLY)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    # a draw of one number alone is one that Triton fails to compile: eight equal ones take as long
    DRAWS: tl.constexpr = BLOCK_R if BLOCK_R > 1 else 8
    drawn = row if BLOCK_R > 1 else tl.program_id(0) + tl.arange(0, DRAWS) * 0
    is_drawn = drawn < num_rows
    uniform = tl.load(uniform_ptr + drawn, mask=is_drawn, other=0.0)
    slot, importance, generation = drawn_row(
        words_ptr, sums_ptr, minima_ptr, running_leaves_ptr, running_ptr, uniform, beta_ptr, cursor_ptr, length_ptr,
        steps, num_streams, num_top, top, second, LEVELS, FAN, TOP, DRAWS,
    )  # fmt: skip
    is_told = is_drawn & (tl.program_id(1) == 0)
    tl.store(index_ptr + drawn, slot, mask=is_told)
    tl.store(weight_ptr + drawn, importance, mask=is_told)
    tl.store(generation_ptr + drawn, generation, mask=is_told)
    place = slot if BLOCK_R > 1 else tl.max(slot, 0) + tl.zeros((BLOCK_R,), dtype=tl.int64)
    _move_rows(source_ptr, out_ptr, place, row, row < num_rows, source_stride, IS_WORDS, WIDTH, ALIGN, BLOCK_W)


@triton.jit
def _copy_field(source_ptr, target_ptr, row, place, is_row, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):
    """Copies ``[BLOCK_R, WIDTH]`` words of one field; ``place`` is where the field begins in each row of the ring."""
    for first in range(0, WIDTH, BLOCK_W):
        column = first + tl.arange(0, BLOCK_W)
        mask = is_row[:, None] & (column < WIDTH)[None, :]
        words = tl.load(source_ptr + (row * WIDTH)[:, None] + column[None, :], mask=mask)
        tl.store(target_ptr + place[:, None] + column[None, :], words, mask=mask)


@triton.jit
def _write(
    ring_ptr, counters_ptr, index_ptr, sources, num_rows, num_streams, steps,
    ROW_BYTES: tl.constexpr, OFFSETS: tl.constexpr, WIDTHS: tl.constexpr, IS_WORDS: tl.constexpr,
    COUNTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Row i of each source (time i // num_streams of the batch) goes to time ``cursor`` + that, modulo ``steps``.

    The cursor is the first of the counters. With COUNTS the slots go to ``index_ptr``, and the batch is added to the
    cursor and to the length behind it. Another program may not have read the cursor yet: the third counter says how
    many have, and the last one counts.
    """
    wait_for_previous(EARLY)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < num_rows
    row = row.to(tl.int64)
    cursor = tl.load(counters_ptr)
    time = (cursor + row // num_streams) % steps
    slot = time * num_streams + row % num_streams
    for field in tl.static_range(len(OFFSETS)):
        if IS_WORDS[field]:
            source_ptr = sources[field].to(tl.pointer_type(tl.int32))
            words_ptr = ring_ptr.to(tl.pointer_type(tl.int32))
            place = slot * (ROW_BYTES // 4) + OFFSETS[field]
            _copy_field(source_ptr, words_ptr, row, place, is_row, WIDTHS[field], BLOCK_W)
        else:
            source_ptr = sources[field].to(tl.pointer_type(tl.uint8))
            place = slot * ROW_BYTES + OFFSETS[field]
            _copy_field(source_ptr, ring_ptr, row, place, is_row, WIDTHS[field], BLOCK_W)
    if COUNTS:
        tl.store(index_ptr + row, slot, mask=is_row)
        tl.debug_barrier()  # every thread of this program has used the cursor
        arrived = tl.atomic_add(counters_ptr + 2, 1, sem="acq_rel")
        if arrived == tl.num_programs(0) - 1:
            added = num_rows // num_streams
            tl.store(counters_ptr, cursor + added)
            tl.store(counters_ptr + 1, tl.minimum(tl.load(counters_ptr + 1) + added, steps))
            tl.store(counters_ptr + 2, 0)


def launch_gather(source: Tensor, index: Tensor, out: Tensor) -> None:
    """Copies the rows ``index`` (``[B]``) of ``source`` into ``out``, ``[B, row_bytes]`` uint8, contiguous."""
    rows, row_bytes = out.shape
    stride = source.stride(0)
    scale, grid, constants, warps = _gather_plan(rows, row_bytes, math.gcd(stride, row_bytes, source.data_ptr(), 16))
    launch(_gather, grid, (source, index, out, rows, source.shape[0], stride // scale), constants, num_warps=warps)


def launch_draw_and_gather(
    source: Tensor, uniform: Tensor, cursor: Tensor, length: Tensor, steps: int, num_streams: int
) -> tuple[Tensor, Tensor]:
    """Slots drawn uniformly among the newest ``length`` time rows of a ring, and their rows, in one launch.

    Args:
        source: ``[steps * num_streams, row_bytes]`` uint8, contiguous.
        uniform: ``[B]`` float64 in [0, 1).
        cursor: time rows written since the start, 0-d int64.
        length: valid time rows, 0-d int64.
        steps: time rows of the ring.
        num_streams: streams of a time row.

    Returns:
        Slots ``[B]`` int64, as :func:`~torchrl_perf.functional.priority_tree.uniform_rows` gives them, and the rows
        ``[B, row_bytes]`` uint8, contiguous.
    """
    rows, row_bytes = uniform.shape[0], source.shape[1]
    scale, grid, constants, warps = _gather_plan(rows, row_bytes, math.gcd(row_bytes, source.data_ptr(), 16))
    index = torch.empty_like(uniform, dtype=torch.int64)
    out = source.new_empty((rows, row_bytes))
    args = (source, uniform, index, out, cursor, length, rows, row_bytes // scale, steps, num_streams)
    launch(_draw_and_gather, grid, args, constants, num_warps=warps)
    return index, out


def launch_draw_by_weight_and_gather(
    source: Tensor, tree: tuple[Tensor, ...], levels: tuple[int, ...], uniform: Tensor, beta: Tensor,
    ring: tuple[Tensor, Tensor, int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Slots drawn in proportion to their weights, and their rows, in one launch.

    Args:
        source: as for :func:`launch_draw_and_gather`.
        tree: words, sums, minima and both running sums, see :mod:`~torchrl_perf.kernels.priority_tree`.
        levels: of the tree.
        uniform: ``[B]`` float64 in [0, 1).
        beta: exponent of the importance weights, 0-d float32.
        ring: cursor, length, steps and number of streams.

    Returns:
        Slots ``[B]`` int64, importance weights ``[B]`` float32, generations ``[B]`` int64 and the rows
        ``[B, row_bytes]`` uint8, contiguous.
    """
    rows, row_bytes = uniform.shape[0], source.shape[1]
    scale, grid, constants, warps = _gather_plan(rows, row_bytes, math.gcd(row_bytes, source.data_ptr(), 16))
    index = torch.empty_like(uniform, dtype=torch.int64)
    weight, generation = torch.empty_like(uniform, dtype=torch.float32), torch.empty_like(index)
    out = source.new_empty((rows, row_bytes))
    cursor, length, steps, num_streams = ring
    args = (
        source, *tree, uniform, index, weight, generation, out, beta, cursor, length, rows, row_bytes // scale, steps,
        num_streams, levels[-1], sum(levels[:-1]), levels[0] if len(levels) == 3 else 0,
    )  # fmt: skip
    launch(_draw_by_weight_and_gather, grid, args, {**tree_constants(levels), **constants}, num_warps=warps)
    return index, weight, generation, out


@functools.lru_cache(maxsize=256)
def _gather_plan(rows: int, row_bytes: int, alignment: int) -> tuple[int, tuple[int, int], dict[str, int], int]:
    """Bytes of a word, programs, the constants of a kernel, and its warps.

    A program of one warp that moves a whole row of 3 kB, with many loads in flight a lane, is a quarter faster on an
    H200 than four warps on a part of several rows; short rows are faster by the dozen.
    """
    scale = 4 if alignment % 4 == 0 else 1
    width = row_bytes // scale
    block_w = min(_power_of_2(width), 1024)
    block_r = max(1, 1024 // block_w)
    constants = {"IS_WORDS": scale == 4, "WIDTH": width, "ALIGN": alignment // scale}
    programs = (-(-rows // block_r), -(-width // block_w))
    return scale, programs, {**constants, "BLOCK_R": block_r, "BLOCK_W": block_w}, 1 if block_w >= 512 else 4


def launch_write(
    ring: Tensor,
    counters: Tensor,
    fields: Sequence[Tensor],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    shape: tuple[int, int],
    index: Tensor | None,
) -> None:
    """Writes the fields of consecutive time rows, and counts them where ``index`` is given, in one launch.

    Args:
        ring: ``[steps * num_streams, row_bytes]`` uint8.
        counters: int64, of which the first is the cursor.
        fields: tensors of ``T * num_streams`` rows in time-major memory, whatever their shape.
        offsets: byte at which each begins in a row.
        sizes: bytes of one row of each.
        shape: rows ``T * num_streams`` and ``num_streams``.
        index: int64, that many, to be written; ``counters`` are then cursor, length and a zero, and are advanced.
    """
    rows, streams = shape
    capacity, row_bytes = ring.shape
    fits = ring.data_ptr() % 4 == 0
    in_words = tuple([fits and field.data_ptr() % 4 == 0 for field in fields])
    grid, constants = _write_plan(rows, row_bytes, offsets, sizes, in_words, index is not None)
    fields = tuple([torch.view_as_real(field) if field.is_complex() else field for field in fields])
    steps = capacity // streams
    args = (ring, counters, counters if index is None else index, fields, rows, streams, steps)
    launch(_write, grid, args, constants)


@functools.lru_cache(maxsize=256)
def _write_plan(
    rows: int,
    row_bytes: int,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    in_words: tuple[bool, ...],
    counts: bool,
) -> tuple[tuple[int], dict[str, Any]]:
    """Programs, and the constants of the kernel."""
    aligned = [
        fits and math.gcd(size, offset, row_bytes) % 4 == 0
        for size, offset, fits in zip(sizes, offsets, in_words, strict=True)
    ]
    scales = [4 if fits else 1 for fits in aligned]
    places = tuple(offset // scale for offset, scale in zip(offsets, scales, strict=True))
    widths = tuple(size // scale for size, scale in zip(sizes, scales, strict=True))
    block_w = min(_power_of_2(max(widths)), 256)
    block_r = max(1, 1024 // block_w)
    layout = {"ROW_BYTES": row_bytes, "OFFSETS": places, "WIDTHS": widths, "IS_WORDS": tuple(aligned)}
    return (-(-rows // block_r),), {**layout, "COUNTS": counts, "BLOCK_R": block_r, "BLOCK_W": block_w}


def _power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()
