"""What the Triton kernels of gated cells share: matrix products from on-chip weights, gates, and launch sizes.

A program keeps some rows of the batch through all steps, so that a step costs no launch and no trip of the state to
memory, and the recurrent weights stay on chip. Import this module only where Triton is.
"""

import functools
import math
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "BLOCK",
    "WARPS",
    "dense_rows",
    "direct_kernels",
    "dot",
    "largest_of",
    "rows_of",
    "scale_of",
    "sigmoid",
    "tanh",
    "vector",
    "weight_block",
    "widths",
]

WARPS = 8
"""Of a program."""
BLOCK = 16
"""Rows of a program, the fewest of a matrix product; with more of them a backward pass has too few registers."""


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """FAST is the hardware's instruction, as exact as a TF32 product."""
    if FAST:
        out = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        out = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return out


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """The logistic function, through :func:`tanh`."""
    return 0.5 * tanh(0.5 * x, FAST) + 0.5


@triton.jit
def dot(a, b, HALF: tl.constexpr):
    """``a @ b`` with sums in float32; HALF rounds ``a`` to float16, as ``b`` is: 10 bits of mantissa, as TF32 has."""
    if HALF:  # noqa: SIM108 - Triton compiles one branch of an `if`, both of a ternary
        out = tl.dot(a.to(tl.float16), b)
    else:
        out = tl.dot(a, b, input_precision="ieee")
    return out


@triton.jit
def weight_block(ptr, gate: tl.constexpr, H: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr):
    """Rows ``gate H`` to ``gate H + H`` of a contiguous matrix ``[G H, H]``, ``[PAD, PAD]`` with zeros around."""
    rows, columns = tl.arange(0, PAD)[:, None], tl.arange(0, PAD)[None, :]
    block = tl.load(ptr + (gate * H + rows) * H + columns, mask=(rows < H) & (columns < H), other=0.0)
    if HALF:  # noqa: SIM108
        out = block.to(tl.float16)
    else:
        out = block.to(tl.float32)
    return out


@triton.jit
def vector(ptr, gate: tl.constexpr, H: tl.constexpr, PAD: tl.constexpr):
    """Numbers ``gate H`` to ``gate H + H``, as a row ``[1, PAD]`` with zeros behind."""
    columns = tl.arange(0, PAD)[None, :]
    return tl.load(ptr + gate * H + columns, mask=columns < H, other=0.0).to(tl.float32)


@triton.jit
def scale_of(value, HALF: tl.constexpr):
    """What each row is multiplied by, ``[B, 1]``, before it is rounded to float16, so that small gradients remain."""
    if HALF:
        largest = tl.max(tl.abs(value), axis=1)[:, None]
        out = 64.0 / tl.maximum(largest, 1e-30)
    else:
        out = tl.full((value.shape[0], 1), 1.0, tl.float32)
    return out


def rows_of(num_envs: int, processors: int) -> int:
    """How many rows of its block a program takes: all processors get some before any gets many.

    Args:
        num_envs: rows of the batch.
        processors: multiprocessors of the device.
    """
    return min(triton.cdiv(num_envs, processors), BLOCK)


def dense_rows(rows: Tensor) -> Tensor:
    """The tensor itself if its last dim is dense, else a copy: gradients of sums are expanded."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@functools.cache
def direct_kernels() -> ModuleType | None:
    """:mod:`torchrl_perf.kernels.cells_direct`, or None with a Triton that has no Gluon."""
    try:
        from torchrl_perf.kernels import cells_direct
    except ImportError:
        return None
    return cells_direct


def largest_of(grad: Tensor) -> Tensor:
    """The largest absolute value of each row ``[N]``, of ``[N, T, H]``."""
    return torch.linalg.vector_norm(grad, math.inf, (1, 2))


def widths(hidden: int) -> dict[str, int]:
    """Constants of a kernel: ``H``, and the power of two that holds it."""
    return {"H": hidden, "PAD": max(16, triton.next_power_of_2(hidden))}
