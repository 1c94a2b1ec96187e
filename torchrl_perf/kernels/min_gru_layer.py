"""Triton kernels of a minGRU layer: the map of its inputs, gates, resets and the scan, in one launch a direction.

Reference: :func:`torchrl_perf.functional.memory.linear.min_gru_layer`. A program walks through time with all units of
an env, a tile of steps at a time, and keeps the weights on chip: what the map gives, ``[N, T, 2 H]``, never lies in
memory. Backwards it is computed again from the input, and a program sums the gradient of the weights over its envs; a
second launch sums those of all programs, in an order that does not change.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels import processors
from torchrl_perf.kernels.column_sums import totals
from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.gates import sigmoid
from torchrl_perf.kernels.launch import dense_rows, launch
from torchrl_perf.kernels.scan import scan_tile

__all__ = ["backward", "forward"]

STEPS = 16


@triton.jit
def _weight(ptr, half, unit, column, SIZE: tl.constexpr, H: tl.constexpr):
    """The rows of gates (half 0) or candidates (1), ``[units, columns]``, with zeros around."""
    mask = (unit < H)[:, None] & (column < SIZE)[None, :]
    return tl.load(ptr + (half * H + unit)[:, None] * SIZE + column[None, :], mask=mask, other=0.0)


@triton.jit
def _bias(ptr, half, unit, H: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A half of the bias as a column ``[units, 1]``."""
    out = tl.zeros([unit.shape[0]], tl.float32)
    if HAS_BIAS:
        out += tl.load(ptr + half * H + unit, mask=unit < H, other=0.0)
    return out[:, None]


@triton.jit
def _inputs(ptr, t, column, is_step, x_step, SIZE: tl.constexpr):
    """Inputs of some steps, ``[columns, steps]``."""
    at = t.to(tl.int64)[None, :] * x_step + column[:, None]
    return tl.load(ptr + at, mask=is_step[None, :] & (column < SIZE)[:, None], other=0.0)


@triton.jit(do_not_specialize=["steps"])  # 1 would be no tensor
def _forward_kernel(
    x_ptr, initial_ptr, begins_ptr, weight_ptr, bias_ptr, states_ptr, steps, x_row, x_step, begin_row, begin_step,
    SIZE: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr, STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    unit, column = tl.arange(0, UNITS), tl.arange(0, WIDE)
    of_gate, of_raw = _weight(weight_ptr, 0, unit, column, SIZE, H), _weight(weight_ptr, 1, unit, column, SIZE, H)
    bias_gate, bias_raw = _bias(bias_ptr, 0, unit, H, HAS_BIAS), _bias(bias_ptr, 1, unit, H, HAS_BIAS)
    x_ptr += row * x_row
    begins_ptr += row * begin_row
    states_ptr += row * steps * H
    carry = tl.load(initial_ptr + row * H + unit, mask=unit < H, other=0.0)
    for start in range(0, steps, STEPS):
        t = start + tl.arange(0, STEPS)
        is_step = t < steps
        x = _inputs(x_ptr, t, column, is_step, x_step, SIZE)
        first = (tl.load(begins_ptr + t * begin_step, mask=is_step, other=0) != 0)[None, :]
        update = sigmoid(tl.dot(of_gate, x, input_precision=PRECISION) + bias_gate)
        raw = tl.dot(of_raw, x, input_precision=PRECISION) + bias_raw
        decay = tl.where(is_step[None, :], tl.where(first, 0.0, 1.0 - update), 1.0)
        value = tl.where(is_step[None, :], update * tl.where(raw >= 0.0, raw + 0.5, sigmoid(raw)), 0.0)
        solved, carry = scan_tile(decay, value, carry, False, STEPS)
        place = states_ptr + t.to(tl.int64)[None, :] * H + unit[:, None]
        tl.store(place, solved, mask=is_step[None, :] & (unit < H)[:, None])


@triton.jit(do_not_specialize=["num_envs", "steps", "rows"])
def _backward_kernel(
    grad_ptr, states_ptr, x_ptr, initial_ptr, begins_ptr, weight_ptr, bias_ptr, of_x_ptr, of_initial_ptr, parts_ptr,
    num_envs, steps, rows, grad_row, grad_step, x_row, x_step, begin_row, begin_step,
    SIZE: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr, STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    begin = tl.program_id(0).to(tl.int64) * rows
    unit, column = tl.arange(0, UNITS), tl.arange(0, WIDE)
    is_unit = (unit < H)[:, None]
    of_gate, of_raw = _weight(weight_ptr, 0, unit, column, SIZE, H), _weight(weight_ptr, 1, unit, column, SIZE, H)
    bias_gate, bias_raw = _bias(bias_ptr, 0, unit, H, HAS_BIAS), _bias(bias_ptr, 1, unit, H, HAS_BIAS)
    by_gate, by_raw = tl.zeros([UNITS, WIDE], tl.float32), tl.zeros([UNITS, WIDE], tl.float32)
    sum_gate, sum_raw = tl.zeros([UNITS], tl.float32), tl.zeros([UNITS], tl.float32)
    tiles = tl.cdiv(steps, STEPS)
    for row in range(begin, tl.minimum(begin + rows, num_envs)):
        x_row_ptr, begins_row_ptr = x_ptr + row * x_row, begins_ptr + row * begin_row
        carry = tl.zeros([UNITS], tl.float32)
        for tile in range(tiles):
            t = (tiles - tile) * STEPS - 1 - tl.arange(0, STEPS)  # backwards, so that the scan runs forwards
            is_step, follows = t < steps, t + 1 < steps
            mask = is_step[None, :] & is_unit
            # a gradient comes back through the gate of the step behind it
            following = _inputs(x_row_ptr, t + 1, column, follows, x_step, SIZE)
            next_first = (tl.load(begins_row_ptr + (t + 1) * begin_step, mask=follows, other=0) != 0)[None, :]
            next_update = sigmoid(tl.dot(of_gate, following, input_precision=PRECISION) + bias_gate)
            decay = tl.where(follows[None, :], tl.where(next_first, 0.0, 1.0 - next_update), 1.0)
            at = t.to(tl.int64)[None, :]
            grad = tl.load(grad_ptr + row * grad_row + at * grad_step + unit[:, None], mask=mask, other=0.0)
            grad, carry = scan_tile(decay, grad, carry, False, STEPS)
            x = _inputs(x_row_ptr, t, column, is_step, x_step, SIZE)
            first = (tl.load(begins_row_ptr + t * begin_step, mask=is_step, other=0) != 0)[None, :]
            update = sigmoid(tl.dot(of_gate, x, input_precision=PRECISION) + bias_gate)
            raw = tl.dot(of_raw, x, input_precision=PRECISION) + bias_raw
            known = states_ptr + (row * steps + at - 1) * H + unit[:, None]
            before = tl.load(known, mask=mask & (t > 0)[None, :], other=0.0)
            origin = initial_ptr + row * H + unit[:, None] + 0 * at
            before += tl.load(origin, mask=mask & (t == 0)[None, :], other=0.0)
            before = tl.where(first, 0.0, before)
            low = sigmoid(raw)
            candidate = tl.where(raw >= 0.0, raw + 0.5, low)
            d_gate = grad * (candidate - before) * update * (1.0 - update)
            d_raw = grad * update * tl.where(raw >= 0.0, 1.0, low * (1.0 - low))
            of_x = tl.dot(tl.trans(d_gate), of_gate, input_precision=PRECISION)
            of_x = tl.dot(tl.trans(d_raw), of_raw, of_x, input_precision=PRECISION)
            place = of_x_ptr + (row * steps + t.to(tl.int64))[:, None] * SIZE + column[None, :]
            tl.store(place, of_x, mask=is_step[:, None] & (column < SIZE)[None, :])
            turned = tl.trans(x)
            by_gate = tl.dot(d_gate, turned, by_gate, input_precision=PRECISION)
            by_raw = tl.dot(d_raw, turned, by_raw, input_precision=PRECISION)
            sum_gate, sum_raw = sum_gate + tl.sum(d_gate, 1), sum_raw + tl.sum(d_raw, 1)
            origin = of_initial_ptr + row * H + unit[:, None] + 0 * at
            tl.store(origin, tl.where(first, 0.0, grad * (1.0 - update)), mask=mask & (t == 0)[None, :])
    parts_ptr += tl.program_id(0).to(tl.int64) * 2 * H * (SIZE + 1)
    part = parts_ptr + unit[:, None] * SIZE + column[None, :]
    is_weight = is_unit & (column < SIZE)[None, :]
    tl.store(part, by_gate, mask=is_weight)
    tl.store(part + H * SIZE, by_raw, mask=is_weight)
    tl.store(parts_ptr + 2 * H * SIZE + unit, sum_gate, mask=unit < H)
    tl.store(parts_ptr + 2 * H * SIZE + H + unit, sum_raw, mask=unit < H)


def forward(x: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """States ``[N, T, H]``.

    Args:
        x: ``[N, T, I]`` float32.
        initial: ``[N, H]`` float32, contiguous.
        begins: bool ``[N, T]``.
        weight: of gates and candidates, ``[2 H, I]``, contiguous.
        bias: ``[2 H]``, contiguous, or None.
        precision: of the matrix products, ``"tf32"`` or ``"ieee"``.
    """
    (num_envs, steps, _), hidden = x.shape, initial.shape[1]
    x, states = dense_rows(x), x.new_empty(num_envs, steps, hidden)
    strides = x.stride(0), x.stride(1), begins.stride(0), begins.stride(1)
    args = x, initial, begins.view(torch.uint8), weight, weight if bias is None else bias, states, steps, *strides
    launch(_forward_kernel, (num_envs,), args, _constants(weight, bias, precision), num_warps=4)
    return states


def backward(
    grad: Tensor, states: Tensor, x: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x ``[N, T, I]``, the first state ``[N, H]``, weight and bias.

    Args:
        grad: of the states ``[N, T, H]``; the other arguments are as :func:`forward` takes and gives them.
        states: after each step.
        x: inputs.
        initial: the first state.
        begins: True where an episode begins.
        weight: of gates and candidates.
        bias: of both, or None; its gradient comes in any case.
        precision: of the matrix products.
    """
    num_envs, steps, hidden = states.shape
    grad, x = dense_rows(grad), dense_rows(x)
    rows = triton.cdiv(num_envs, processors(x.device))  # registers and shared memory leave room for one program each
    programs, width = triton.cdiv(num_envs, rows), weight.numel() + 2 * hidden
    of_x, of_initial = x.new_empty(x.shape), torch.empty_like(initial)
    parts = x.new_empty(programs, width)
    strides = [each.stride(dim) for each in (grad, x, begins) for dim in (0, 1)]
    args = (
        grad, states, x, initial, begins.view(torch.uint8), weight, weight if bias is None else bias, of_x, of_initial,
        parts, num_envs, steps, rows, *strides,
    )  # fmt: skip
    launch(_backward_kernel, (programs,), args, _constants(weight, bias, precision), num_warps=8)
    of_weight, of_bias = totals(parts, weight.numel(), 0)
    return of_x, of_initial, of_weight.view(weight.shape), of_bias


def _constants(weight: Tensor, bias: Tensor | None, precision: str) -> dict[str, int | str]:
    hidden, size = len(weight) // 2, weight.shape[1]
    wide, units = (max(16, triton.next_power_of_2(each)) for each in (size, hidden))
    sizes = {"SIZE": size, "H": hidden, "WIDE": wide, "UNITS": units, "STEPS": STEPS}
    return {**sizes, "HAS_BIAS": bias is not None, "PRECISION": precision}
