"""Products of tiles for the kernels of perceptrons, whose left operand is read, or made on chip from the layer before.

Import this module only where Triton is.
"""

import triton
import triton.language as tl

from torchrl_perf.kernels.activations import activate, slope


@triton.jit
def add_dot(total, a, b, PRECISION: tl.constexpr) -> tl.tensor:
    """``total + a @ b`` with the operands rounded."""
    if PRECISION == "bf16":
        total = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    elif PRECISION == "fp16":
        total = tl.dot(a.to(tl.float16), b.to(tl.float16), total)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def product(
    a_ptr, a_row, a_col, r, w_ptr, n, K: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """``a[r] @ w[n].T`` for ROWS rows of a and COLS rows of the contiguous ``w [N, K]``."""
    k = tl.arange(0, DEPTH)
    n = tl.minimum(n, N - 1)
    a = a_ptr + (r * a_row)[:, None] + (k * a_col)[None, :]
    w = w_ptr + (n * K)[None, :] + k[:, None]
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        if K % DEPTH == 0:
            left = tl.load(a)
            right = tl.load(w)
        else:
            left = tl.load(a, mask=(start + k < K)[None, :], other=0.0)
            right = tl.load(w, mask=(start + k < K)[:, None], other=0.0)
        total = add_dot(total, left, right, PRECISION)
        a += DEPTH * a_col
        w += DEPTH
    return total


@triton.jit
def _small(a_ptr, a_row, a_col, r, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """All columns of the rows r, few enough to stay in registers."""
    i = tl.arange(0, PAD)
    return tl.load(a_ptr + (r * a_row)[:, None] + (i * a_col)[None, :], mask=(i < WIDTH)[None, :], other=0.0)


@triton.jit
def _through_small(a, k, w_ptr, WIDTH: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    """``a @ w[k].T`` of a whole ``a [ROWS, PAD]`` and rows k of ``w [K, WIDTH]``."""
    i = tl.arange(0, PAD)
    mask = (i < WIDTH)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + (k * WIDTH)[None, :] + i[:, None], mask=mask, other=0.0)
    return add_dot(tl.zeros((a.shape[0], w.shape[1]), dtype=tl.float32), a, w, PRECISION)


@triton.jit
def product_of_first(
    x_ptr, x_row, x_col, r, is_row, first_ptr, bias_ptr, h_ptr, z_ptr, w_ptr, n,
    INPUTS: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPTH: tl.constexpr, ACT: tl.constexpr, KEEP_Z: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """:func:`product` with the K units of the first layer, made from ``x`` as they are needed, and written if SAVE."""
    x = _small(x_ptr, x_row, x_col, r, INPUTS, PAD)
    n = tl.minimum(n, N - 1)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        u = _through_small(x, k, first_ptr, INPUTS, PAD, K, PRECISION)
        u += tl.load(bias_ptr + k, mask=k < K, other=0.0)[None, :]
        h = activate(u, ACT, FAST)
        if SAVE:
            place = (tl.arange(0, ROWS) * K)[:, None] + k[None, :]
            mask = is_row[:, None] & (k < K)[None, :]
            tl.store(h_ptr + place, h, mask=mask)
            if KEEP_Z:
                tl.store(z_ptr + place, u, mask=mask)
        w = tl.load(w_ptr + (n * K)[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
        total = add_dot(total, h, w, PRECISION)
    return total


@triton.jit
def product_of_last(
    g_ptr, g_row, g_col, r, is_row, last_ptr, h_ptr, z_ptr, d_ptr, sum_ptr, outer_ptr, w_ptr, n,
    OUT: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPTH: tl.constexpr, ACT: tl.constexpr, KEEP_Z: tl.constexpr, IS_OUTER: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """:func:`product` with the gradients of the last layer's K inputs, made from ``g`` as they are needed, and written.

    With them their sums over the rows, and if IS_OUTER the gradient of that layer's weights, ``[OUT, K]``.
    """
    g = _small(g_ptr, g_row, g_col, r, OUT, PAD)
    n = tl.minimum(n, N - 1)
    o = tl.arange(0, PAD)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        place = (tl.arange(0, ROWS) * K)[:, None] + k[None, :]
        mask = is_row[:, None] & (k < K)[None, :]
        h = tl.load(h_ptr + place, mask=mask, other=0.0).to(tl.float32)
        u = h
        if KEEP_Z:
            u = tl.load(z_ptr + place, mask=mask, other=0.0).to(tl.float32)
        d = _through_small(g, k, last_ptr, OUT, PAD, K, PRECISION)
        d = tl.where(mask, d * slope(h, u, ACT), 0.0)
        tl.store(d_ptr + place, d, mask=mask)
        tl.store(sum_ptr + k, tl.sum(d, 0), mask=k < K)
        if IS_OUTER:
            part = add_dot(tl.zeros((DEPTH, PAD), dtype=tl.float32), tl.trans(h), g, PRECISION)
            tl.store(outer_ptr + k[:, None] + (o * K)[None, :], part, mask=(k < K)[:, None] & (o < OUT)[None, :])
        w = tl.load(w_ptr + (n * K)[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
        total = add_dot(total, d, w, PRECISION)
    return total
