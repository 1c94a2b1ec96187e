"""Triton kernels of one step of a cell: products and gates of all rows in one launch, without a gradient.

References: :func:`torchrl_perf.functional.memory.gru.gru_cell`, :func:`torchrl_perf.functional.memory.lstm.lstm_cell`
and :func:`torchrl_perf.functional.memory.linear.min_gru_cell`.
Import this module only where Triton is.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.activations import ACTIVATIONS, activate
from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.launch import dense_rows, launch
from torchrl_perf.kernels.products import add_dot

__all__ = ["gru", "lstm", "min_gru"]

DEPTH = 64
"""Numbers of a row that a program reads at once."""
TANH = tl.constexpr(ACTIVATIONS["tanh"])


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    return activate(x, TANH, FAST)


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    """The logistic function, through :func:`_tanh`."""
    return 0.5 * _tanh(0.5 * x, FAST) + 0.5


@triton.jit
def _rows(ptr, row, row_step, column, is_row, SIZE: tl.constexpr):
    mask = is_row & (column[None, :] < SIZE)
    return tl.load(ptr + row.to(tl.int64) * row_step + column[None, :], mask=mask, other=0.0)


@triton.jit
def _times(total, a, ptr, gate, unit, column, SIZE: tl.constexpr, H: tl.constexpr, PRECISION: tl.constexpr):
    """``total + a @ w[unit, column].T`` of a gate's weight ``[H, SIZE]``."""
    mask = (unit[None, :] < H) & (column[:, None] < SIZE)
    w = tl.load(ptr + (gate * H + unit[None, :]) * SIZE + column[:, None], mask=mask, other=0.0)
    return add_dot(total, a, w, PRECISION)


@triton.jit
def _bias(ptr, gate, unit, ROWS: tl.constexpr, H: tl.constexpr, HAS_BIAS: tl.constexpr):
    """What a gate begins with, ``[ROWS, COLUMNS]``."""
    out = tl.zeros((ROWS, unit.shape[0]), dtype=tl.float32)
    if HAS_BIAS:
        out += tl.load(ptr + gate * H + unit, mask=unit < H, other=0.0)[None, :]
    return out


@triton.jit
def _biases(x_ptr, state_ptr, gate, unit, ROWS: tl.constexpr, H: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Both biases of a gate."""
    return _bias(x_ptr, gate, unit, ROWS, H, HAS_BIAS) + _bias(state_ptr, gate, unit, ROWS, H, HAS_BIAS)


@triton.jit
def _gru_kernel(
    x_ptr, state_ptr, of_x_ptr, of_state_ptr, bias_x_ptr, bias_state_ptr, out_ptr, num_rows, x_row, state_row,
    SIZE: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, OF_X: tl.constexpr, OF_STATE: tl.constexpr, FAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    unit = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_row = row < num_rows
    reset = _biases(bias_x_ptr, bias_state_ptr, 0, unit, ROWS, H, HAS_BIAS)
    update = _biases(bias_x_ptr, bias_state_ptr, 1, unit, ROWS, H, HAS_BIAS)
    new = _bias(bias_x_ptr, 2, unit, ROWS, H, HAS_BIAS)
    gate_new = _bias(bias_state_ptr, 2, unit, ROWS, H, HAS_BIAS)
    for start in range(0, SIZE, DEPTH):
        column = start + depth
        x = _rows(x_ptr, row, x_row, column, is_row, SIZE)
        reset = _times(reset, x, of_x_ptr, 0, unit, column, SIZE, H, OF_X)
        update = _times(update, x, of_x_ptr, 1, unit, column, SIZE, H, OF_X)
        new = _times(new, x, of_x_ptr, 2, unit, column, SIZE, H, OF_X)
    for start in range(0, H, DEPTH):
        column = start + depth
        state = _rows(state_ptr, row, state_row, column, is_row, H)
        reset = _times(reset, state, of_state_ptr, 0, unit, column, H, H, OF_STATE)
        update = _times(update, state, of_state_ptr, 1, unit, column, H, H, OF_STATE)
        gate_new = _times(gate_new, state, of_state_ptr, 2, unit, column, H, H, OF_STATE)
    mask = is_row & (unit[None, :] < H)
    own = tl.load(state_ptr + row.to(tl.int64) * state_row + unit[None, :], mask=mask, other=0.0)
    new = _tanh(new + _sigmoid(reset, FAST) * gate_new, FAST)
    tl.store(out_ptr + row.to(tl.int64) * H + unit[None, :], new + _sigmoid(update, FAST) * (own - new), mask=mask)


@triton.jit
def _lstm_kernel(
    x_ptr, state_ptr, cell_ptr, of_x_ptr, of_state_ptr, bias_x_ptr, bias_state_ptr, out_ptr, out_cell_ptr, num_rows,
    x_row, state_row, cell_row,
    SIZE: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, OF_X: tl.constexpr, OF_STATE: tl.constexpr, FAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    unit = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_row = row < num_rows
    into = _biases(bias_x_ptr, bias_state_ptr, 0, unit, ROWS, H, HAS_BIAS)
    forget = _biases(bias_x_ptr, bias_state_ptr, 1, unit, ROWS, H, HAS_BIAS)
    new = _biases(bias_x_ptr, bias_state_ptr, 2, unit, ROWS, H, HAS_BIAS)
    out = _biases(bias_x_ptr, bias_state_ptr, 3, unit, ROWS, H, HAS_BIAS)
    for start in range(0, SIZE, DEPTH):
        column = start + depth
        x = _rows(x_ptr, row, x_row, column, is_row, SIZE)
        into = _times(into, x, of_x_ptr, 0, unit, column, SIZE, H, OF_X)
        forget = _times(forget, x, of_x_ptr, 1, unit, column, SIZE, H, OF_X)
        new = _times(new, x, of_x_ptr, 2, unit, column, SIZE, H, OF_X)
        out = _times(out, x, of_x_ptr, 3, unit, column, SIZE, H, OF_X)
    for start in range(0, H, DEPTH):
        column = start + depth
        state = _rows(state_ptr, row, state_row, column, is_row, H)
        into = _times(into, state, of_state_ptr, 0, unit, column, H, H, OF_STATE)
        forget = _times(forget, state, of_state_ptr, 1, unit, column, H, H, OF_STATE)
        new = _times(new, state, of_state_ptr, 2, unit, column, H, H, OF_STATE)
        out = _times(out, state, of_state_ptr, 3, unit, column, H, H, OF_STATE)
    mask = is_row & (unit[None, :] < H)
    own = tl.load(cell_ptr + row.to(tl.int64) * cell_row + unit[None, :], mask=mask, other=0.0)
    cell = _sigmoid(forget, FAST) * own + _sigmoid(into, FAST) * _tanh(new, FAST)
    place = row.to(tl.int64) * H + unit[None, :]
    tl.store(out_cell_ptr + place, cell, mask=mask)
    tl.store(out_ptr + place, _sigmoid(out, FAST) * _tanh(cell, FAST), mask=mask)


@triton.jit
def _min_gru_kernel(
    x_ptr, state_ptr, of_x_ptr, bias_ptr, out_ptr, num_rows, x_row, state_row,
    SIZE: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, OF_X: tl.constexpr, OF_STATE: tl.constexpr, FAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    unit = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_row = row < num_rows
    gate, raw = _bias(bias_ptr, 0, unit, ROWS, H, HAS_BIAS), _bias(bias_ptr, 1, unit, ROWS, H, HAS_BIAS)
    for start in range(0, SIZE, DEPTH):
        column = start + depth
        x = _rows(x_ptr, row, x_row, column, is_row, SIZE)
        gate = _times(gate, x, of_x_ptr, 0, unit, column, SIZE, H, OF_X)
        raw = _times(raw, x, of_x_ptr, 1, unit, column, SIZE, H, OF_X)
    mask = is_row & (unit[None, :] < H)
    own = tl.load(state_ptr + row.to(tl.int64) * state_row + unit[None, :], mask=mask, other=0.0)
    # never the hardware's tanh: a gate of 1e-4 keeps a state for ten thousand steps, an error of 1e-4 does not
    candidate = tl.where(raw >= 0.0, raw + 0.5, _sigmoid(raw, False))
    new = own + _sigmoid(gate, False) * (candidate - own)
    tl.store(out_ptr + row.to(tl.int64) * H + unit[None, :], new, mask=mask)


def _plan(x: Tensor, hidden: int, has_bias: bool, half: bool) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs and constants of a launch: few rows and units a program until that fills a GPU, more of them then."""
    num_rows, size = x.shape
    rows, units = (16, 16) if num_rows < 1024 else (32, 16) if num_rows < 2**14 else (64, 32)
    constants = {"SIZE": size, "H": hidden, "ROWS": rows, "COLUMNS": units, "DEPTH": DEPTH}
    # an input may be a raw observation, beyond what float16 holds; a state lies within 1
    products = {"OF_X": "tf32", "OF_STATE": "fp16"} if half else {"OF_X": "ieee", "OF_STATE": "ieee"}
    flags = {"HAS_BIAS": has_bias, **products, "FAST": half}
    return (triton.cdiv(num_rows, rows), triton.cdiv(hidden, units)), {**constants, **flags}


def gru(
    x: Tensor, state: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None, bias_hh: Tensor | None,
    *, half: bool = True,
) -> Tensor:  # fmt: skip
    """The state h of this step ``[N, H]``; all float32.

    Args:
        x: ``[N, I]``.
        state: ``[N, H]``.
        weight_ih: ``[3 H, I]``.
        weight_hh: ``[3 H, H]``.
        bias_ih: ``[3 H]``, or None.
        bias_hh: None where ``bias_ih`` is.
        half: whether products with the state take float16 operands, those with the input TF32, and gates the
            hardware's tanh; else all is float32.
    """
    x, state = dense_rows(x), dense_rows(state)
    weight_ih, weight_hh, hidden = weight_ih.contiguous(), weight_hh.contiguous(), weight_hh.shape[1]
    out = state.new_empty(len(x), hidden)
    biases = (weight_ih, weight_hh) if bias_ih is None else (bias_ih, bias_hh)
    grid, constants = _plan(x, hidden, bias_ih is not None, half)
    args = (x, state, weight_ih, weight_hh, *biases, out, len(x), x.stride(0), state.stride(0))
    launch(_gru_kernel, grid, args, constants, num_warps=4, num_stages=2)
    return out


def lstm(
    x: Tensor, state: Tensor, cell: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None,
    bias_hh: Tensor | None, *, half: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The states h and c of this step ``[N, H]``; arguments as those of :func:`gru`, with c of the step before."""
    x, state, cell = dense_rows(x), dense_rows(state), dense_rows(cell)
    weight_ih, weight_hh, hidden = weight_ih.contiguous(), weight_hh.contiguous(), weight_hh.shape[1]
    out, out_cell = state.new_empty(len(x), hidden), state.new_empty(len(x), hidden)
    biases = (weight_ih, weight_hh) if bias_ih is None else (bias_ih, bias_hh)
    grid, constants = _plan(x, hidden, bias_ih is not None, half)
    strides = x.stride(0), state.stride(0), cell.stride(0)
    args = (x, state, cell, weight_ih, weight_hh, *biases, out, out_cell, len(x), *strides)
    launch(_lstm_kernel, grid, args, constants, num_warps=4, num_stages=2)
    return out, out_cell


def min_gru(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *, half: bool = True) -> Tensor:
    """The state h of this step ``[N, H]``; all float32.

    Args:
        x: ``[N, I]``.
        state: ``[N, H]``.
        weight: of gate and candidate, ``[2 H, I]``.
        bias: ``[2 H]``, or None.
        half: whether products are in TF32; else all is float32.
    """
    x, state, weight = dense_rows(x), dense_rows(state), weight.contiguous()
    hidden, out = state.shape[1], state.new_empty(state.shape)
    grid, constants = _plan(x, hidden, bias is not None, half)
    args = x, state, weight, weight if bias is None else bias, out, len(x), x.stride(0), state.stride(0)
    launch(_min_gru_kernel, grid, args, constants, num_warps=4, num_stages=2)
    return out
