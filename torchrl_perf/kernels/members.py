"""Triton kernels of several perceptrons of one shape, such as critics and their targets, on few rows.

With some hundred rows a network's time is that of its launches. Here all members of an ensemble, and those of a second
one of the same shape beside it, go through all their layers in one launch: the second dim of the grid is the member. A
program owns a block of rows and streams the weights from the L2 cache; layer norm is made in registers. Backward takes
the gradient down the layers the same way, and a third kernel makes the gradients of all weights, biases, gains and
shifts of all members in one launch, with the sum of squares of each of its tiles, of which a norm is made without
another pass. Weights are read as they lie, ``[OUT, IN]`` or ``[IN, OUT]``, in both directions. Every sum has a fixed
order: results repeat bit for bit.

Reference: :func:`torchrl_perf.functional.members.members`, which defines the values. Import this module only where
Triton is.
"""

import triton
import triton.language as tl

from torchrl_perf.kernels.activations import activate, slope
from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.products import add_dot


@triton.jit
def _of_member(
    tensors, LAYER: tl.constexpr, COUNT: tl.constexpr, member, SPLIT: tl.constexpr, SETS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Where a member's numbers of a layer begin: in the first set of COUNT tensors, or in the second behind it."""
    found = tensors[LAYER]
    place = member
    if SETS > 1:
        found = tl.where(member < SPLIT, found, tensors[LAYER + COUNT])
        place = member % SPLIT
    return found + place * SIZE


@triton.jit
def _product(
    a_ptr, a_row, r, w_ptr, first, K: tl.constexpr, N: tl.constexpr, W_K: tl.constexpr, W_N: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """``a[r] @ w`` for ROWS rows of a and COLS columns of the matrix w with these strides."""
    k = tl.arange(0, DEPTH)
    n = first + tl.arange(0, COLS)
    a = a_ptr + (r * a_row)[:, None] + k[None, :]
    w = w_ptr + (n * W_N)[None, :] + (k * W_K)[:, None]
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        left = tl.load(a) if K % DEPTH == 0 else tl.load(a, mask=(start + k < K)[None, :], other=0.0)
        if K % DEPTH == 0 and N % COLS == 0:
            right = tl.load(w)
        else:
            right = tl.load(w, mask=(start + k < K)[:, None] & (n < N)[None, :], other=0.0)
        if PRECISION != "bf16" and PRECISION != "fp16":  # noqa: PLR1714  Triton knows no sets
            left = left.to(tl.float32)  # hidden units may have 16 bits
        total = add_dot(total, left, right, PRECISION)
        a += DEPTH
        w += DEPTH * W_K
    return total


@triton.jit
def _up(
    z, first, j, is_row, b_ptr, gain_ptr, shift_ptr, h_ptr, z_ptr, scale_ptr, N: tl.constexpr, COLS: tl.constexpr,
    ACT: tl.constexpr, IS_LAST: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, KEEP_Z: tl.constexpr,
    SAVE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """COLS units of a layer, from the products; all of them where they are normalised."""
    n = first + tl.arange(0, COLS)
    z += tl.load(b_ptr + n, mask=n < N, other=0.0)[None, :]
    place = (j * N)[:, None] + n[None, :]
    mask = is_row[:, None] & (n < N)[None, :]
    if IS_LAST:
        tl.store(h_ptr + place, z, mask=mask)
    else:
        if NORM:
            inside = (n < N)[None, :]
            centred = tl.where(inside, z - (tl.sum(tl.where(inside, z, 0.0), 1) / N)[:, None], 0.0)
            scale = tl.rsqrt(tl.sum(centred * centred, 1) / N + EPS)
            z = centred * scale[:, None]
            if SAVE:
                tl.store(z_ptr + place, z, mask=mask)
                tl.store(scale_ptr + j, scale, mask=is_row)
            gain = tl.load(gain_ptr + n, mask=n < N, other=0.0)[None, :]
            z = z * gain + tl.load(shift_ptr + n, mask=n < N, other=0.0)[None, :]
        elif KEEP_Z and SAVE:
            tl.store(z_ptr + place, z, mask=mask)
        tl.store(h_ptr + place, activate(z, ACT, FAST), mask=mask)


@triton.jit
def _layer_up(
    member, j, is_row, r, x_ptr, weights, biases, gains, shifts, y_ptr, h_ptr, z_ptr, scale_ptr, rows, x_row,
    LAYER: tl.constexpr, SIZES: tl.constexpr, OFFSETS: tl.constexpr, SPLIT: tl.constexpr, SETS: tl.constexpr,
    INNER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTHS: tl.constexpr, ACT: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, KEEP_Z: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
    LAST: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One layer of the rows of this program."""
    LAYERS: tl.constexpr = len(SIZES) - 1
    HIDDEN: tl.constexpr = OFFSETS[LAYERS - 1]
    K: tl.constexpr = SIZES[LAYER]
    N: tl.constexpr = SIZES[LAYER + 1]
    IS_LAST: tl.constexpr = LAYER == LAYERS - 1
    WIDE: tl.constexpr = COLS[LAYER]
    a_ptr = x_ptr
    a_row = x_row
    if LAYER > 0:
        a_ptr = h_ptr + (member * HIDDEN + OFFSETS[LAYER - 1]).to(tl.int64) * rows
        a_row = K
        tl.debug_barrier()
    if IS_LAST:
        out_ptr = y_ptr + member.to(tl.int64) * N * rows
        keep_ptr = z_ptr
    else:
        place = (member * HIDDEN + OFFSETS[LAYER]).to(tl.int64) * rows
        out_ptr = h_ptr + place
        keep_ptr = z_ptr + place
    w_ptr = _of_member(weights, LAYER, LAYERS, member, SPLIT, SETS, K * N)
    b_ptr = _of_member(biases, LAYER, LAYERS, member, SPLIT, SETS, N)
    gain_ptr = b_ptr
    shift_ptr = b_ptr
    if NORM and not IS_LAST:
        gain_ptr = _of_member(gains, LAYER, LAYERS - 1, member, SPLIT, SETS, N)
        shift_ptr = _of_member(shifts, LAYER, LAYERS - 1, member, SPLIT, SETS, N)
    scale_ptr += (member * (LAYERS - 1) + LAYER) * rows
    for first in tl.range(0, N, WIDE, num_stages=1):  # loads ahead are for the product's own loop
        z = _product(
            a_ptr, a_row, r, w_ptr, first, K, N, 1 if INNER else N, K if INNER else 1, ROWS, WIDE, DEPTHS[LAYER],
            LAST if IS_LAST else PRECISION,
        )  # fmt: skip
        _up(z, first, j, is_row, b_ptr, gain_ptr, shift_ptr, out_ptr, keep_ptr, scale_ptr, N, WIDE, ACT, IS_LAST, NORM,
            EPS, KEEP_Z, SAVE, FAST)  # fmt: skip


@triton.jit
def forward_kernel(
    x_ptr, weights, biases, gains, shifts, y_ptr, h_ptr, z_ptr, scale_ptr, rows, x_member, x_row,
    SIZES: tl.constexpr, OFFSETS: tl.constexpr, SPLIT: tl.constexpr, SETS: tl.constexpr, SHARE: tl.constexpr,
    INNER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTHS: tl.constexpr, ACT: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, KEEP_Z: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
    LAST: tl.constexpr, FAST: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The rows of this program through all layers of its member.

    INNER says that weights lie as ``[OUT, IN]`` and not ``[IN, OUT]``; SHARE members read one input; LAST is the
    precision of the last layer.
    """
    wait_for_previous(EARLY)
    member = tl.program_id(1)
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.minimum(j, rows - 1)  # rows beyond the end repeat the last one
    for layer in tl.static_range(0, len(SIZES) - 1):
        _layer_up(member, j, j < rows, r, x_ptr + (member // SHARE) * x_member, weights, biases, gains, shifts, y_ptr,
                  h_ptr, z_ptr, scale_ptr, rows, x_row, layer, SIZES, OFFSETS, SPLIT, SETS, INNER, ROWS, COLS, DEPTHS,
                  ACT, NORM, EPS, KEEP_Z, SAVE, PRECISION, LAST, FAST)  # fmt: skip


@triton.jit
def _down(
    d, first, j, is_row, h_ptr, z_ptr, scale_ptr, gain_ptr, shift_ptr, d_ptr, e_ptr, N: tl.constexpr,
    COLS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr, KEEP_Z: tl.constexpr,
):  # fmt: skip
    """Gradients of what the linear map gave from those of COLS units, through activation and layer norm."""
    n = first + tl.arange(0, COLS)
    place = (j * N)[:, None] + n[None, :]
    mask = is_row[:, None] & (n < N)[None, :]
    h = tl.load(h_ptr + place, mask=mask, other=0.0).to(tl.float32)
    u = h
    if NORM:
        plain = tl.load(z_ptr + place, mask=mask, other=0.0).to(tl.float32)
        gain = tl.load(gain_ptr + n, mask=n < N, other=0.0)[None, :]
        u = plain * gain + tl.load(shift_ptr + n, mask=n < N, other=0.0)[None, :]
    elif KEEP_Z:
        u = tl.load(z_ptr + place, mask=mask, other=0.0).to(tl.float32)
    d = tl.where(mask, d * slope(h, u, ACT), 0.0)
    if NORM:
        tl.store(e_ptr + place, d, mask=mask)
        d *= gain
        d -= (tl.sum(d, 1) / N)[:, None] + plain * (tl.sum(d * plain, 1) / N)[:, None]
        d = tl.where(mask, d * tl.load(scale_ptr + j, mask=is_row, other=0.0)[:, None], 0.0)
    tl.store(d_ptr + place, d, mask=mask)


@triton.jit
def _layer_down(
    member, j, is_row, r, g_ptr, weights, gains, shifts, h_ptr, z_ptr, scale_ptr, d_ptr, e_ptr, dx_ptr, rows, height,
    g_member, g_row,
    LAYER: tl.constexpr, SIZES: tl.constexpr, OFFSETS: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, DEPTHS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr, KEEP_Z: tl.constexpr,
    PRECISION: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The gradient of the rows of this program through the weights of one layer and the activation below."""
    LAYERS: tl.constexpr = len(SIZES) - 1
    HIDDEN: tl.constexpr = OFFSETS[LAYERS - 1]
    IS_LAST: tl.constexpr = LAYER == LAYERS - 1
    K: tl.constexpr = SIZES[LAYER + 1]
    N: tl.constexpr = SIZES[LAYER]
    WIDE: tl.constexpr = COLS[LAYER]
    a_ptr = g_ptr + member * g_member
    a_row = g_row
    if not IS_LAST:
        a_ptr = d_ptr + (member * HIDDEN + OFFSETS[LAYER]).to(tl.int64) * height
        a_row = K
        tl.debug_barrier()
    w_ptr = _of_member(weights, LAYER, LAYERS, member, 1, 1, K * N)
    gain_ptr = w_ptr
    shift_ptr = w_ptr
    BELOW: tl.constexpr = LAYER - 1 if LAYER > 0 else 0
    if NORM and LAYER > 0:
        gain_ptr = _of_member(gains, BELOW, LAYERS - 1, member, 1, 1, N)
        shift_ptr = _of_member(shifts, BELOW, LAYERS - 1, member, 1, 1, N)
    at = (member * HIDDEN + OFFSETS[BELOW]).to(tl.int64) * height
    scale_ptr += (member * (LAYERS - 1) + BELOW) * height
    for first in tl.range(0, N, WIDE, num_stages=1):
        d = _product(
            a_ptr, a_row, r, w_ptr, first, K, N, N if INNER else 1, 1 if INNER else K, ROWS, WIDE, DEPTHS[LAYER],
            LAST if IS_LAST else PRECISION,
        )  # fmt: skip
        if LAYER == 0:
            n = first + tl.arange(0, WIDE)
            place = ((member.to(tl.int64) * rows + j) * N)[:, None] + n[None, :]
            tl.store(dx_ptr + place, d, mask=is_row[:, None] & (n < N)[None, :])
        else:
            _down(d, first, j, is_row, h_ptr + at, z_ptr + at, scale_ptr, gain_ptr, shift_ptr, d_ptr + at, e_ptr + at,
                  N, WIDE, ACT, NORM, KEEP_Z)  # fmt: skip


@triton.jit
def backward_kernel(
    g_ptr, weights, gains, shifts, h_ptr, z_ptr, scale_ptr, d_ptr, e_ptr, dx_ptr, rows, height, g_member, g_row,
    SIZES: tl.constexpr, OFFSETS: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPTHS: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr, KEEP_Z: tl.constexpr, NEEDS_X: tl.constexpr,
    PRECISION: tl.constexpr, LAST: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of this program's rows through all layers of its member, of which ``height`` rows are kept."""
    wait_for_previous(EARLY)
    member = tl.program_id(1)
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.minimum(j, rows - 1)
    for step in tl.static_range(0, len(SIZES) - 1 if NEEDS_X else len(SIZES) - 2):
        _layer_down(member, j, j < rows, r, g_ptr, weights, gains, shifts, h_ptr, z_ptr, scale_ptr, d_ptr, e_ptr,
                    dx_ptr, rows, height, g_member, g_row, len(SIZES) - 2 - step, SIZES, OFFSETS, INNER, ROWS, COLS,
                    DEPTHS, ACT, NORM, KEEP_Z, PRECISION, LAST)  # fmt: skip


@triton.jit
def _squares(values):
    return tl.sum(tl.sum(values * values, 1), 0)


@triton.jit
def _sums(
    d_ptr, d_row, n, split, rows, N: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Sums of columns of d over the rows of this program."""
    i = tl.arange(0, ROWS)
    total = tl.zeros((COLS, ROWS), dtype=tl.float32)
    for start in range(split * ROWS, rows, SPLITS * ROWS):
        mask = (start + i < rows)[None, :] & (n < N)[:, None]
        total += tl.load(d_ptr + ((start + i) * d_row)[None, :] + n[:, None], mask=mask, other=0.0).to(tl.float32)
    return tl.sum(total, 1)


@triton.jit
def _norm_sums(
    e_ptr, z_ptr, n, split, rows, N: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Gradients of gains and shifts from the rows of this program."""
    i = tl.arange(0, ROWS)
    gains = tl.zeros((COLS, ROWS), dtype=tl.float32)
    shifts = tl.zeros((COLS, ROWS), dtype=tl.float32)
    for start in range(split * ROWS, rows, SPLITS * ROWS):
        at = ((start + i) * N)[None, :] + n[:, None]
        mask = (start + i < rows)[None, :] & (n < N)[:, None]
        e = tl.load(e_ptr + at, mask=mask, other=0.0).to(tl.float32)
        gains += e * tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
        shifts += e
    return tl.sum(gains, 1), tl.sum(shifts, 1)


@triton.jit
def _tile(
    tile, split, d_ptr, d_row, a_ptr, a_row, e_ptr, z_ptr, rows, w_ptr, b_ptr, gain_ptr, shift_ptr, of_w_ptr, of_b_ptr,
    of_gain_ptr, of_shift_ptr, K: tl.constexpr, N: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, HAS_NORM: tl.constexpr, APART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of one layer's weights, ``d.T @ a``; those of the first column make the vectors' too.

    With APART the weights are left out.
    """
    ACROSS: tl.constexpr = 1 if APART else (K + DEPTH - 1) // DEPTH
    n = (tile // ACROSS) * COLS + tl.arange(0, COLS)
    if not APART:
        k = (tile % ACROSS) * DEPTH + tl.arange(0, DEPTH)
        i = tl.arange(0, ROWS)
        total = tl.zeros((COLS, DEPTH), dtype=tl.float32)
        for start in range(split * ROWS, rows, SPLITS * ROWS):
            is_row = start + i < rows
            d = tl.load(
                d_ptr + ((start + i) * d_row)[None, :] + n[:, None], mask=is_row[None, :] & (n < N)[:, None], other=0.0
            )
            a = tl.load(
                a_ptr + ((start + i) * a_row)[:, None] + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0
            )
            if PRECISION != "bf16" and PRECISION != "fp16":  # noqa: PLR1714  Triton knows no sets
                d = d.to(tl.float32)
                a = a.to(tl.float32)
            total = add_dot(total, d, a, PRECISION)
        place = (n * K)[:, None] + k[None, :] if INNER else n[:, None] + (k * N)[None, :]
        tl.store(w_ptr + place, total, mask=(n < N)[:, None] & (k < K)[None, :])
        if SPLITS == 1:
            tl.store(of_w_ptr + tile, _squares(total))
    if tile % ACROSS == 0:
        down = tile // ACROSS
        bias = _sums(d_ptr, d_row, n, split, rows, N, COLS, ROWS, SPLITS)
        tl.store(b_ptr + n, bias, mask=n < N)
        if SPLITS == 1:
            tl.store(of_b_ptr + down, tl.sum(bias * bias, 0))
        if HAS_NORM:
            gain, shift = _norm_sums(e_ptr, z_ptr, n, split, rows, N, COLS, ROWS, SPLITS)
            tl.store(gain_ptr + n, gain, mask=n < N)
            tl.store(shift_ptr + n, shift, mask=n < N)
            if SPLITS == 1:
                tl.store(of_gain_ptr + down, tl.sum(gain * gain, 0))
                tl.store(of_shift_ptr + down, tl.sum(shift * shift, 0))


@triton.jit
def _layer_gradients(
    member, tile, split, x_ptr, g_ptr, d_ptr, e_ptr, h_ptr, z_ptr, weights, biases, gains, shifts, squares_ptr, rows,
    height, x_row, g_row,
    LAYER: tl.constexpr, SIZES: tl.constexpr, OFFSETS: tl.constexpr, PLACES: tl.constexpr, COUNTS: tl.constexpr,
    INNER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTHS: tl.constexpr, SPLITS: tl.constexpr,
    APART: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """A tile of one layer."""
    LAYERS: tl.constexpr = len(SIZES) - 1
    HIDDEN: tl.constexpr = OFFSETS[LAYERS - 1]
    K: tl.constexpr = SIZES[LAYER]
    N: tl.constexpr = SIZES[LAYER + 1]
    IS_LAST: tl.constexpr = LAYER == LAYERS - 1
    HAS_NORM: tl.constexpr = NORM and not IS_LAST
    AT: tl.constexpr = LAYER * (4 if NORM else 2)
    above_ptr = g_ptr
    above_row = g_row
    at = (member * HIDDEN).to(tl.int64) * height
    if not IS_LAST:
        at = (member * HIDDEN + OFFSETS[LAYER]).to(tl.int64) * height
        above_ptr = d_ptr + at
        above_row = N
    below_ptr = x_ptr
    below_row = x_row
    if LAYER > 0:
        below_ptr = h_ptr + (member * HIDDEN + OFFSETS[LAYER - 1]).to(tl.int64) * height
        below_row = K
    out = split * tl.num_programs(1) + member  # parts of the sums over rows lie one behind the other
    b_ptr = biases[LAYER] + out * N
    of_b_ptr = squares_ptr + PLACES[AT + 1] + member * COUNTS[AT + 1]
    gain_ptr = b_ptr
    shift_ptr = b_ptr
    of_gain_ptr = of_b_ptr
    of_shift_ptr = of_b_ptr
    if HAS_NORM:
        gain_ptr = gains[LAYER] + out * N
        shift_ptr = shifts[LAYER] + out * N
        of_gain_ptr = squares_ptr + PLACES[AT + 2] + member * COUNTS[AT + 2]
        of_shift_ptr = squares_ptr + PLACES[AT + 3] + member * COUNTS[AT + 3]
    _tile(tile, split, above_ptr, above_row, below_ptr, below_row, e_ptr + at, z_ptr + at, rows,
          weights[LAYER] + out * (K * N), b_ptr, gain_ptr, shift_ptr,
          squares_ptr + PLACES[AT] + member * COUNTS[AT], of_b_ptr, of_gain_ptr, of_shift_ptr, K, N, INNER, ROWS,
          COLS[LAYER], DEPTHS[LAYER], SPLITS, HAS_NORM, APART[LAYER], LAST if IS_LAST else PRECISION)  # fmt: skip


@triton.jit
def gradients_kernel(
    x_ptr, g_ptr, d_ptr, e_ptr, h_ptr, z_ptr, weights, biases, gains, shifts, squares_ptr, rows, height, x_member,
    x_row, g_member, g_row,
    SIZES: tl.constexpr, OFFSETS: tl.constexpr, TILES: tl.constexpr, PLACES: tl.constexpr, COUNTS: tl.constexpr,
    SHARE: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTHS: tl.constexpr,
    SPLITS: tl.constexpr, APART: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr, LAST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of one tile of the weights of one layer of one member, from every SPLITS-th block of rows.

    TILES are the first tiles of the layers, PLACES those of the squares of each parameter in the order of the layers
    (weight, bias, gain, shift), and COUNTS how many of them a member has.
    """
    wait_for_previous(EARLY)
    member = tl.program_id(1)
    program = tl.program_id(0)
    x_ptr += (member // SHARE) * x_member
    g_ptr += member * g_member
    for layer in tl.static_range(0, len(SIZES) - 1):
        if (program >= TILES[layer]) & (program < TILES[layer + 1]):
            _layer_gradients(member, program - TILES[layer], tl.program_id(2), x_ptr, g_ptr, d_ptr, e_ptr, h_ptr, z_ptr,
                             weights, biases, gains, shifts, squares_ptr, rows, height, x_row, g_row, layer, SIZES,
                             OFFSETS, PLACES, COUNTS, INNER, ROWS, COLS, DEPTHS, SPLITS, APART, NORM,
                             PRECISION, LAST)  # fmt: skip


@triton.jit
def total_kernel(
    squares_ptr, parts, totals, FIRST: tl.constexpr, SIZES: tl.constexpr, SPLITS: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of one parameter from their parts, up to MOST, and the sum of their squares.

    All parts are read at once: one after the other each would wait for memory.
    """
    wait_for_previous(EARLY)
    COUNT: tl.constexpr = len(SIZES)
    program = tl.program_id(0)
    part_ptr = parts[0]
    total_ptr = totals[0]
    first = program * 0
    size = program * 0 + SIZES[0]
    splits = program * 0 + SPLITS[0]
    for p in tl.static_range(1, COUNT):
        part_ptr = tl.where(program >= FIRST[p], parts[p], part_ptr)
        total_ptr = tl.where(program >= FIRST[p], totals[p], total_ptr)
        first = tl.where(program >= FIRST[p], FIRST[p], first)
        size = tl.where(program >= FIRST[p], SIZES[p], size)
        splits = tl.where(program >= FIRST[p], SPLITS[p], splits)
    i = (program - first) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, MOST)
    mask = (split < splits)[:, None] & (i < size)[None, :]
    total = tl.sum(tl.load(part_ptr + (split * size)[:, None] + i[None, :], mask=mask, other=0.0), 0)
    tl.store(total_ptr + i, total, mask=i < size)
    tl.store(squares_ptr + program, tl.sum(total * total, 0))
