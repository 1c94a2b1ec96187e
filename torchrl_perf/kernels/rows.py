"""Triton kernels that move packed rows: a gather of rows by index, and a write of all fields of a batch into a ring.

A row of a replay buffer is a run of bytes. Random rows are read in sectors of 32 bytes, so that one gather of whole
rows moves little more than the bytes asked for; one gather a field would move eight times those of a 4-byte field.
Rows are moved as 4-byte words where alignment allows and as bytes elsewhere.

Import this module only where Triton is. References: ``Tensor.index_select`` and ``Tensor.index_copy_``.
"""

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.launch import launch


@triton.jit
def _gather(
    source_ptr, index_ptr, out_ptr, num_rows, source_rows, source_stride,
    WIDTH: tl.constexpr, ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """``out[i] = source[index[i]]`` for BLOCK_R rows and BLOCK_W words of them; out of range, the nearest row."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    is_row = row < num_rows
    place = tl.load(index_ptr + row, mask=is_row, other=0).to(tl.int64)
    place = tl.minimum(tl.maximum(place, 0), source_rows - 1)
    start = tl.multiple_of(place * source_stride, ALIGN)
    mask = is_row[:, None] & (column < WIDTH)[None, :]
    words = tl.load(source_ptr + start[:, None] + column[None, :], mask=mask)
    target = row.to(tl.int64) * WIDTH
    tl.store(out_ptr + target[:, None] + column[None, :], words, mask=mask)


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
    bytes_ptr, words_ptr, cursor_ptr, sources, num_rows, num_streams, steps,
    ROW_BYTES: tl.constexpr, OFFSETS: tl.constexpr, WIDTHS: tl.constexpr, IS_WORDS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Row i of each source (time i // num_streams of the batch) goes to time ``cursor`` + that, modulo ``steps``."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < num_rows
    row = row.to(tl.int64)
    cursor = tl.load(cursor_ptr)
    time = (cursor + row // num_streams) % steps
    slot = time * num_streams + row % num_streams
    for field in tl.static_range(len(OFFSETS)):
        if IS_WORDS[field]:
            place = slot * (ROW_BYTES // 4) + OFFSETS[field]
            _copy_field(sources[field], words_ptr, row, place, is_row, WIDTHS[field], BLOCK_W)
        else:
            place = slot * ROW_BYTES + OFFSETS[field]
            _copy_field(sources[field], bytes_ptr, row, place, is_row, WIDTHS[field], BLOCK_W)


def launch_gather(source: Tensor, index: Tensor, out: Tensor) -> None:
    """Copies the rows ``index`` (``[B]``) of ``source`` into ``out``, ``[B, row_bytes]`` uint8, contiguous."""
    rows, row_bytes = out.shape
    stride = source.stride(0)
    word, scale, constants = _gather_plan(row_bytes, math.gcd(stride, row_bytes, source.data_ptr(), 16))
    blocks = (-(-rows // constants["BLOCK_R"]), -(-constants["WIDTH"] // constants["BLOCK_W"]))
    launch(
        _gather, blocks, (source.view(word), index, out.view(word), rows, source.shape[0], stride // scale), constants
    )


@functools.cache
def _gather_plan(row_bytes: int, alignment: int) -> tuple[torch.dtype, int, dict[str, int]]:
    """Type and bytes of a word, and the constants of the kernel."""
    word, scale = (torch.int32, 4) if alignment % 4 == 0 else (torch.uint8, 1)
    width = row_bytes // scale
    block_w = min(_power_of_2(width), 256)
    blocks = {"BLOCK_R": max(1, 1024 // block_w), "BLOCK_W": block_w}
    return word, scale, {"WIDTH": width, "ALIGN": alignment // scale, **blocks}


def launch_write(ring: Tensor, cursor: Tensor, fields: Sequence[Tensor], offsets: Sequence[int], streams: int) -> None:
    """Writes the fields of a step into the packed rows of ``ring`` from ``cursor`` on, with one launch."""
    row_bytes = ring.shape[1]
    sources, places, widths, is_words = [], [], [], []
    for field, offset in zip(fields, offsets, strict=True):
        size = field[0].numel() * field.element_size()
        aligned = math.gcd(size, offset, row_bytes, ring.data_ptr(), field.data_ptr()) % 4 == 0
        scale = 4 if aligned else 1
        sources.append(field.view(-1).view(torch.int32 if aligned else torch.uint8))
        places.append(offset // scale)
        widths.append(size // scale)
        is_words.append(aligned)
    rows = fields[0].shape[0]
    block_w = min(_power_of_2(max(widths)), 256)
    block_r = max(1, 1024 // block_w)
    words = ring.view(torch.int32) if row_bytes % 4 == 0 else ring
    layout = {"OFFSETS": tuple(places), "WIDTHS": tuple(widths), "IS_WORDS": tuple(is_words)}
    launch(
        _write,
        (-(-rows // block_r),),
        (ring, words, cursor, tuple(sources), rows, streams, ring.shape[0] // streams),
        {"ROW_BYTES": row_bytes, **layout, "BLOCK_R": block_r, "BLOCK_W": block_w},
    )


def _power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()
