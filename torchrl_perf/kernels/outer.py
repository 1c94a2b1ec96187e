"""Triton kernel of products over many rows of which one side is small, such as gradients of a first layer's weights.

Reference: ``d.T @ a``. Import this module only where Triton is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.launch import launch
from torchrl_perf.kernels.products import add_dot


@triton.jit
def _outer_kernel(
    d_ptr, a_ptr, part_ptr, rows, d_row, d_col, a_row, a_col, N: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``d.T @ a`` over the rows of this program, ``[N, K]``, of which one side is small."""
    wait_for_previous(EARLY)
    n = tl.program_id(1) * COLS + tl.arange(0, COLS)
    k = tl.program_id(2) * DEPTH + tl.arange(0, DEPTH)
    i = tl.arange(0, BLOCK)
    total = tl.zeros((COLS, DEPTH), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        is_row = start + i < rows
        at = tl.cast(start, tl.int64)
        d = tl.load(
            d_ptr + at * d_row + (i * d_row)[None, :] + (n * d_col)[:, None],
            mask=is_row[None, :] & (n < N)[:, None],
            other=0.0,
        )
        a = tl.load(
            a_ptr + at * a_row + (i * a_row)[:, None] + (k * a_col)[None, :],
            mask=is_row[:, None] & (k < K)[None, :],
            other=0.0,
        )
        total = add_dot(total, d, a, PRECISION)
    part_ptr += tl.program_id(0).to(tl.int64) * (N * K)
    tl.store(part_ptr + (n * K)[:, None] + k[None, :], total, mask=(n < N)[:, None] & (k < K)[None, :])


def outer(d: Tensor, a: Tensor, precision: str, processors: int) -> Tensor:
    """``d.T @ a``, ``[N, K]`` float32 of ``d [B, N]`` and ``a [B, K]``, for products of which one side is small."""
    (rows, n), k = d.shape, a.shape[1]
    cols, depth = min(128, max(16, triton.next_power_of_2(n))), min(128, max(16, triton.next_power_of_2(k)))
    tiles = triton.cdiv(n, cols), triton.cdiv(k, depth)
    programs = max(1, min(triton.cdiv(rows, 64), 2 * processors // (tiles[0] * tiles[1])))
    part = d.new_empty(programs, n, k, dtype=torch.float32)
    launch(
        _outer_kernel, (programs, *tiles), (d, a, part, rows, d.stride(0), d.stride(1), a.stride(0), a.stride(1)),
        {"N": n, "K": k, "BLOCK": 64, "COLS": cols, "DEPTH": depth, "PRECISION": precision},
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return part.sum(0) if programs > 1 else part[0]
