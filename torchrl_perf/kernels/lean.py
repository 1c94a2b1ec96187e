"""Triton kernels of perceptrons of two hidden layers with few inputs and outputs, which keep one layer's units alone.

Of such a network the first layer's units are made of a few inputs, and gradients of the second's of a few outputs:
making them anew costs less than reading them. So forward keeps the second layer's units, once, and nothing else of the
hidden layers is ever in memory: backward makes the gradients of the second layer, takes them through its weights and
sums the first layer's gradients as it goes through its rows, and the gradient of the second layer's weights is a product
whose operands are both made on chip. Sums run in a fixed order: results repeat bit for bit.

Reference: :func:`torchrl_perf.functional.chain.chain`, which defines the values. Import this module only where Triton
is.
"""

import triton
import triton.language as tl

from torchrl_perf.kernels.activations import activate, slope
from torchrl_perf.kernels.products import add_dot


@triton.jit
def _rows_of(ptr, row, col, start, rows, WIDTH: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    """All columns of ROWS rows, few enough to stay in registers; zeros beyond the last row."""
    r = start + tl.arange(0, ROWS)
    i = tl.arange(0, PAD)
    place = ptr + (r.to(tl.int64) * row)[:, None] + (i * col)[None, :]
    return tl.load(place, mask=(r < rows)[:, None] & (i < WIDTH)[None, :], other=0.0)


@triton.jit
def _small_columns(ptr, n, N: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, step: tl.constexpr,
                   unit: tl.constexpr):  # fmt: skip
    """``[PAD, n]`` of a small matrix: columns n, ``unit`` apart, of WIDTH rows, ``step`` apart."""
    i = tl.arange(0, PAD)
    mask = (i < WIDTH)[:, None] & (n < N)[None, :]
    return tl.load(ptr + (i * step)[:, None] + (n * unit)[None, :], mask=mask, other=0.0)


@triton.jit
def _times(a, b, PRECISION: tl.constexpr):
    return add_dot(tl.zeros((a.shape[0], b.shape[1]), dtype=tl.float32), a, b, PRECISION)


@triton.jit
def _first_units(x, n, w_ptr, b_ptr, IN: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr):
    """What the first layer's linear map gives at its units n, of which those beyond N are 0."""
    u = _times(x, _small_columns(w_ptr, n, N, IN, PAD, 1, IN), PRECISION)
    return u + tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]


@triton.jit
def _kept(h_ptr, start, rows, n, N: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr, KEEP_Z: tl.constexpr,
          FAST: tl.constexpr):  # fmt: skip
    """The second layer's units n and what their activation was applied to, which is the same where it is not kept."""
    r = start + tl.arange(0, ROWS)
    place = h_ptr + (r.to(tl.int64) * N)[:, None] + n[None, :]
    u = tl.load(place, mask=(r < rows)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
    h = u
    if KEEP_Z:
        h = activate(u, ACT, FAST)
    return h, u


@triton.jit
def lean_forward_kernel(
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, w3_ptr, b3_ptr, y_ptr, h_ptr, rows, x_row, x_col,
    IN: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, OUT: tl.constexpr, IN_PAD: tl.constexpr,
    OUT_PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, ACT: tl.constexpr,
    KEEP_Z: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
) -> None:  # fmt: skip
    """The rows of this program through all layers."""
    start = tl.program_id(0) * ROWS
    x = _rows_of(x_ptr, x_row, x_col, start, rows, IN, IN_PAD, ROWS)
    n = tl.arange(0, COLS)
    rn = tl.minimum(n, H2 - 1)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for first in range(0, H1, DEPTH):
        k = first + tl.arange(0, DEPTH)
        h = activate(_first_units(x, k, w1_ptr, b1_ptr, IN, IN_PAD, H1, PRECISION), ACT, FAST)
        if H1 % DEPTH == 0:
            w = tl.load(w2_ptr + (rn * H1)[None, :] + k[:, None])
        else:
            w = tl.load(w2_ptr + (rn * H1)[None, :] + k[:, None], mask=(k < H1)[:, None], other=0.0)
        total = add_dot(total, h, w, PRECISION)
    total += tl.load(b2_ptr + n, mask=n < H2, other=0.0)[None, :]
    h = activate(total, ACT, FAST)
    r = start + tl.arange(0, ROWS)
    if SAVE:
        place = h_ptr + (r.to(tl.int64) * H2)[:, None] + n[None, :]
        mask = (r < rows)[:, None] & (n < H2)[None, :]
        if KEEP_Z:
            tl.store(place, total, mask=mask)
        else:
            tl.store(place, h, mask=mask)
    o = tl.arange(0, OUT_PAD)
    w = tl.load(w3_ptr + (o * H2)[None, :] + n[:, None], mask=(o < OUT)[None, :] & (n < H2)[:, None], other=0.0)
    y = _times(h, w, PRECISION) + tl.load(b3_ptr + o, mask=o < OUT, other=0.0)[None, :]
    tl.store(y_ptr + (r.to(tl.int64) * OUT)[:, None] + o[None, :], y, mask=(r < rows)[:, None] & (o < OUT)[None, :])


@triton.jit
def lean_backward_kernel(
    x_ptr, g_ptr, w1_ptr, b1_ptr, w2t_ptr, w3_ptr, h_ptr, sum_ptr, rows, x_row, x_col, g_row, g_col,
    IN: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, OUT: tl.constexpr, IN_PAD: tl.constexpr,
    OUT_PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, ACT: tl.constexpr,
    KEEP_Z: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
) -> None:  # fmt: skip
    """Sums over the rows of this program for all parameters but the second layer's weights.

    Biases of the first layer, the second and the last, then weights of the last one and of the first.
    """
    n = tl.arange(0, COLS)
    rn = tl.minimum(n, H1 - 1)
    i = tl.arange(0, IN_PAD)
    o = tl.arange(0, OUT_PAD)
    start = tl.program_id(0) * ROWS
    sum_ptr += tl.program_id(0) * (H1 + H2 + OUT + OUT * H2 + H1 * IN)
    x = _rows_of(x_ptr, x_row, x_col, start, rows, IN, IN_PAD, ROWS)
    g = _rows_of(g_ptr, g_row, g_col, start, rows, OUT, OUT_PAD, ROWS)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for first in range(0, H2, DEPTH):
        k = first + tl.arange(0, DEPTH)
        h, u = _kept(h_ptr, start, rows, k, H2, ROWS, ACT, KEEP_Z, FAST)
        d = _times(g, _small_columns(w3_ptr, k, H2, OUT, OUT_PAD, H2, 1), PRECISION) * slope(h, u, ACT)
        tl.store(sum_ptr + H1 + k, tl.sum(d, 0), mask=k < H2)
        part = _times(tl.trans(h), g, PRECISION)
        place = sum_ptr + H1 + H2 + OUT + k[:, None] + (o * H2)[None, :]
        tl.store(place, part, mask=(k < H2)[:, None] & (o < OUT)[None, :])
        if H2 % DEPTH == 0:
            w = tl.load(w2t_ptr + (rn * H2)[None, :] + k[:, None])
        else:
            w = tl.load(w2t_ptr + (rn * H2)[None, :] + k[:, None], mask=(k < H2)[:, None], other=0.0)
        total = add_dot(total, d, w, PRECISION)
    u = _first_units(x, n, w1_ptr, b1_ptr, IN, IN_PAD, H1, PRECISION)
    d = total * slope(activate(u, ACT, FAST), u, ACT)  # rows beyond the end have gradients of 0
    # a column of ones beside the inputs gives the biases with the weights
    part = _times(tl.trans(d), tl.where((i == IN)[None, :], 1.0, x), PRECISION)
    is_unit = (n < H1)[:, None]
    tl.store(sum_ptr + n[:, None] + (i * 0)[None, :], part, mask=is_unit & (i == IN)[None, :])
    tl.store(sum_ptr + H1 + H2 + o, tl.sum(g, 0), mask=o < OUT)
    place = sum_ptr + H1 + H2 + OUT + OUT * H2 + (n * IN)[:, None] + i[None, :]
    tl.store(place, part, mask=is_unit & (i < IN)[None, :])


@triton.jit
def lean_outer_kernel(
    x_ptr, g_ptr, w1_ptr, b1_ptr, w3_ptr, h_ptr, part_ptr, rows, x_row, x_col, g_row, g_col,
    IN: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, OUT: tl.constexpr, IN_PAD: tl.constexpr,
    OUT_PAD: tl.constexpr, ROWS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    KEEP_Z: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of the second layer's weights, ``[H2, H1]``, of the rows of this program."""
    n = tl.program_id(1) * HIGH + tl.arange(0, HIGH)
    k = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    last = _small_columns(w3_ptr, n, H2, OUT, OUT_PAD, H2, 1)
    total = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        x = _rows_of(x_ptr, x_row, x_col, start, rows, IN, IN_PAD, ROWS)
        g = _rows_of(g_ptr, g_row, g_col, start, rows, OUT, OUT_PAD, ROWS)
        h, u = _kept(h_ptr, start, rows, n, H2, ROWS, ACT, KEEP_Z, FAST)
        d = _times(g, last, PRECISION) * slope(h, u, ACT)
        below = activate(_first_units(x, k, w1_ptr, b1_ptr, IN, IN_PAD, H1, PRECISION), ACT, FAST)
        total = add_dot(total, tl.trans(d), below, PRECISION)
    part_ptr += tl.program_id(0).to(tl.int64) * (H2 * H1)
    tl.store(part_ptr + (n * H1)[:, None] + k[None, :], total, mask=(n < H2)[:, None] & (k < H1)[None, :])
