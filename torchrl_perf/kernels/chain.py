"""Triton kernels of perceptrons of any depth and width: a block of rows goes through all layers in one launch.

Beyond 128 wide a network's weights no longer fit on chip. Here a program owns a block of rows and streams the weights
from the L2 cache, layer after layer: a product of tiles, then bias, layer norm and activation in registers, then a
store that only this program reads again. Forward writes the hidden units where a backward pass will read them, else to
a scratch that stays in the cache. Backward takes the gradient down the layers the same way and writes, for each layer,
the gradient of what its linear map gave and sums of its columns; the products that give gradients of the weights are
left to cuBLAS (:mod:`torchrl_perf.functional.chain`). Sums run in a fixed order: results repeat bit for bit.

Reference: :func:`torchrl_perf.functional.chain.chain`, which defines the values. Import this module only where Triton
is.
"""

import triton
import triton.language as tl

from torchrl_perf.kernels.activations import activate, slope
from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.products import add_dot, product, product_of_first, product_of_last


@triton.jit
def _up(
    first, z, is_row, b_ptr, h_ptr, z_ptr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACT: tl.constexpr,
    IS_LAST: tl.constexpr, NORM: tl.constexpr, KEEP_Z: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """COLS units of a layer, from the products."""
    n = first + tl.arange(0, COLS)
    z += tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]
    place = (tl.arange(0, ROWS) * N)[:, None] + n[None, :]
    mask = is_row[:, None] & (n < N)[None, :]
    if IS_LAST:
        tl.store(h_ptr + place, z, mask=mask)
    else:
        if NORM or KEEP_Z:
            tl.store(z_ptr + place, z, mask=mask)
        if not NORM:
            tl.store(h_ptr + place, activate(z, ACT, FAST), mask=mask)


@triton.jit
def _normalized(z_ptr, place, mask, N: tl.constexpr, EPS: tl.constexpr):
    """Rows of a layer's linear map with mean 0 and variance 1, and what they were multiplied with."""
    z = tl.load(z_ptr + place, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, z - (tl.sum(z, 1) / N)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / N + EPS)
    return centred * scale[:, None], scale


@triton.jit
def _norm_up(
    start, rows, gain_ptr, shift_ptr, keep_ptr, out_ptr, N: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    NORM_ROWS: tl.constexpr, ACT: tl.constexpr, EPS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Layer norm and activation of a layer whose linear map is written."""
    tl.debug_barrier()
    n = tl.arange(0, PAD)
    gain = tl.load(gain_ptr + n, mask=n < N, other=0.0)[None, :]
    shift = tl.load(shift_ptr + n, mask=n < N, other=0.0)[None, :]
    for top in tl.range(0, ROWS, NORM_ROWS, num_stages=1):
        j = top + tl.arange(0, NORM_ROWS)
        at = (j * N)[:, None] + n[None, :]
        mask = (start + j < rows)[:, None] & (n < N)[None, :]
        plain, _ = _normalized(keep_ptr, at, mask, N, EPS)
        tl.store(out_ptr + at, activate(plain * gain + shift, ACT, FAST), mask=mask)


@triton.jit
def _layer_up(
    start, place, height, r, rows, x_ptr, x_row, x_col, weights, biases, gains, shifts, y_ptr, h_ptr, z_ptr,
    LAYER: tl.constexpr, SIZES: tl.constexpr, OFFSETS: tl.constexpr, COLS: tl.constexpr, DEPTHS: tl.constexpr,
    PADS: tl.constexpr, ROWS: tl.constexpr, NORM_ROWS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr,
    EPS: tl.constexpr, KEEP_Z: tl.constexpr, SAVE: tl.constexpr, PAIR: tl.constexpr, PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """One layer of the rows of this program; with PAIR the second also makes the first, of PAIR padded inputs."""
    K: tl.constexpr = SIZES[LAYER]
    N: tl.constexpr = SIZES[LAYER + 1]
    WIDE: tl.constexpr = COLS[LAYER]
    IS_LAST: tl.constexpr = len(SIZES) - 2 == LAYER
    is_row = start + tl.arange(0, ROWS) < rows
    if LAYER == 0:
        a_ptr = x_ptr + tl.cast(start, tl.int64) * x_row
        a_row = x_row
        a_col = x_col
    else:
        a_ptr = h_ptr + height * OFFSETS[LAYER - 1] + place * K
        a_row = K
        a_col = 1
        if PAIR == 0 or LAYER > 1:
            tl.debug_barrier()
    if IS_LAST:
        out_ptr = y_ptr + tl.cast(start, tl.int64) * N
        keep_ptr = z_ptr
    else:
        out_ptr = h_ptr + height * OFFSETS[LAYER] + place * N
        keep_ptr = z_ptr + height * OFFSETS[LAYER] + place * N
    if PAIR > 0 and LAYER == 1:
        z = product_of_first(
            x_ptr + tl.cast(start, tl.int64) * x_row, x_row, x_col, r, is_row, weights[0], biases[0], a_ptr,
            z_ptr + place * K, weights[1], tl.arange(0, WIDE), SIZES[0], PAIR, K, N, ROWS, WIDE, DEPTHS[1], ACT, KEEP_Z,
            SAVE, PRECISION, FAST,
        )  # fmt: skip
        _up(0, z, is_row, biases[1], out_ptr, keep_ptr, N, ROWS, WIDE, ACT, IS_LAST, NORM, KEEP_Z, FAST)
    elif WIDE >= N:
        z = product(a_ptr, a_row, a_col, r, weights[LAYER], tl.arange(0, WIDE), K, N, ROWS, WIDE, DEPTHS[LAYER],
                    PRECISION)  # fmt: skip
        _up(0, z, is_row, biases[LAYER], out_ptr, keep_ptr, N, ROWS, WIDE, ACT, IS_LAST, NORM, KEEP_Z, FAST)
    else:
        for first in tl.range(0, N, WIDE, num_stages=1):  # loads ahead are for the product's own loop
            z = product(a_ptr, a_row, a_col, r, weights[LAYER], first + tl.arange(0, WIDE), K, N, ROWS, WIDE,
                        DEPTHS[LAYER], PRECISION)  # fmt: skip
            _up(first, z, is_row, biases[LAYER], out_ptr, keep_ptr, N, ROWS, WIDE, ACT, IS_LAST, NORM, KEEP_Z, FAST)
    if NORM and not IS_LAST:
        _norm_up(start, rows, gains[LAYER], shifts[LAYER], keep_ptr, out_ptr, N, PADS[LAYER], ROWS, NORM_ROWS, ACT, EPS,
                 FAST)  # fmt: skip


@triton.jit
def forward_kernel(
    x_ptr, weights, biases, gains, shifts, y_ptr, h_ptr, z_ptr, rows, x_row, x_col,
    SIZES: tl.constexpr, OFFSETS: tl.constexpr, COLS: tl.constexpr, DEPTHS: tl.constexpr, PADS: tl.constexpr,
    ROWS: tl.constexpr, NORM_ROWS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    KEEP_Z: tl.constexpr, SAVE: tl.constexpr, PAIR: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The rows of this program, and of those that follow it by the number of programs, through all layers."""
    wait_for_previous(EARLY)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        r = tl.minimum(tl.arange(0, ROWS), rows - 1 - start)  # rows beyond the end repeat the last one
        if SAVE:
            height = tl.cast(tl.cdiv(rows, 16) * 16, tl.int64)
            place = tl.cast(start, tl.int64)
        else:
            height = tl.cast(tl.num_programs(0) * ROWS, tl.int64)
            place = tl.cast(tl.program_id(0) * ROWS, tl.int64)
        for layer in tl.static_range(1 if PAIR > 0 else 0, len(SIZES) - 1):
            _layer_up(start, place, height, r, rows, x_ptr, x_row, x_col, weights, biases, gains, shifts, y_ptr, h_ptr,
                      z_ptr, layer, SIZES, OFFSETS, COLS, DEPTHS, PADS, ROWS, NORM_ROWS, ACT, NORM, EPS, KEEP_Z,
                      SAVE, PAIR, PRECISION, FAST)  # fmt: skip
        if not SAVE:
            tl.debug_barrier()  # the scratch is written anew


@triton.jit
def _outer(
    unit_ptr, units, n, a_ptr, a_row, a_col, r, unit_step: tl.constexpr, a_step: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``units.T @ a[r]`` of COLS units and all columns of a, as a part of the sums."""
    k = tl.arange(0, PAD)
    a = tl.load(a_ptr + (r * a_row)[:, None] + (k * a_col)[None, :], mask=(k < K)[None, :], other=0.0)
    total = add_dot(tl.zeros((units.shape[1], PAD), dtype=tl.float32), tl.trans(units), a, PRECISION)
    place = (n * unit_step)[:, None] + (k * a_step)[None, :]
    tl.store(unit_ptr + place, total, mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit
def _down(
    first, d, is_row, h_ptr, z_ptr, d_ptr, sum_ptr, r, g_ptr, g_row, g_col, x_ptr, x_row, x_col, outer_ptr,
    OUT: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACT: tl.constexpr,
    IS_INPUT: tl.constexpr, NORM: tl.constexpr, KEEP_Z: tl.constexpr, INPUTS: tl.constexpr, IN_PAD: tl.constexpr,
    OUT_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the products the gradients of COLS units of a layer, before its activation, and sums over the rows."""
    n = first + tl.arange(0, COLS)
    place = (tl.arange(0, ROWS) * N)[:, None] + n[None, :]
    mask = is_row[:, None] & (n < N)[None, :]
    if not IS_INPUT and not NORM:
        h = tl.load(h_ptr + place, mask=mask, other=0.0).to(tl.float32)
        u = h
        if KEEP_Z:
            u = tl.load(z_ptr + place, mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, d * slope(h, u, ACT), 0.0)
        tl.store(sum_ptr + n, tl.sum(d, 0), mask=n < N)
        if OUT_PAD > 0:  # the gradient of the last layer's weights, [OUT, N]
            _outer(outer_ptr, h, n, g_ptr, g_row, g_col, r, 1, N, N, OUT, OUT_PAD, PRECISION)
            outer_ptr += OUT * N
        if IN_PAD > 0:  # the gradient of the first layer's weights, [N, IN]
            _outer(outer_ptr, d, n, x_ptr, x_row, x_col, r, INPUTS, 1, N, INPUTS, IN_PAD, PRECISION)
    tl.store(d_ptr + place, d, mask=mask)


@triton.jit
def _norm_down(
    start, rows, gain_ptr, shift_ptr, keep_ptr, out_ptr, column_ptr, HIDDEN: tl.constexpr, OUT: tl.constexpr,
    N: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, NORM_ROWS: tl.constexpr, ACT: tl.constexpr,
    EPS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients through activation and layer norm in place, and sums over the rows for the layer's vectors."""
    tl.debug_barrier()
    n = tl.arange(0, PAD)
    gain = tl.load(gain_ptr + n, mask=n < N, other=0.0)[None, :]
    shift = tl.load(shift_ptr + n, mask=n < N, other=0.0)[None, :]
    d_sum = tl.zeros((PAD,), dtype=tl.float32)
    gain_sum = tl.zeros((PAD,), dtype=tl.float32)
    shift_sum = tl.zeros((PAD,), dtype=tl.float32)
    for top in tl.range(0, ROWS, NORM_ROWS, num_stages=1):
        j = top + tl.arange(0, NORM_ROWS)
        at = (j * N)[:, None] + n[None, :]
        mask = (start + j < rows)[:, None] & (n < N)[None, :]
        plain, scale = _normalized(keep_ptr, at, mask, N, EPS)
        u = plain * gain + shift
        d = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32) * slope(activate(u, ACT, FAST), u, ACT)
        gain_sum += tl.sum(d * plain, 0)
        shift_sum += tl.sum(d, 0)
        d *= gain
        d -= (tl.sum(d, 1) / N)[:, None] + plain * (tl.sum(d * plain, 1) / N)[:, None]
        d = tl.where(mask, d * scale[:, None], 0.0)
        d_sum += tl.sum(d, 0)
        tl.store(out_ptr + at, d, mask=mask)
    tl.store(column_ptr + n, d_sum, mask=n < N)
    tl.store(column_ptr + HIDDEN + OUT + n, gain_sum, mask=n < N)
    tl.store(column_ptr + 2 * HIDDEN + OUT + n, shift_sum, mask=n < N)


@triton.jit
def _layer_down(
    start, height, r, rows, x_ptr, x_row, x_col, g_ptr, g_row, g_col, weights, gains, shifts, h_ptr, z_ptr, d_ptr,
    dx_ptr, sum_ptr,
    LAYER: tl.constexpr, SIZES: tl.constexpr, OFFSETS: tl.constexpr, COLS: tl.constexpr, DEPTHS: tl.constexpr,
    PADS: tl.constexpr, ROWS: tl.constexpr, NORM_ROWS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr,
    EPS: tl.constexpr, KEEP_Z: tl.constexpr, IN_PAD: tl.constexpr, OUT_PAD: tl.constexpr, PAIR: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gradient of this program's rows through the weights of one layer and the activation below.

    With PAIR the layer below the last one makes that also, of PAIR padded outputs.
    """
    LAYERS: tl.constexpr = len(SIZES) - 1
    HIDDEN: tl.constexpr = OFFSETS[LAYERS - 1]
    OUT: tl.constexpr = SIZES[LAYERS]
    K: tl.constexpr = SIZES[LAYER + 1]
    N: tl.constexpr = SIZES[LAYER]
    WIDE: tl.constexpr = COLS[LAYER]
    IS_INPUT: tl.constexpr = LAYER == 0
    BELOW: tl.constexpr = 0 if IS_INPUT else OFFSETS[LAYER - 1]
    TO_FIRST: tl.constexpr = IN_PAD if LAYER == 1 else 0
    TO_LAST: tl.constexpr = OUT_PAD if LAYER == LAYERS - 1 else 0
    is_row = start + tl.arange(0, ROWS) < rows
    outer_ptr = sum_ptr + HIDDEN * (3 if NORM else 1) + OUT
    if OUT_PAD > 0 and LAYER < LAYERS - 1:
        outer_ptr += OUT * SIZES[LAYERS - 1]
    if LAYER == LAYERS - 1:
        a_ptr = g_ptr
        a_row = g_row
        a_col = g_col
    else:
        a_ptr = d_ptr + height * OFFSETS[LAYER] + start * K
        a_row = K
        a_col = 1
        if PAIR == 0 or LAYER < LAYERS - 2:
            tl.debug_barrier()
    base = height * BELOW + start * N
    out_ptr = d_ptr + base
    if IS_INPUT:
        out_ptr = dx_ptr + base
    if WIDE >= N:
        if PAIR > 0 and LAYER == LAYERS - 2:
            top = height * OFFSETS[LAYER] + start * K
            d = product_of_last(
                g_ptr, g_row, g_col, r, is_row, weights[LAYER + 1], h_ptr + top, z_ptr + top, d_ptr + top,
                sum_ptr + OFFSETS[LAYER], sum_ptr + HIDDEN + OUT, weights[LAYER], tl.arange(0, WIDE), OUT, PAIR, K, N,
                ROWS, WIDE, DEPTHS[LAYER], ACT, KEEP_Z, OUT_PAD > 0, PRECISION,
            )  # fmt: skip
        else:
            d = product(a_ptr, a_row, a_col, r, weights[LAYER], tl.arange(0, WIDE), K, N, ROWS, WIDE, DEPTHS[LAYER],
                        PRECISION)  # fmt: skip
        _down(0, d, is_row, h_ptr + base, z_ptr + base, out_ptr, sum_ptr + BELOW, r, g_ptr, g_row, g_col, x_ptr, x_row,
              x_col, outer_ptr, OUT, N, ROWS, WIDE, ACT, IS_INPUT, NORM, KEEP_Z, SIZES[0], TO_FIRST, TO_LAST,
              PRECISION)  # fmt: skip
    else:
        for first in tl.range(0, N, WIDE, num_stages=1):  # loads ahead are for the product's own loop
            d = product(a_ptr, a_row, a_col, r, weights[LAYER], first + tl.arange(0, WIDE), K, N, ROWS, WIDE,
                        DEPTHS[LAYER], PRECISION)  # fmt: skip
            _down(first, d, is_row, h_ptr + base, z_ptr + base, out_ptr, sum_ptr + BELOW, r, g_ptr, g_row, g_col, x_ptr,
                  x_row, x_col, outer_ptr, OUT, N, ROWS, WIDE, ACT, IS_INPUT, NORM, KEEP_Z, SIZES[0], TO_FIRST, TO_LAST,
                  PRECISION)  # fmt: skip
    if NORM and not IS_INPUT:
        _norm_down(start, rows, gains[LAYER - 1], shifts[LAYER - 1], z_ptr + base, out_ptr, sum_ptr + BELOW, HIDDEN,
                   OUT, N, PADS[LAYER - 1], ROWS, NORM_ROWS, ACT, EPS, FAST)  # fmt: skip


@triton.jit
def backward_kernel(
    x_ptr, g_ptr, weights, gains, shifts, h_ptr, z_ptr, d_ptr, dx_ptr, sum_ptr, rows, x_row, x_col, g_row, g_col,
    SIZES: tl.constexpr, OFFSETS: tl.constexpr, COLS: tl.constexpr, DEPTHS: tl.constexpr, PADS: tl.constexpr,
    ROWS: tl.constexpr, NORM_ROWS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    KEEP_Z: tl.constexpr, NEEDS_X: tl.constexpr, IN_PAD: tl.constexpr, OUT_PAD: tl.constexpr,
    PAIR: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of this program's rows through all layers.

    ``weights`` are transposed, ``[IN, OUT]``. Sums of a program: each hidden layer's biases, then the outputs', then
    gains and shifts in the order of the biases, then the last layer's weights where OUT_PAD is not 0, and those of the
    first where IN_PAD is not.
    """
    wait_for_previous(EARLY)
    LAYERS: tl.constexpr = len(SIZES) - 1
    HIDDEN: tl.constexpr = OFFSETS[LAYERS - 1]
    OUT: tl.constexpr = SIZES[LAYERS]
    WIDE: tl.constexpr = COLS[LAYERS]
    LAST: tl.constexpr = OUT * SIZES[LAYERS - 1] if OUT_PAD > 0 else 0
    FIRST: tl.constexpr = SIZES[0] * SIZES[1] if IN_PAD > 0 else 0
    SUMS: tl.constexpr = HIDDEN * (3 if NORM else 1) + OUT + LAST + FIRST
    start = tl.cast(tl.program_id(0), tl.int64) * ROWS
    i = tl.arange(0, ROWS)
    r = tl.minimum(i, tl.cast(rows - 1 - start, tl.int32))
    height = tl.cast(tl.cdiv(rows, 16) * 16, tl.int64)
    sum_ptr += tl.cast(tl.program_id(0), tl.int64) * SUMS
    x_ptr += start * x_row
    g_ptr += start * g_row
    for first in tl.range(0, OUT, WIDE, num_stages=1):
        n = first + tl.arange(0, WIDE)
        mask = (start + i < rows)[:, None] & (n < OUT)[None, :]
        g = tl.load(g_ptr + (r * g_row)[:, None] + (n * g_col)[None, :], mask=mask, other=0.0)
        tl.store(sum_ptr + HIDDEN + n, tl.sum(g, 0), mask=n < OUT)
    for step in tl.static_range(1 if PAIR > 0 else 0, LAYERS if NEEDS_X else LAYERS - 1):
        _layer_down(start, height, r, rows, x_ptr, x_row, x_col, g_ptr, g_row, g_col, weights, gains, shifts, h_ptr,
                    z_ptr, d_ptr, dx_ptr, sum_ptr, LAYERS - 1 - step, SIZES, OFFSETS, COLS, DEPTHS, PADS, ROWS,
                    NORM_ROWS, ACT, NORM, EPS, KEEP_Z, IN_PAD, OUT_PAD, PAIR, PRECISION, FAST)  # fmt: skip
