"""Triton kernels that sum columns over many rows, as the gradients of biases are found: two launches for two biases.

The first reads each row once and leaves a part a program, the second sums the parts; the order never changes. PyTorch
takes two passes over a tensor for each of two biases, though most of their columns are equal. Import this module only
where Triton is.
"""

import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.launch import launch

__all__ = ["column_sums", "totals"]

ROWS, COLUMNS = 32, 64
MOST_PARTS = 128
TOTAL_ROWS, TOTAL_COLUMNS = 128, 16
"""Of a tile of parts: many programs with few of them one after the other."""


@triton.jit(do_not_specialize=["rows", "share"])
def _part_kernel(
    a_ptr, b_ptr, parts_ptr, rows, share, a_row, b_row,
    A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    first = tl.program_id(0).to(tl.int64) * share
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, share, ROWS):
        place = start + tl.arange(0, ROWS)
        row = (first + place)[:, None]
        is_row = (place < share)[:, None] & (row < rows)
        total += tl.load(a_ptr + row * a_row + column[None, :], mask=is_row & (column < A)[None, :], other=0.0)
        if B:
            of_b = is_row & ((column >= A) & (column < A + B))[None, :]
            total += tl.load(b_ptr + row * b_row + (column - A)[None, :], mask=of_b, other=0.0)
    part = parts_ptr + tl.program_id(0).to(tl.int64) * (A + B) + column
    tl.store(part, tl.sum(total, 0), mask=column < A + B)


@triton.jit(do_not_specialize=["parts"])
def _total_kernel(
    parts_ptr, first_ptr, second_ptr, parts,
    SHARED: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        mask = (part < parts)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(parts_ptr + part.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    found = tl.sum(total, 0)
    tl.store(first_ptr + column, found, mask=column < FIRST)
    tl.store(second_ptr + column, found, mask=column < SHARED)
    tl.store(second_ptr + column - (FIRST - SHARED), found, mask=(column >= FIRST) & (column < WIDTH))


def totals(parts: Tensor, first: int, shared: int) -> tuple[Tensor, Tensor]:
    """Sums over the rows of ``parts``: of the first columns, and of the shared ones among them with all others.

    Args:
        parts: ``[P, C]`` float32, contiguous.
        first: columns of the first sum, from the left.
        shared: how many of these the second one begins with.

    Returns:
        ``[first]`` and ``[shared + C - first]``.
    """
    width = parts.shape[1]
    found = parts.new_empty(first), parts.new_empty(shared + width - first)
    constants = {"SHARED": shared, "FIRST": first, "WIDTH": width, "ROWS": TOTAL_ROWS, "COLUMNS": TOTAL_COLUMNS}
    launch(_total_kernel, (triton.cdiv(width, TOTAL_COLUMNS),), (parts, *found, len(parts)), constants, num_warps=4)
    return found


def column_sums(a: Tensor, b: Tensor | None, shared: int) -> tuple[Tensor, Tensor]:
    """Sums over envs and steps: of a, and of its first columns with those of b.

    Args:
        a: ``[N, T, A]`` float32, contiguous but for columns that are left out of each row.
        b: ``[N, T, B]`` likewise, or None for no columns.
        shared: how many columns of a the second one begins with.

    Returns:
        ``[A]`` and ``[shared + B]``.
    """
    (num_envs, steps, width), more = a.shape, 0 if b is None else b.shape[-1]
    rows = num_envs * steps
    share = triton.cdiv(triton.cdiv(rows, MOST_PARTS), ROWS) * ROWS
    parts = a.new_empty(triton.cdiv(rows, share), width + more)
    grid = len(parts), triton.cdiv(width + more, COLUMNS)
    b = a if b is None else b
    args = a, b, parts, rows, share, a.stride(1), b.stride(1)
    launch(_part_kernel, grid, args, {"A": width, "B": more, "ROWS": ROWS, "COLUMNS": COLUMNS}, num_warps=4)
    return totals(parts, width, shared)
