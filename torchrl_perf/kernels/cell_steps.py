"""Triton kernels of one step of a gated cell: products and gates of all rows in one launch, without a gradient.

References: :func:`torchrl_perf.functional.memory.gru.gru_cell`, :func:`torchrl_perf.functional.memory.lstm.lstm_cell`.
Import this module only where Triton is.
"""

import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.launch import launch

__all__ = ["gru", "lstm"]

DEPTH = 64
"""Numbers of a row that a program reads at once."""


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    """FAST is the hardware's instruction, as exact as a TF32 product."""
    if FAST:
        out = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        out = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return out


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    """The logistic function, through :func:`_tanh`."""
    return 0.5 * _tanh(0.5 * x, FAST) + 0.5


@triton.jit
def _dot(a, b, HALF: tl.constexpr):
    """``a @ b`` with sums in float32."""
    if HALF:  # noqa: SIM108 - Triton compiles one branch of an `if`, both of a ternary
        out = tl.dot(a, b)
    else:
        out = tl.dot(a, b, input_precision="ieee")
    return out


@triton.jit
def _rows(ptr, row, row_step, column, mask, HALF: tl.constexpr):
    out = tl.load(ptr + row.to(tl.int64) * row_step + column, mask=mask, other=0.0)
    if HALF:
        out = out.to(tl.float16)
    return out


@triton.jit
def _columns(ptr, gate, unit, column, SIZE: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr):
    """Rows ``unit`` of a gate's weight ``[H, SIZE]``, as columns ``[DEPTH, COLUMNS]``."""
    mask = (unit[None, :] < H) & (column[:, None] < SIZE)
    out = tl.load(ptr + (gate * H + unit[None, :]) * SIZE + column[:, None], mask=mask, other=0.0)
    if HALF:
        out = out.to(tl.float16)
    return out


@triton.jit
def _gate_bias(ptr, gate, unit, H: tl.constexpr, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        out = tl.load(ptr + gate * H + unit, mask=unit < H, other=0.0)[None, :]
    else:
        out = tl.zeros((1, unit.shape[0]), dtype=tl.float32)
    return out


@triton.jit
def _gru_kernel(
    x_ptr, state_ptr, of_x_ptr, of_state_ptr, bias_x_ptr, bias_state_ptr, out_ptr, num_rows, x_row, state_row,
    SIZE: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, HALF: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    unit = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_row = row < num_rows
    reset = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + (
        _gate_bias(bias_x_ptr, 0, unit, H, HAS_BIAS) + _gate_bias(bias_state_ptr, 0, unit, H, HAS_BIAS)
    )
    update = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + (
        _gate_bias(bias_x_ptr, 1, unit, H, HAS_BIAS) + _gate_bias(bias_state_ptr, 1, unit, H, HAS_BIAS)
    )
    new = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + _gate_bias(bias_x_ptr, 2, unit, H, HAS_BIAS)
    gate_new = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + _gate_bias(bias_state_ptr, 2, unit, H, HAS_BIAS)
    for start in range(0, SIZE, DEPTH):
        column = start + depth
        x = _rows(x_ptr, row, x_row, column[None, :], is_row & (column[None, :] < SIZE), HALF)
        reset += _dot(x, _columns(of_x_ptr, 0, unit, column, SIZE, H, HALF), HALF)
        update += _dot(x, _columns(of_x_ptr, 1, unit, column, SIZE, H, HALF), HALF)
        new += _dot(x, _columns(of_x_ptr, 2, unit, column, SIZE, H, HALF), HALF)
    for start in range(0, H, DEPTH):
        column = start + depth
        state = _rows(state_ptr, row, state_row, column[None, :], is_row & (column[None, :] < H), HALF)
        reset += _dot(state, _columns(of_state_ptr, 0, unit, column, H, H, HALF), HALF)
        update += _dot(state, _columns(of_state_ptr, 1, unit, column, H, H, HALF), HALF)
        gate_new += _dot(state, _columns(of_state_ptr, 2, unit, column, H, H, HALF), HALF)
    mask = is_row & (unit[None, :] < H)
    own = tl.load(state_ptr + row.to(tl.int64) * state_row + unit[None, :], mask=mask, other=0.0)
    new = _tanh(new + _sigmoid(reset, FAST) * gate_new, FAST)
    tl.store(out_ptr + row.to(tl.int64) * H + unit[None, :], new + _sigmoid(update, FAST) * (own - new), mask=mask)


@triton.jit
def _lstm_kernel(
    x_ptr, state_ptr, cell_ptr, of_x_ptr, of_state_ptr, bias_x_ptr, bias_state_ptr, out_ptr, out_cell_ptr, num_rows,
    x_row, state_row, cell_row,
    SIZE: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, HALF: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    unit = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_row = row < num_rows
    into = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + (
        _gate_bias(bias_x_ptr, 0, unit, H, HAS_BIAS) + _gate_bias(bias_state_ptr, 0, unit, H, HAS_BIAS)
    )
    forget = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + (
        _gate_bias(bias_x_ptr, 1, unit, H, HAS_BIAS) + _gate_bias(bias_state_ptr, 1, unit, H, HAS_BIAS)
    )
    new = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + (
        _gate_bias(bias_x_ptr, 2, unit, H, HAS_BIAS) + _gate_bias(bias_state_ptr, 2, unit, H, HAS_BIAS)
    )
    out = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + (
        _gate_bias(bias_x_ptr, 3, unit, H, HAS_BIAS) + _gate_bias(bias_state_ptr, 3, unit, H, HAS_BIAS)
    )
    for start in range(0, SIZE, DEPTH):
        column = start + depth
        x = _rows(x_ptr, row, x_row, column[None, :], is_row & (column[None, :] < SIZE), HALF)
        into += _dot(x, _columns(of_x_ptr, 0, unit, column, SIZE, H, HALF), HALF)
        forget += _dot(x, _columns(of_x_ptr, 1, unit, column, SIZE, H, HALF), HALF)
        new += _dot(x, _columns(of_x_ptr, 2, unit, column, SIZE, H, HALF), HALF)
        out += _dot(x, _columns(of_x_ptr, 3, unit, column, SIZE, H, HALF), HALF)
    for start in range(0, H, DEPTH):
        column = start + depth
        state = _rows(state_ptr, row, state_row, column[None, :], is_row & (column[None, :] < H), HALF)
        into += _dot(state, _columns(of_state_ptr, 0, unit, column, H, H, HALF), HALF)
        forget += _dot(state, _columns(of_state_ptr, 1, unit, column, H, H, HALF), HALF)
        new += _dot(state, _columns(of_state_ptr, 2, unit, column, H, H, HALF), HALF)
        out += _dot(state, _columns(of_state_ptr, 3, unit, column, H, H, HALF), HALF)
    mask = is_row & (unit[None, :] < H)
    own = tl.load(cell_ptr + row.to(tl.int64) * cell_row + unit[None, :], mask=mask, other=0.0)
    cell = _sigmoid(forget, FAST) * own + _sigmoid(into, FAST) * _tanh(new, FAST)
    place = row.to(tl.int64) * H + unit[None, :]
    tl.store(out_cell_ptr + place, cell, mask=mask)
    tl.store(out_ptr + place, _sigmoid(out, FAST) * _tanh(cell, FAST), mask=mask)


def _dense(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _plan(x: Tensor, hidden: int, has_bias: bool, half: bool) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """Programs and constants of a launch: few rows and units a program until that fills a GPU, more of them then."""
    num_rows, size = x.shape
    rows, units = (16, 16) if num_rows < 1024 else (32, 16) if num_rows < 2**14 else (64, 32)
    constants = {"SIZE": size, "H": hidden, "ROWS": rows, "COLUMNS": units, "DEPTH": DEPTH}
    flags = {"HAS_BIAS": has_bias, "HALF": half, "FAST": half}
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
        half: whether products take float16 operands, and gates the hardware's tanh; else all is float32.
    """
    x, state = _dense(x), _dense(state)
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
    x, state, cell = _dense(x), _dense(state), _dense(cell)
    weight_ih, weight_hh, hidden = weight_ih.contiguous(), weight_hh.contiguous(), weight_hh.shape[1]
    out, out_cell = state.new_empty(len(x), hidden), state.new_empty(len(x), hidden)
    biases = (weight_ih, weight_hh) if bias_ih is None else (bias_ih, bias_hh)
    grid, constants = _plan(x, hidden, bias_ih is not None, half)
    strides = x.stride(0), state.stride(0), cell.stride(0)
    args = (x, state, cell, weight_ih, weight_hh, *biases, out, out_cell, len(x), *strides)
    launch(_lstm_kernel, grid, args, constants, num_warps=4, num_stages=2)
    return out, out_cell
