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
from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.products import add_dot


@triton.jit
def _power(size):
    """The least power of two that is not below ``size``, in the range that has an inverse; 1 for 0."""
    exponent = tl.minimum(tl.ceil(tl.log2(tl.maximum(size, 1.2e-38))), 126.0)
    return tl.where(size > 0.0, tl.where(size < float("inf"), tl.exp2(exponent), size), 1.0)


@triton.jit
def pack_kernel(
    w2_ptr, w3_ptr, half_ptr, SECOND: tl.constexpr, LAST: tl.constexpr, SPAN: tl.constexpr, SCALE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Weights of the second layer and of the last in 16 bits, one after the other."""
    wait_for_previous(EARLY)
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    w = tl.load(w2_ptr + at, mask=at < SECOND, other=0.0)
    is_last = (at >= SECOND) & (at < SECOND + LAST)
    w += tl.load(w3_ptr + at - SECOND, mask=is_last, other=0.0)
    tl.store(half_ptr + at, w * SCALE, mask=at < SECOND + LAST)


@triton.jit
def _block(
    ptr, row, col, start, rows, WIDTH: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, first: tl.constexpr = 0
):  # fmt: skip
    """Columns of ROWS rows from the first on; zeros beyond the last row and column."""
    r = start + tl.arange(0, ROWS)
    i = first + tl.arange(0, PAD)
    place = ptr + (r.to(tl.int64) * row)[:, None] + (i * col)[None, :]
    return tl.load(place, mask=(r < rows)[:, None] & (i < WIDTH)[None, :], other=0.0)


@triton.jit
def _put(
    ptr, value, start, rows, first: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Writes columns from the first on of a contiguous matrix that is WIDTH wide."""
    r = start + tl.arange(0, ROWS)
    i = first + tl.arange(0, PAD)
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
def _piece(ptr, k, n, row, col, K: tl.constexpr, N: tl.constexpr):
    """Numbers k (down) and n (across) of a ``[K, N]`` matrix with these strides; zeros beyond its ends."""
    place = ptr + (k * row)[:, None] + (n * col)[None, :]
    return tl.load(place, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)


@triton.jit
def resident_forward_kernel(
    x_ptr, w1_ptr, b1_ptr, half_ptr, b2_ptr, b3_ptr, y_ptr, h1_ptr, h2_ptr, rows, x_row, x_col,
    IN: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, OUT: tl.constexpr, IN_PAD: tl.constexpr,
    PAD1: tl.constexpr, PAD2: tl.constexpr, OUT_PAD: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr,
    SAVE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, PART: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Rows of this program, and of those that follow it, through all layers.

    PART units of the second layer are made at once: the sums of all 256 would not stay in registers.
    """
    wait_for_previous(EARLY)
    dtype: tl.constexpr = half_ptr.dtype.element_ty
    i = tl.arange(0, IN_PAD)
    k = tl.arange(0, PAD1)
    n = tl.arange(0, PART)
    o = tl.arange(0, OUT_PAD)
    last_ptr = half_ptr + H1 * H2
    w1 = _piece(w1_ptr, i, k, 1, IN, IN, H1)
    # biases as weights of an input that is 1: as a vector each thread would hold a quarter of them
    w1 += tl.load(b1_ptr + k[None, :] + (i * 0)[:, None], mask=(i == IN)[:, None] & (k < H1)[None, :], other=0.0)
    b3 = tl.load(b3_ptr + o, mask=o < OUT, other=0.0)
    lower2 = _piece(half_ptr, k, n, 1, H1, H1, H2)
    lower3 = _piece(last_ptr, n, o, 1, H2, H2, OUT)
    lower_bias = tl.load(b2_ptr + n, mask=n < H2, other=0.0)
    if PART < PAD2:
        upper2 = _piece(half_ptr, k, PART + n, 1, H1, H1, H2)
        upper3 = _piece(last_ptr, PART + n, o, 1, H2, H2, OUT)
        upper_bias = tl.load(b2_ptr + PART + n, mask=PART + n < H2, other=0.0)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        x = _block(x_ptr, x_row, x_col, start, rows, IN, IN_PAD, ROWS)
        x = tl.where((i == IN)[None, :], 1.0, x)
        below = activate(_times(x, w1, PRECISION), ACT, FAST).to(dtype)
        if SAVE:
            _put(h1_ptr, below, start, rows, 0, H1, PAD1, ROWS)
        h = activate(tl.dot(below, lower2) * (1.0 / SCALE) + lower_bias[None, :], ACT, FAST).to(dtype)
        if SAVE:
            _put(h2_ptr, h, start, rows, 0, H2, PART, ROWS)
        y = tl.dot(h, lower3)
        if PART < PAD2:
            h = activate(tl.dot(below, upper2) * (1.0 / SCALE) + upper_bias[None, :], ACT, FAST).to(dtype)
            if SAVE:
                _put(h2_ptr, h, start, rows, PART, H2, PART, ROWS)
            y = tl.dot(h, upper3, y)
        _put(y_ptr, y * (1.0 / SCALE) + b3[None, :], start, rows, 0, OUT, OUT_PAD, ROWS)


@triton.jit
def largest_kernel(
    g_ptr, large_ptr, rows, g_row, g_col, OUT: tl.constexpr, OUT_PAD: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The largest size of each column among the rows of this program."""
    wait_for_previous(EARLY)
    large = tl.zeros((ROWS, OUT_PAD), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        large = tl.maximum(large, tl.abs(_block(g_ptr, g_row, g_col, start, rows, OUT, OUT_PAD, ROWS)))
    tl.store(large_ptr + tl.program_id(0) * OUT_PAD + tl.arange(0, OUT_PAD), tl.max(large, 0))


@triton.jit
def _above(
    g, w3, h2_ptr, d_ptr, start, rows, scale, first: tl.constexpr, H2: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Gradients of PART units of the second layer, before its activation, in 16 bits; written, too."""
    u = _block(h2_ptr, H2, 1, start, rows, H2, PART, ROWS, first).to(tl.float32)
    d = (_times(g, w3, PRECISION) * slope(u, u, ACT) * (1.0 / scale)).to(dtype)
    _put(d_ptr, d, start, rows, first, H2, PART, ROWS)
    return d


@triton.jit
def _of_first_layer(
    total, x, of_x, h1_ptr, out_ptr, start, rows, scale, first: tl.constexpr, IN: tl.constexpr, H1: tl.constexpr,
    OUT: tl.constexpr, IN_PAD: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr,
    SCALE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """From products the sums over the rows for weights and biases of PART units of the first layer; writes them."""
    u = _block(h1_ptr, H1, 1, start, rows, H1, PART, ROWS, first).to(tl.float32)
    total *= slope(u, u, ACT)
    if SCALE != 1:
        large = _power(tl.max(tl.max(tl.abs(total), 1), 0))
        part = tl.dot(tl.trans((total / large).to(dtype)), x) * (of_x * (large * scale / SCALE))[None, :]
    else:
        part = tl.dot(tl.trans(total.to(dtype)), x)
    i = tl.arange(0, IN_PAD)
    k = first + tl.arange(0, PART)
    is_unit = (k < H1)[:, None]
    tl.store(out_ptr + k[:, None] + (i * 0)[None, :], part, mask=is_unit & (i == IN)[None, :])
    place = out_ptr + H1 + OUT + (k * IN)[:, None] + i[None, :]
    tl.store(place, part, mask=is_unit & (i < IN)[None, :])


@triton.jit
def resident_backward_kernel(
    x_ptr, g_ptr, half_ptr, w3_ptr, h1_ptr, h2_ptr, large_ptr, d_ptr, scale_ptr, sum_ptr, rows, x_row, x_col, g_row,
    g_col, IN: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, OUT: tl.constexpr, IN_PAD: tl.constexpr,
    PAD1: tl.constexpr, PAD2: tl.constexpr, OUT_PAD: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr,
    LARGE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, PART1: tl.constexpr, PART2: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The gradients of the second layer, before its activation, and of each block of rows sums for the parameters.

    The former in 16 bits, and if SCALE is not 1 divided by ``scale``. The latter: biases of the first layer and of the
    last, and weights of the first. PART1 and PART2 units of a layer, all or half of them, are in registers at once.
    """
    wait_for_previous(EARLY)
    dtype: tl.constexpr = half_ptr.dtype.element_ty
    i = tl.arange(0, IN_PAD)
    k = tl.arange(0, PART1)
    n = tl.arange(0, PART2)
    o = tl.arange(0, OUT_PAD)
    lower = _piece(half_ptr, n, k, H1, 1, H2, H1)
    last = _piece(w3_ptr, o, n, H2, 1, OUT, H2)
    sizes = tl.max(tl.abs(last), 1)
    if PART1 < PAD1:
        right = _piece(half_ptr, n, PART1 + k, H1, 1, H2, H1)
    if PART2 < PAD2:
        upper = _piece(half_ptr, PART2 + n, k, H1, 1, H2, H1)
        upper_last = _piece(w3_ptr, o, PART2 + n, H2, 1, OUT, H2)
        sizes = tl.maximum(sizes, tl.max(tl.abs(upper_last), 1))
        if PART1 < PAD1:
            upper_right = _piece(half_ptr, PART2 + n, PART1 + k, H1, 1, H2, H1)
    scale = 1.0
    if SCALE != 1:
        parts = tl.load(large_ptr + tl.arange(0, LARGE)[:, None] * OUT_PAD + o[None, :])
        scale = _power(tl.sum(tl.max(parts, 0) * sizes, 0))
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        out_ptr = sum_ptr + tl.cast(start // ROWS, tl.int64) * (H1 + OUT + H1 * IN)
        x = _block(x_ptr, x_row, x_col, start, rows, IN, IN_PAD, ROWS)
        x = tl.where((i == IN)[None, :], 1.0, x)  # a column of ones gives the biases with the weights
        x, of_x = _columns(x, dtype, SCALE != 1)
        g = _block(g_ptr, g_row, g_col, start, rows, OUT, OUT_PAD, ROWS)
        tl.store(out_ptr + H1 + o, tl.sum(g, 0), mask=o < OUT)
        d = _above(g, last, h2_ptr, d_ptr, start, rows, scale, 0, H2, PART2, ROWS, ACT, PRECISION, dtype)
        total = tl.dot(d, lower)
        if PART2 < PAD2:
            e = _above(g, upper_last, h2_ptr, d_ptr, start, rows, scale, PART2, H2, PART2, ROWS, ACT, PRECISION, dtype)
            total = tl.dot(e, upper, total)
        _of_first_layer(total, x, of_x, h1_ptr, out_ptr, start, rows, scale, 0, IN, H1, OUT, IN_PAD, PART1, ROWS, ACT,
                        SCALE, dtype)  # fmt: skip
        if PART1 < PAD1:
            total = tl.dot(d, right)
            if PART2 < PAD2:
                total = tl.dot(e, upper_right, total)
            _of_first_layer(total, x, of_x, h1_ptr, out_ptr, start, rows, scale, PART1, IN, H1, OUT, IN_PAD, PART1,
                            ROWS, ACT, SCALE, dtype)  # fmt: skip


@triton.jit
def resident_sums_kernel(
    g_ptr, w3_ptr, h2_ptr, sum_ptr, rows, g_row, g_col, H2: tl.constexpr, OUT: tl.constexpr, PAD2: tl.constexpr,
    OUT_PAD: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr, SCALE: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Of the rows of this program: gradients of the biases of the second layer and of the last layer's weights.

    A bias's gradient is a sum over rows and outputs of gradient, weight and slope; the weight stands before the sum
    over rows, so that both are products of the units with the outputs' gradients.
    """
    wait_for_previous(EARLY)
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
