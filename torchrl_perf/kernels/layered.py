"""Triton kernels of perceptrons of one shape on many rows, a launch for each layer, with the rest of it in its product.

From some ten thousand rows on a layer fills the device alone, and a program that keeps its rows through all layers
waits at each for the one before. Here a launch is one layer of all members: bias and activation, or backward the slope,
are applied to the sums of a product before they are written. The layers' functions are those of
:mod:`torchrl_perf.kernels.members`, and so is what is kept. cuBLAS's products with passes of their own for the rest are
slower (H200, an update of SAC with 512-256-128 on 32,768 rows: 1,266 us for 1,154).

Reference: :func:`torchrl_perf.functional.members.members`. Import this module only where Triton is.
"""

import triton
import triton.language as tl

from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.members import _down, _of_member, _product, _up


@triton.jit
def up_kernel(
    a_ptr, weights, biases, out_ptr, z_ptr, rows, a_member, a_row, out_member,
    K: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, SETS: tl.constexpr, SHARE: tl.constexpr,
    INNER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, ACT: tl.constexpr,
    IS_LAST: tl.constexpr, KEEP_Z: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """COLS units of one layer for ROWS rows of a member; tiles of one block of rows are neighbours."""
    wait_for_previous(EARLY)
    ACROSS: tl.constexpr = (N + COLS - 1) // COLS
    member = tl.program_id(1)
    first = (tl.program_id(0) % ACROSS) * COLS
    j = (tl.program_id(0) // ACROSS) * ROWS + tl.arange(0, ROWS)
    w_ptr = _of_member(weights, 0, 1, member, SPLIT, SETS, K * N)
    b_ptr = _of_member(biases, 0, 1, member, SPLIT, SETS, N)
    a_ptr += (member // SHARE).to(tl.int64) * a_member
    place = member.to(tl.int64) * out_member
    z = _product(
        a_ptr, a_row, tl.minimum(j, rows - 1), w_ptr, first, K, N, 1 if INNER else N, K if INNER else 1, ROWS, COLS,
        DEPTH, PRECISION,
    )  # fmt: skip
    _up(z, first, j, j < rows, b_ptr, b_ptr, b_ptr, out_ptr + place, z_ptr + place, z_ptr, N, COLS, ACT, IS_LAST, False,
        0.0, KEEP_Z, True, FAST)  # fmt: skip


@triton.jit
def down_kernel(
    a_ptr, weights, h_ptr, z_ptr, out_ptr, rows, a_member, a_row, h_member, out_member,
    K: tl.constexpr, N: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPTH: tl.constexpr, ACT: tl.constexpr, IS_INPUT: tl.constexpr, KEEP_Z: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of COLS units below a layer of K units for ROWS rows of a member, before their activation."""
    wait_for_previous(EARLY)
    ACROSS: tl.constexpr = (N + COLS - 1) // COLS
    member = tl.program_id(1)
    first = (tl.program_id(0) % ACROSS) * COLS
    j = (tl.program_id(0) // ACROSS) * ROWS + tl.arange(0, ROWS)
    w_ptr = _of_member(weights, 0, 1, member, 1, 1, K * N)
    a_ptr += member.to(tl.int64) * a_member
    h_ptr += member.to(tl.int64) * h_member
    z_ptr += member.to(tl.int64) * h_member
    out_ptr += member.to(tl.int64) * out_member
    d = _product(
        a_ptr, a_row, tl.minimum(j, rows - 1), w_ptr, first, K, N, N if INNER else 1, 1 if INNER else K, ROWS, COLS,
        DEPTH, PRECISION,
    )  # fmt: skip
    if IS_INPUT:
        n = first + tl.arange(0, COLS)
        tl.store(out_ptr + (j * N)[:, None] + n[None, :], d, mask=(j < rows)[:, None] & (n < N)[None, :])
    else:
        _down(d, first, j, j < rows, h_ptr, z_ptr, z_ptr, w_ptr, w_ptr, out_ptr, out_ptr, N, COLS, ACT, False,
              KEEP_Z)  # fmt: skip
