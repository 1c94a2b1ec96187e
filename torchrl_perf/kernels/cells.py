"""What the kernels of gated cells share, in Triton's Gluon: layouts by hand, weights on chip, gates, rows of a program.

A program keeps some rows of the batch through all steps, so that a step costs no launch and no trip of the state to
memory. Left to Triton, a step would move each gate between two layouts, through shared memory and a barrier each. Here
loads, gates and stores have the layout of the matrix product, and the weights lie in registers: the state, or the
gradients of the gates, are all that the warps of a program exchange. Products take float16 operands, which have TF32's
ten bits, and sum in float32. Import this module only where Triton has Gluon.
"""

import math

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchrl_perf.kernels import processors

__all__ = [
    "BLOCK",
    "WARPS",
    "bias_row",
    "largest_of",
    "load3",
    "load4",
    "operand",
    "place",
    "rows_of",
    "sigmoid",
    "store3",
    "store4",
    "tanh",
    "widths",
]

WARPS = 8
"""Of a program; with fewer its weights do not fit into registers."""
BLOCK = 16
"""Rows of a program, the fewest of a matrix product."""


@gluon.jit
def tanh(x):
    """The hardware's, as exact as the products before it."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid(x):
    """The logistic function, through :func:`tanh`."""
    return 0.5 * tanh(0.5 * x) + 0.5


@gluon.jit
def operand(ptr, gate: gl.constexpr, turned: gl.constexpr, H: gl.constexpr, PAD: gl.constexpr, layout: gl.constexpr):
    """A gate's weight ``[H, H]``, or turned its transpose, as the right operand of a product, with zeros around."""
    k = gl.arange(0, PAD, gl.SliceLayout(1, layout))[:, None]
    n = gl.arange(0, PAD, gl.SliceLayout(0, layout))[None, :]
    at = n * H + k if turned else k * H + n
    return gl.load(ptr + gate * H * H + at, mask=(k < H) & (n < H), other=0.0).to(gl.float16)


@gluon.jit
def bias_row(ptr, gate: gl.constexpr, HAS_BIAS: gl.constexpr, H: gl.constexpr, PAD: gl.constexpr, layout: gl.constexpr):
    """A gate's bias as a row ``[1, PAD]``, or zeros."""
    if HAS_BIAS:
        c = gl.arange(0, PAD, gl.SliceLayout(0, layout))
        out = gl.load(ptr + gate * H + c, mask=c < H, other=0.0)[None, :]
    else:
        out = gl.zeros([1, PAD], gl.float32, layout)
    return out


@gluon.jit
def place(rows, num_envs, H: gl.constexpr, PAD: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr):
    """The program's first row; rows and columns of its block; which rows, and which entries, are of the batch."""
    first = gl.program_id(0).to(gl.int64) * rows
    i = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    h = gl.arange(0, PAD, gl.SliceLayout(0, layout))[None, :]
    is_row = (i < rows) & (first + i < num_envs)
    return first, i, h, is_row, is_row[:, None] & (h < H)


@gluon.jit
def load3(ptr, mask, H: gl.constexpr):
    """Three blocks of H columns, side by side."""
    a = gl.load(ptr, mask=mask, other=0.0)
    b = gl.load(ptr + H, mask=mask, other=0.0)
    c = gl.load(ptr + 2 * H, mask=mask, other=0.0)
    return a, b, c


@gluon.jit
def load4(ptr, mask, H: gl.constexpr):
    """Four blocks of H columns, side by side."""
    a, b, c = load3(ptr, mask, H)
    d = gl.load(ptr + 3 * H, mask=mask, other=0.0)
    return a, b, c, d


@gluon.jit
def store3(ptr, a, b, c, mask, H: gl.constexpr):
    """Writes three blocks of H columns, side by side."""
    gl.store(ptr, a, mask=mask)
    gl.store(ptr + H, b, mask=mask)
    gl.store(ptr + 2 * H, c, mask=mask)


@gluon.jit
def store4(ptr, a, b, c, d, mask, H: gl.constexpr):
    """Writes four blocks of H columns, side by side."""
    store3(ptr, a, b, c, mask, H)
    gl.store(ptr + 3 * H, d, mask=mask)


def rows_of(batch: Tensor) -> int:
    """How many rows of its block a program takes: all processors get some before any gets many.

    Args:
        batch: ``[N, *]``, on the device of the launch.
    """
    return min(triton.cdiv(len(batch), processors(batch.device)), BLOCK)


def widths(hidden: int) -> dict[str, int]:
    """Constants of a kernel: the hidden units, the power of two that holds them, and the rows of a program."""
    return {"H": hidden, "PAD": max(16, triton.next_power_of_2(hidden)), "BLOCK": BLOCK}


def largest_of(grad: Tensor) -> Tensor:
    """The largest absolute value of each row ``[N]``, of ``[N, T, H]``."""
    return torch.linalg.vector_norm(grad, math.inf, (1, 2))
