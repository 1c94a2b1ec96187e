"""Triton kernels of perceptrons of two hidden layers up to 256 wide whose weights stay on chip, in 16 bits.

In 16 bits the weights between two layers of 256 units are 128 kB and fit into a processor's shared memory, so that a
program reads them once for all of its rows; in TF32 they do not, and each block of 64 rows reads all of them again.

TF32 has the 10 bits of float16, and more range. With bounded units (tanh) these kernels compute TF32's products in
float16: weights times 16, gradients times a power of two for which none exceeds 1, and sums, in float32, divided by it.
Weights may be as large as 4,094; what is less than 2 ** -14 of the largest has fewer bits, and adds as little.

Reference: :func:`torchrl_perf.functional.chain.chain`, which defines the values. Sums run in a fixed order: results
repeat bit for bit. Import this module only where Triton is.
"""

import triton
import triton.language as tl

from torchrl_perf.kernels.activations import activate, slope
from torchrl_perf.kernels.products import add_dot


@triton.jit
def _power(size):
    """The least power of two that is not below ``size``, in the range that has an inverse; 1 for 0."""
    exponent = tl.minimum(tl.ceil(tl.log2(tl.maximum(size, 1.2e-38))), 126.0)
    return tl.where(size > 0.0, tl.where(size < float("inf"), tl.exp2(exponent), size), 1.0)


@triton.jit
def pack_kernel(
    w2_ptr, w3_ptr, half_ptr, SECOND: tl.constexpr, LAST: tl.constexpr, SPAN: tl.constexpr, SCALE: tl.constexpr
) -> None:
    """Weights of the second layer and of the last in 16 bits, one after the other."""
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    w = tl.load(w2_ptr + at, mask=at < SECOND, other=0.0)
    is_last = (at >= SECOND) & (at < SECOND + LAST)
    w += tl.load(w3_ptr + at - SECOND, mask=is_last, other=0.0)
    tl.store(half_ptr + at, w * SCALE, mask=at < SECOND + LAST)


@triton.jit
def _block(ptr, row, col, start, rows, WIDTH: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    """Columns of ROWS rows; zeros beyond the last row and column."""
    r = start + tl.arange(0, ROWS)
    i = tl.arange(0, PAD)
    place = ptr + (r.to(tl.int64) * row)[:, None] + (i * col)[None, :]
    return tl.load(place, mask=(r < rows)[:, None] & (i < WIDTH)[None, :], other=0.0)


@triton.jit
def _put(ptr, value, start, rows, WIDTH: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    """Writes what :func:`_block` reads of a contiguous matrix."""
    r = start + tl.arange(0, ROWS)
    i = tl.arange(0, PAD)
    place = ptr + (r.to(tl.int64) * WIDTH)[:, None] + i[None, :]
    tl.store(place, value, mask=(r < rows)[:, None] & (i < WIDTH)[None, :])


@triton.jit
def _times(a, b, PRECISION: tl.constexpr):
    return add_dot(tl.zeros((a.shape[0], b.shape[1]), dtype=tl.float32), a, b, PRECISION)


@triton.jit
def _columns(value, dtype: tl.constexpr, SCALED: tl.constexpr):
    """The columns of a block in 16 bits, and what each has to be multiplied with after that."""
    if SCALED:
        scale = _power(tl.max(tl.abs(value), 0))
        half = (value / scale[None, :]).to(dtype)
    else:
        scale = tl.full((value.shape[1],), 1.0, tl.float32)
        half = value.to(dtype)
    return half, scale


@triton.jit
def resident_forward_kernel(
    x_ptr, w1_ptr, b1_ptr, half_ptr, b2_ptr, b3_ptr, y_ptr, h1_ptr, h2_ptr, rows, x_row, x_col,
    IN: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, OUT: tl.constexpr, IN_PAD: tl.constexpr,
    PAD1: tl.constexpr, PAD2: tl.constexpr, OUT_PAD: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr,
    SAVE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
) -> None:  # fmt: skip
    """Rows of this program, and of those that follow it, through all layers."""
    dtype: tl.constexpr = half_ptr.dtype.element_ty
    i = tl.arange(0, IN_PAD)
    k = tl.arange(0, PAD1)
    n = tl.arange(0, PAD2)
    o = tl.arange(0, OUT_PAD)
    w1 = tl.load(w1_ptr + (k * IN)[None, :] + i[:, None], mask=(i < IN)[:, None] & (k < H1)[None, :], other=0.0)
    # biases as weights of an input that is 1: as a vector each thread would hold a quarter of them
    w1 += tl.load(b1_ptr + k[None, :] + (i * 0)[:, None], mask=(i == IN)[:, None] & (k < H1)[None, :], other=0.0)
    w2 = tl.load(half_ptr + (n * H1)[None, :] + k[:, None], mask=(k < H1)[:, None] & (n < H2)[None, :], other=0.0)
    b2 = tl.load(b2_ptr + n, mask=n < H2, other=0.0)
    w3 = tl.load(half_ptr + H1 * H2 + (o * H2)[None, :] + n[:, None],
                 mask=(n < H2)[:, None] & (o < OUT)[None, :], other=0.0)  # fmt: skip
    b3 = tl.load(b3_ptr + o, mask=o < OUT, other=0.0)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        x = _block(x_ptr, x_row, x_col, start, rows, IN, IN_PAD, ROWS)
        x = tl.where((i == IN)[None, :], 1.0, x)
        h = activate(_times(x, w1, PRECISION), ACT, FAST).to(dtype)
        if SAVE:
            _put(h1_ptr, h, start, rows, H1, PAD1, ROWS)
        h = activate(tl.dot(h, w2) * (1.0 / SCALE) + b2[None, :], ACT, FAST).to(dtype)
        if SAVE:
            _put(h2_ptr, h, start, rows, H2, PAD2, ROWS)
        _put(y_ptr, tl.dot(h, w3) * (1.0 / SCALE) + b3[None, :], start, rows, OUT, OUT_PAD, ROWS)


@triton.jit
def largest_kernel(
    g_ptr, large_ptr, rows, g_row, g_col, OUT: tl.constexpr, OUT_PAD: tl.constexpr, ROWS: tl.constexpr
) -> None:
    """The largest size of each column among the rows of this program."""
    large = tl.zeros((ROWS, OUT_PAD), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        large = tl.maximum(large, tl.abs(_block(g_ptr, g_row, g_col, start, rows, OUT, OUT_PAD, ROWS)))
    tl.store(large_ptr + tl.program_id(0) * OUT_PAD + tl.arange(0, OUT_PAD), tl.max(large, 0))


@triton.jit
def resident_backward_kernel(
    x_ptr, g_ptr, half_ptr, w3_ptr, h1_ptr, h2_ptr, large_ptr, d_ptr, scale_ptr, sum_ptr, rows, x_row, x_col, g_row,
    g_col, IN: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, OUT: tl.constexpr, IN_PAD: tl.constexpr,
    PAD1: tl.constexpr, PAD2: tl.constexpr, OUT_PAD: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr,
    LARGE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """The gradients of the second layer, before its activation, and of each block of rows sums for the parameters.

    The former in 16 bits, and if SCALE is not 1 divided by ``scale``. The latter: biases of the first layer and of the
    last, and weights of the first.
    """
    dtype: tl.constexpr = half_ptr.dtype.element_ty
    i = tl.arange(0, IN_PAD)
    k = tl.arange(0, PAD1)
    n = tl.arange(0, PAD2)
    o = tl.arange(0, OUT_PAD)
    w2 = tl.load(half_ptr + (n * H1)[:, None] + k[None, :], mask=(n < H2)[:, None] & (k < H1)[None, :], other=0.0)
    w3 = tl.load(w3_ptr + (o * H2)[:, None] + n[None, :], mask=(o < OUT)[:, None] & (n < H2)[None, :], other=0.0)
    scale = 1.0
    if SCALE != 1:
        parts = tl.load(large_ptr + tl.arange(0, LARGE)[:, None] * OUT_PAD + o[None, :])
        scale = _power(tl.sum(tl.max(parts, 0) * tl.max(tl.abs(w3), 1), 0))
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        out_ptr = sum_ptr + tl.cast(start // ROWS, tl.int64) * (H1 + OUT + H1 * IN)
        x = _block(x_ptr, x_row, x_col, start, rows, IN, IN_PAD, ROWS)
        x = tl.where((i == IN)[None, :], 1.0, x)  # a column of ones gives the biases with the weights
        x, of_x = _columns(x, dtype, SCALE != 1)
        g = _block(g_ptr, g_row, g_col, start, rows, OUT, OUT_PAD, ROWS)
        tl.store(out_ptr + H1 + o, tl.sum(g, 0), mask=o < OUT)
        h = _block(h2_ptr, H2, 1, start, rows, H2, PAD2, ROWS)
        u = h.to(tl.float32)
        d = (_times(g, w3, PRECISION) * slope(u, u, ACT) * (1.0 / scale)).to(dtype)
        _put(d_ptr, d, start, rows, H2, PAD2, ROWS)
        total = tl.dot(d, w2)
        u = _block(h1_ptr, H1, 1, start, rows, H1, PAD1, ROWS).to(tl.float32)
        total *= slope(u, u, ACT)
        if SCALE != 1:
            large = _power(tl.max(tl.max(tl.abs(total), 1), 0))
            part = tl.dot(tl.trans((total / large).to(dtype)), x) * (of_x * (large * scale / SCALE))[None, :]
        else:
            part = tl.dot(tl.trans(total.to(dtype)), x)
        is_unit = (k < H1)[:, None]
        tl.store(out_ptr + k[:, None] + (i * 0)[None, :], part, mask=is_unit & (i == IN)[None, :])
        place = out_ptr + H1 + OUT + (k * IN)[:, None] + i[None, :]
        tl.store(place, part, mask=is_unit & (i < IN)[None, :])


@triton.jit
def resident_sums_kernel(
    g_ptr, w3_ptr, h2_ptr, sum_ptr, rows, g_row, g_col, H2: tl.constexpr, OUT: tl.constexpr, PAD2: tl.constexpr,
    OUT_PAD: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr, SCALE: tl.constexpr,
) -> None:  # fmt: skip
    """Of the rows of this program: gradients of the biases of the second layer and of the last layer's weights.

    A bias's gradient is a sum over rows and outputs of gradient, weight and slope; the weight stands before the sum
    over rows, so that both are products of the units with the outputs' gradients.
    """
    dtype: tl.constexpr = h2_ptr.dtype.element_ty
    n = tl.arange(0, PAD2)
    o = tl.arange(0, OUT_PAD)
    of_weights = tl.zeros((PAD2, OUT_PAD), dtype=tl.float32)
    of_slopes = tl.zeros((PAD2, OUT_PAD), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        g, scale = _columns(_block(g_ptr, g_row, g_col, start, rows, OUT, OUT_PAD, ROWS), dtype, SCALE != 1)
        h = _block(h2_ptr, H2, 1, start, rows, H2, PAD2, ROWS)
        u = h.to(tl.float32)
        of_weights += tl.dot(tl.trans(h), g) * scale[None, :]
        of_slopes += tl.dot(tl.trans(slope(u, u, ACT).to(dtype)), g) * scale[None, :]
    w3 = tl.load(w3_ptr + (o * H2)[None, :] + n[:, None], mask=(o < OUT)[None, :] & (n < H2)[:, None], other=0.0)
    sum_ptr += tl.program_id(0) * (H2 + OUT * H2)
    tl.store(sum_ptr + n, tl.sum(of_slopes * w3, 1), mask=n < H2)
    place = sum_ptr + H2 + (o * H2)[None, :] + n[:, None]
    tl.store(place, of_weights, mask=(n < H2)[:, None] & (o < OUT)[None, :])
