"""Triton kernels of a linear layer of few inputs with its activation: one launch forwards, two backwards.

Reference: :func:`torchrl_perf.functional.narrow.narrow_layer`. Such a layer is bound by memory, where a matrix product
pads its inputs, splits its depth and adds the bias in launches of their own. The input's numbers are multiplied one by
one, in float32. Backwards a program sums the gradients of weights and bias over its rows, and a second launch those of
all programs, in an order that does not change. Import this module only where Triton is.
"""

import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.activations import ACTIVATIONS, activate, slope
from torchrl_perf.kernels.column_sums import totals
from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.launch import dense_rows, launch

__all__ = ["backward", "forward"]

TILE = 2048
"""Entries of a tile of rows, of at least 16 rows."""
MOST_PARTS = 384


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, rows, x_row, x_column,
    SIZE: tl.constexpr, H: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    unit = tl.arange(0, UNITS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row, is_unit = row < rows, unit < H
    total = tl.zeros([ROWS, UNITS], tl.float32) + tl.load(bias_ptr + unit, mask=is_unit, other=0.0)[None, :]
    for k in tl.static_range(SIZE):
        x = tl.load(x_ptr + row * x_row + k * x_column, mask=is_row, other=0.0)
        total += x[:, None] * tl.load(weight_ptr + unit * SIZE + k, mask=is_unit, other=0.0)[None, :]
    y = activate(total, ACT, False)
    tl.store(y_ptr + row[:, None] * H + unit[None, :], y, mask=is_row[:, None] & is_unit[None, :])


@triton.jit(do_not_specialize=["rows", "share"])
def _backward_kernel(
    grad_ptr, y_ptr, x_ptr, parts_ptr, rows, share, grad_row, x_row, x_column,
    SIZE: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    unit, column = tl.arange(0, UNITS), tl.arange(0, WIDE)
    is_unit, is_column = unit < H, column < SIZE
    first = tl.program_id(0).to(tl.int64) * share
    of_weight, of_bias = tl.zeros([UNITS, WIDE], tl.float32), tl.zeros([ROWS, UNITS], tl.float32)
    for start in range(0, share, ROWS):
        place = start + tl.arange(0, ROWS)
        row = first + place
        is_row = (place < share) & (row < rows)
        mask = is_row[:, None] & is_unit[None, :]
        grad = tl.load(grad_ptr + row[:, None] * grad_row + unit[None, :], mask=mask, other=0.0)
        y = tl.load(y_ptr + row[:, None] * H + unit[None, :], mask=mask, other=0.0)
        x_at = row[:, None] * x_row + column[None, :] * x_column
        x = tl.load(x_ptr + x_at, mask=is_row[:, None] & is_column[None, :], other=0.0)
        d = grad * slope(y, y, ACT)
        of_weight = tl.dot(tl.trans(d), x, of_weight, input_precision=PRECISION)
        of_bias += d
    parts_ptr += tl.program_id(0).to(tl.int64) * H * (SIZE + 1)
    place = parts_ptr + unit[:, None] * SIZE + column[None, :]
    tl.store(place, of_weight, mask=is_unit[:, None] & is_column[None, :])
    tl.store(parts_ptr + H * SIZE + unit, tl.sum(of_bias, 0), mask=is_unit)


def forward(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    """``[B, H]`` of ``x [B, I]``.

    Args:
        x: ``[B, I]`` float32.
        weight: ``[H, I]``, contiguous.
        bias: ``[H]``, contiguous.
        activation: one of :data:`~torchrl_perf.kernels.activations.ACTIVATIONS`.
    """
    rows, (hidden, size) = len(x), weight.shape
    y, tile, warps = x.new_empty(rows, hidden), *_tile(hidden)
    constants = {"SIZE": size, "H": hidden, **tile, "ACT": ACTIVATIONS[activation]}
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    launch(_forward_kernel, grid, (x, weight, bias, y, rows, *x.stride()), constants, num_warps=warps)
    return y


def backward(grad: Tensor, y: Tensor, x: Tensor, activation: str, precision: str) -> tuple[Tensor, Tensor]:
    """Gradients of weight ``[H, I]`` and bias ``[H]``.

    Args:
        grad: of y, ``[B, H]``.
        y: what :func:`forward` gave, contiguous.
        x: input.
        activation: one whose slope follows from its value.
        precision: of the products, ``"tf32"`` or ``"ieee"``.
    """
    (rows, hidden), size, grad = y.shape, x.shape[1], dense_rows(grad)
    tile, warps = _tile(hidden)
    share = triton.cdiv(triton.cdiv(rows, MOST_PARTS), tile["ROWS"]) * tile["ROWS"]
    parts = x.new_empty(triton.cdiv(rows, share), hidden * (size + 1))
    args = grad, y, x, parts, rows, share, grad.stride(0), *x.stride()
    wide = max(16, triton.next_power_of_2(size))
    constants = {"SIZE": size, "H": hidden, "WIDE": wide, **tile, "ACT": ACTIVATIONS[activation]}
    launch(_backward_kernel, (len(parts),), args, {**constants, "PRECISION": precision}, num_warps=warps)
    of_weight, of_bias = totals(parts, hidden * size, 0)
    return of_weight.view(hidden, size), of_bias


def _tile(hidden: int) -> tuple[dict[str, int], int]:
    """Rows and units of a tile, and warps for it."""
    units = max(16, triton.next_power_of_2(hidden))
    return {"UNITS": units, "ROWS": max(16, TILE // units)}, 4 if units <= 128 else 8
