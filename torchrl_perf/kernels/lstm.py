"""Gluon kernels of long short-term memory: all steps of a sequence, with resets, in one launch a direction.

Reference: :mod:`torchrl_perf.functional.memory.lstm`; the plan is that of :mod:`torchrl_perf.kernels.gru`. Four weights
of 128 x 128 numbers are more than the registers hold, so that some lie in shared memory.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from torchrl_perf.kernels.cells import (
    WARPS,
    bias_row,
    largest_of,
    load4,
    operand,
    place,
    rows_of,
    sigmoid,
    store4,
    tanh,
    widths,
)
from torchrl_perf.kernels.column_sums import column_sums
from torchrl_perf.kernels.launch import dense_rows, launch

__all__ = ["backward", "forward"]


@gluon.jit(do_not_specialize=["num_envs", "steps", "rows"])  # 1 would be no tensor
def _forward_kernel(
    inputs_ptr, state_ptr, cell_ptr, begins_ptr, weight_ptr, bias_ptr, states_ptr, cells_ptr, kept_ptr, num_envs, steps,
    rows, in_row, in_step, begin_row, begin_step,
    H: gl.constexpr, PAD: gl.constexpr, BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr, KEEPS: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], warps_per_cta=[1, gl.num_warps()], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    turned: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[0, 1])
    of_into = operand(weight_ptr, 0, True, H, PAD, right)
    of_forget = operand(weight_ptr, 1, True, H, PAD, right)
    of_new = gl.allocate_shared_memory(gl.float16, [PAD, PAD], turned, operand(weight_ptr, 2, True, H, PAD, right))
    of_out = gl.allocate_shared_memory(gl.float16, [PAD, PAD], turned, operand(weight_ptr, 3, True, H, PAD, right))
    exchanged = gl.allocate_shared_memory(gl.float16, [BLOCK, PAD], shared)
    bias_into = bias_row(bias_ptr, 0, HAS_BIAS, H, PAD, mma)
    bias_forget = bias_row(bias_ptr, 1, HAS_BIAS, H, PAD, mma)
    bias_new = bias_row(bias_ptr, 2, HAS_BIAS, H, PAD, mma)
    bias_out = bias_row(bias_ptr, 3, HAS_BIAS, H, PAD, mma)
    first, i, h, is_row, mask = place(rows, num_envs, H, PAD, BLOCK, mma)
    r, out_row = i[:, None], first * steps * H
    at_input, at_begin, at_state, at_kept = r * in_row + h, i * begin_row, r * (steps * H) + h, r * (4 * H) + h
    kept_ptr += first * 4 * H
    begins_ptr += first * begin_row
    inputs_ptr += first * in_row
    state = gl.load(state_ptr + first * H + r * H + h, mask=mask, other=0.0)
    cell = gl.load(cell_ptr + first * H + r * H + h, mask=mask, other=0.0)
    begins = gl.load(begins_ptr + at_begin, mask=is_row, other=0)
    x_into, x_forget, x_new, x_out = load4(inputs_ptr + at_input, mask, H)
    for t in range(steps):
        is_first = (begins != 0)[:, None]
        state = gl.where(is_first, 0.0, state)
        cell = gl.where(is_first, 0.0, cell)
        exchanged.store(state.to(gl.float16))
        begins_ptr += begin_step
        inputs_ptr += in_step
        begins = gl.load(begins_ptr + at_begin, mask=is_row & (t + 1 < steps), other=0)
        next_into, next_forget, next_new, next_out = load4(inputs_ptr + at_input, mask & (t + 1 < steps), H)
        known = exchanged.load(left)
        into = sigmoid(mma_v2(known, of_into, x_into + bias_into))
        forget = sigmoid(mma_v2(known, of_forget, x_forget + bias_forget))
        new = tanh(mma_v2(known, of_new.load(right), x_new + bias_new))
        out = sigmoid(mma_v2(known, of_out.load(right), x_out + bias_out))
        cell = forget * cell + into * new
        state = out * tanh(cell)
        gl.store(states_ptr + out_row + at_state, state, mask=mask)
        gl.store(cells_ptr + out_row + at_state, cell, mask=mask)
        out_row += H
        if KEEPS:
            store4(kept_ptr + at_kept, into, forget, new, out, mask, H)
            kept_ptr += num_envs.to(gl.int64) * 4 * H
        x_into, x_forget, x_new, x_out = next_into, next_forget, next_new, next_out


@gluon.jit
def _both(states_ptr, cells_ptr, at, mask):
    """The states h and c at some place."""
    state = gl.load(states_ptr + at, mask=mask, other=0.0)
    cell = gl.load(cells_ptr + at, mask=mask, other=0.0)
    return state, cell


@gluon.jit
def _slopes(grad, of_cell, cell, past, is_first, into, forget, new, out):
    """Gradients of c of the step before, ``past``, and of the four gates."""
    squashed = tanh(cell)
    of_cell += grad * out * (1.0 - squashed * squashed)
    d_into = of_cell * new * into * (1.0 - into)
    d_forget = of_cell * gl.where(is_first, 0.0, past) * forget * (1.0 - forget)
    d_new, d_out = of_cell * into * (1.0 - new * new), grad * squashed * out * (1.0 - out)
    return gl.where(is_first, 0.0, of_cell * forget), d_into, d_forget, d_new, d_out


@gluon.jit
def _exchange(exchanged, a, b, c, d, scale):
    """Gradients of the gates for the other warps, scaled: float16 has no small numbers."""
    exchanged.index(0).store((a * scale).to(gl.float16))
    exchanged.index(1).store((b * scale).to(gl.float16))
    exchanged.index(2).store((c * scale).to(gl.float16))
    exchanged.index(3).store((d * scale).to(gl.float16))


@gluon.jit
def _product(exchanged, by_into, weights, none, left: gl.constexpr, right: gl.constexpr):
    """What h before the step gets of the gates' gradients."""
    out = mma_v2(exchanged.index(0).load(left), by_into, none)
    out = mma_v2(exchanged.index(1).load(left), weights.index(0).load(right), out)
    out = mma_v2(exchanged.index(2).load(left), weights.index(1).load(right), out)
    return mma_v2(exchanged.index(3).load(left), weights.index(2).load(right), out)


@gluon.jit(do_not_specialize=["num_envs", "steps", "rows"])
def _backward_kernel(
    grad_ptr, grad_cell_ptr, largest_ptr, states_ptr, cells_ptr, kept_ptr, state_ptr, cell_ptr, begins_ptr, weight_ptr,
    of_inputs_ptr, before_ptr, of_state_ptr, of_cell_ptr, num_envs, steps, rows, grad_row, grad_step, of_cell_row,
    of_cell_step, begin_row, begin_step,
    H: gl.constexpr, PAD: gl.constexpr, BLOCK: gl.constexpr, OF_CELLS: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], warps_per_cta=[1, gl.num_warps()], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    weights = gl.allocate_shared_memory(gl.float16, [3, PAD, PAD], shared)
    weights.index(0).store(operand(weight_ptr, 1, False, H, PAD, right))
    weights.index(1).store(operand(weight_ptr, 2, False, H, PAD, right))
    weights.index(2).store(operand(weight_ptr, 3, False, H, PAD, right))
    by_into = operand(weight_ptr, 0, False, H, PAD, right)
    exchanged = gl.allocate_shared_memory(gl.float16, [4, BLOCK, PAD], shared)
    first, i, h, is_row, mask = place(rows, num_envs, H, PAD, BLOCK, mma)
    r, t = i[:, None], (steps - 1).to(gl.int64)
    grad_ptr += first * grad_row + t * grad_step + r * grad_row + h
    begins_ptr += first * begin_row + t * begin_step + i * begin_row
    kept_ptr += (t * num_envs + first) * 4 * H
    out_row, at_kept = first * steps + t, r * (4 * H) + h
    at_state, at_first = r * (steps * H) + h, first * H + r * H + h
    largest = gl.maximum(gl.load(largest_ptr + first + i, mask=is_row, other=1.0), 1e-30)[:, None]
    scale, none = 1.0 / largest, gl.zeros([BLOCK, PAD], gl.float32, mma)
    carried, of_cell = none, none
    grad = gl.load(grad_ptr, mask=mask, other=0.0)
    begins = gl.load(begins_ptr, mask=is_row, other=0)
    cell = gl.load(cells_ptr + out_row * H + at_state, mask=mask, other=0.0)
    before, past = _both(states_ptr, cells_ptr, (out_row - 1) * H + at_state, mask & (steps > 1))
    into, forget, new, out = load4(kept_ptr + at_kept, mask, H)
    for back in range(steps):
        if back + 1 == steps:
            before, past = _both(state_ptr, cell_ptr, at_first, mask)
        if OF_CELLS:
            at = first * of_cell_row + (steps - 1 - back).to(gl.int64) * of_cell_step + r * of_cell_row + h
            of_cell += gl.load(grad_cell_ptr + at, mask=mask, other=0.0)
        is_first = (begins != 0)[:, None]
        of_cell, a, b, c, d = _slopes(grad + carried, of_cell, cell, past, is_first, into, forget, new, out)
        _exchange(exchanged, a, b, c, d, scale)
        store4(of_inputs_ptr + out_row * 4 * H + r * (steps * 4 * H) + h, a, b, c, d, mask, H)
        gl.store(before_ptr + out_row * H + at_state, gl.where(is_first, 0.0, before), mask=mask)
        grad_ptr -= grad_step
        begins_ptr -= begin_step
        kept_ptr -= num_envs.to(gl.int64) * 4 * H
        out_row -= 1
        grad = gl.load(grad_ptr, mask=mask & (back + 1 < steps), other=0.0)
        begins = gl.load(begins_ptr, mask=is_row & (back + 1 < steps), other=0)
        cell = past
        before, past = _both(states_ptr, cells_ptr, (out_row - 1) * H + at_state, mask & (back + 2 < steps))
        into, forget, new, out = load4(kept_ptr + at_kept, mask & (back + 1 < steps), H)
        carried = gl.where(is_first, 0.0, _product(exchanged, by_into, weights, none, left, right) * largest)
    gl.store(of_state_ptr + at_first, carried, mask=mask)
    gl.store(of_cell_ptr + at_first, of_cell, mask=mask)


def forward(
    inputs: Tensor, state: Tensor, cell: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """States h and c ``[N, T, H]``, and the gates i, f, g and o, ``[T, N, 4 H]`` or ``[0]``.

    Args:
        inputs: ``[N, T, 4 H]`` float32.
        state: h before the first step, ``[N, H]`` float32, contiguous.
        cell: c likewise.
        begins: bool ``[N, T]``.
        weight: ``[4 H, H]`` float32.
        bias: ``[4 H]``, contiguous, or None.
        keeps: whether a backward pass follows.
    """
    (num_envs, steps, _), hidden = inputs.shape, weight.shape[1]
    inputs, weight, rows = dense_rows(inputs), weight.contiguous(), rows_of(inputs)
    states, cells = (inputs.new_empty(num_envs, steps, hidden) for _ in range(2))
    kept = inputs.new_empty((steps, num_envs, 4 * hidden) if keeps else (0,))
    strides = inputs.stride(0), inputs.stride(1), begins.stride(0), begins.stride(1)
    parameters, begins = (weight, weight if bias is None else bias), begins.view(torch.uint8)
    args = (inputs, state, cell, begins, *parameters, states, cells, kept, num_envs, steps, rows, *strides)
    constants = {**widths(hidden), "HAS_BIAS": bias is not None, "KEEPS": keeps}
    launch(_forward_kernel, (triton.cdiv(num_envs, rows),), args, constants, num_warps=WARPS)
    return states, cells, kept


def backward(
    grad: Tensor, grad_cell: Tensor | None, known: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of inputs ``[N, T, 4 H]``, which are those of the gates, of both first states, weight and biases.

    Args:
        grad: of h ``[N, T, H]``.
        grad_cell: of c, or None for 0.
        known: h and c after each step and the gates, as :func:`forward` gives them, and what it was given: h and c
            before the first step, ``begins`` and the weight.
    """
    states, cells, kept, state, cell, begins, weight = known
    num_envs, steps, hidden = states.shape
    grad, weight, rows = dense_rows(grad), weight.contiguous(), rows_of(states)
    of_cells = grad if grad_cell is None else dense_rows(grad_cell)
    largest = largest_of(grad) if grad_cell is None else torch.maximum(largest_of(grad), largest_of(grad_cell))
    of_inputs, before = states.new_empty(num_envs, steps, 4 * hidden), torch.empty_like(states)
    outs = of_inputs, before, torch.empty_like(state), torch.empty_like(cell)
    strides = [each.stride(dim) for each in (grad, of_cells, begins) for dim in (0, 1)]
    read = states, cells, kept, state, cell, begins.view(torch.uint8), weight
    args = (grad, of_cells, largest, *read, *outs, num_envs, steps, rows, *strides)
    constants = {**widths(hidden), "OF_CELLS": grad_cell is not None}
    launch(_backward_kernel, (triton.cdiv(num_envs, rows),), args, constants, num_warps=WARPS)
    of_weight = of_inputs.flatten(0, 1).t() @ before.flatten(0, 1)
    return of_inputs, *outs[2:], of_weight, *column_sums(of_inputs, None, 4 * hidden)
