"""Triton kernels of long short-term memory: all steps of a sequence, with resets, in one launch a direction.

Reference: :mod:`torchrl_perf.functional.memory.lstm`; the plan is that of :mod:`torchrl_perf.kernels.gru`. Import this
module only where Triton is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.cells import (
    BLOCK,
    WARPS,
    dense_rows,
    direct_kernels,
    dot,
    largest_of,
    rows_of,
    scale_of,
    sigmoid,
    tanh,
    vector,
    weight_block,
    widths,
)
from torchrl_perf.kernels.launch import launch

__all__ = ["backward", "forward"]


@triton.jit(do_not_specialize=["num_envs", "steps", "rows"])  # 1 would be no tensor
def _forward_kernel(
    inputs_ptr, state_ptr, cell_ptr, begins_ptr, weight_ptr, bias_ptr, states_ptr, cells_ptr, kept_ptr, num_envs, steps,
    rows, in_row, in_step, begin_row, begin_step,
    H: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, KEEPS: tl.constexpr,
    HALF: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    of_into = tl.trans(weight_block(weight_ptr, 0, H, PAD, HALF))
    of_forget = tl.trans(weight_block(weight_ptr, 1, H, PAD, HALF))
    of_new = tl.trans(weight_block(weight_ptr, 2, H, PAD, HALF))
    of_out = tl.trans(weight_block(weight_ptr, 3, H, PAD, HALF))
    if HAS_BIAS:
        bias_into = vector(bias_ptr, 0, H, PAD)
        bias_forget = vector(bias_ptr, 1, H, PAD)
        bias_new = vector(bias_ptr, 2, H, PAD)
        bias_out = vector(bias_ptr, 3, H, PAD)
    else:
        bias_into = tl.zeros((1, PAD), dtype=tl.float32)
        bias_forget = bias_into
        bias_new = bias_into
        bias_out = bias_into
    first = tl.program_id(0).to(tl.int64) * rows
    i = tl.arange(0, BLOCK)
    is_row = (i < rows) & (first + i < num_envs)
    r, h = i[:, None], tl.arange(0, PAD)[None, :]
    mask = is_row[:, None] & (h < H)
    inputs_ptr += first * in_row
    begins_ptr += first * begin_row
    states_ptr += first * steps * H
    cells_ptr += first * steps * H
    kept_ptr += first * 4 * H
    at_input, at_begin, at_state, at_kept = r * in_row + h, i * begin_row, r * (steps * H) + h, r * (4 * H) + h
    state = tl.load(state_ptr + first * H + r * H + h, mask=mask, other=0.0)
    cell = tl.load(cell_ptr + first * H + r * H + h, mask=mask, other=0.0)
    # what a step reads is asked for a step ahead, so that no step waits for memory
    begins = tl.load(begins_ptr + at_begin, mask=is_row, other=0)
    x_into = tl.load(inputs_ptr + at_input, mask=mask, other=0.0)
    x_forget = tl.load(inputs_ptr + H + at_input, mask=mask, other=0.0)
    x_new = tl.load(inputs_ptr + 2 * H + at_input, mask=mask, other=0.0)
    x_out = tl.load(inputs_ptr + 3 * H + at_input, mask=mask, other=0.0)
    for t in range(steps):
        inputs_ptr += in_step
        begins_ptr += begin_step
        has_next = t + 1 < steps
        next_begins = tl.load(begins_ptr + at_begin, mask=is_row & has_next, other=0)
        next_into = tl.load(inputs_ptr + at_input, mask=mask & has_next, other=0.0)
        next_forget = tl.load(inputs_ptr + H + at_input, mask=mask & has_next, other=0.0)
        next_new = tl.load(inputs_ptr + 2 * H + at_input, mask=mask & has_next, other=0.0)
        next_out = tl.load(inputs_ptr + 3 * H + at_input, mask=mask & has_next, other=0.0)
        is_first = (begins != 0)[:, None]
        state = tl.where(is_first, 0.0, state)
        cell = tl.where(is_first, 0.0, cell)
        into = sigmoid(dot(state, of_into, HALF) + (x_into + bias_into), FAST)
        forget = sigmoid(dot(state, of_forget, HALF) + (x_forget + bias_forget), FAST)
        new = tanh(dot(state, of_new, HALF) + (x_new + bias_new), FAST)
        out = sigmoid(dot(state, of_out, HALF) + (x_out + bias_out), FAST)
        cell = forget * cell + into * new
        state = out * tanh(cell, FAST)
        tl.store(states_ptr + at_state, state, mask=mask)
        tl.store(cells_ptr + at_state, cell, mask=mask)
        states_ptr += H
        cells_ptr += H
        if KEEPS:
            tl.store(kept_ptr + at_kept, into, mask=mask)
            tl.store(kept_ptr + H + at_kept, forget, mask=mask)
            tl.store(kept_ptr + 2 * H + at_kept, new, mask=mask)
            tl.store(kept_ptr + 3 * H + at_kept, out, mask=mask)
            kept_ptr += num_envs.to(tl.int64) * 4 * H
        begins = next_begins
        x_into = next_into
        x_forget = next_forget
        x_new = next_new
        x_out = next_out


@triton.jit(do_not_specialize=["num_envs", "steps", "rows"])
def _backward_kernel(
    grad_ptr, grad_cell_ptr, states_ptr, cells_ptr, kept_ptr, state_ptr, cell_ptr, begins_ptr, weight_ptr,
    of_inputs_ptr, before_ptr, of_state_ptr, of_cell_ptr, num_envs, steps, rows, grad_row, grad_step, grad_cell_row,
    grad_cell_step, begin_row, begin_step,
    H: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, OF_CELLS: tl.constexpr, HALF: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    by_into = weight_block(weight_ptr, 0, H, PAD, HALF)
    by_forget = weight_block(weight_ptr, 1, H, PAD, HALF)
    by_new = weight_block(weight_ptr, 2, H, PAD, HALF)
    by_out = weight_block(weight_ptr, 3, H, PAD, HALF)
    first = tl.program_id(0).to(tl.int64) * rows
    i = tl.arange(0, BLOCK)
    is_row = (i < rows) & (first + i < num_envs)
    r, h = i[:, None], tl.arange(0, PAD)[None, :]
    mask = is_row[:, None] & (h < H)
    last = (steps - 1).to(tl.int64)
    kept_step = num_envs.to(tl.int64) * 4 * H
    end = first * steps + last
    grad_ptr += first * grad_row + last * grad_step
    grad_cell_ptr += first * grad_cell_row + last * grad_cell_step
    begins_ptr += first * begin_row + last * begin_step
    states_ptr += (end - 1) * H
    cells_ptr += (end - 1) * H
    kept_ptr += last * kept_step + first * 4 * H
    of_inputs_ptr += end * 4 * H
    before_ptr += end * H
    at_grad, at_grad_cell, at_begin = r * grad_row + h, r * grad_cell_row + h, i * begin_row
    at_kept, at_inputs, at_state = r * (4 * H) + h, r * (steps * 4 * H) + h, r * (steps * H) + h
    at_initial = first * H + r * H + h
    grad = tl.load(grad_ptr + at_grad, mask=mask, other=0.0)
    begins = tl.load(begins_ptr + at_begin, mask=is_row, other=0)
    before = tl.load(states_ptr + at_state, mask=mask & (steps > 1), other=0.0)
    cell = tl.load(cells_ptr + H + at_state, mask=mask, other=0.0)
    cell_before = tl.load(cells_ptr + at_state, mask=mask & (steps > 1), other=0.0)
    into = tl.load(kept_ptr + at_kept, mask=mask, other=0.0)
    forget = tl.load(kept_ptr + H + at_kept, mask=mask, other=0.0)
    new = tl.load(kept_ptr + 2 * H + at_kept, mask=mask, other=0.0)
    out = tl.load(kept_ptr + 3 * H + at_kept, mask=mask, other=0.0)
    carried = tl.zeros((BLOCK, PAD), dtype=tl.float32)
    carried_cell = tl.zeros((BLOCK, PAD), dtype=tl.float32)
    if OF_CELLS:
        carried_cell += tl.load(grad_cell_ptr + at_grad_cell, mask=mask, other=0.0)
    for t in range(steps):
        has_next = t + 1 < steps
        grad_ptr -= grad_step
        grad_cell_ptr -= grad_cell_step
        begins_ptr -= begin_step
        states_ptr -= H
        cells_ptr -= H
        kept_ptr -= kept_step
        next_grad = tl.load(grad_ptr + at_grad, mask=mask & has_next, other=0.0)
        next_begins = tl.load(begins_ptr + at_begin, mask=is_row & has_next, other=0)
        next_before = tl.load(states_ptr + at_state, mask=mask & (t + 2 < steps), other=0.0)
        next_cell_before = tl.load(cells_ptr + at_state, mask=mask & (t + 2 < steps), other=0.0)
        next_into = tl.load(kept_ptr + at_kept, mask=mask & has_next, other=0.0)
        next_forget = tl.load(kept_ptr + H + at_kept, mask=mask & has_next, other=0.0)
        next_new = tl.load(kept_ptr + 2 * H + at_kept, mask=mask & has_next, other=0.0)
        next_out = tl.load(kept_ptr + 3 * H + at_kept, mask=mask & has_next, other=0.0)
        if OF_CELLS:
            next_grad_cell = tl.load(grad_cell_ptr + at_grad_cell, mask=mask & has_next, other=0.0)
        if t + 1 == steps:
            before = tl.load(state_ptr + at_initial, mask=mask, other=0.0)
            cell_before = tl.load(cell_ptr + at_initial, mask=mask, other=0.0)
        is_first = (begins != 0)[:, None]
        past = tl.where(is_first, 0.0, cell_before)
        grad += carried
        squashed = tanh(cell, FAST)
        of_cell = carried_cell + grad * out * (1.0 - squashed * squashed)
        d_into = of_cell * new * into * (1.0 - into)
        d_forget = of_cell * past * forget * (1.0 - forget)
        d_new = of_cell * into * (1.0 - new * new)
        d_out = grad * squashed * out * (1.0 - out)
        scale = scale_of(tl.maximum(tl.abs(grad), tl.abs(of_cell)), HALF)
        carried = dot(d_into * scale, by_into, HALF)
        carried += dot(d_forget * scale, by_forget, HALF)
        carried += dot(d_new * scale, by_new, HALF)
        carried += dot(d_out * scale, by_out, HALF)
        carried = tl.where(is_first, 0.0, carried / scale)
        carried_cell = tl.where(is_first, 0.0, of_cell * forget)
        tl.store(of_inputs_ptr + at_inputs, d_into, mask=mask)
        tl.store(of_inputs_ptr + H + at_inputs, d_forget, mask=mask)
        tl.store(of_inputs_ptr + 2 * H + at_inputs, d_new, mask=mask)
        tl.store(of_inputs_ptr + 3 * H + at_inputs, d_out, mask=mask)
        tl.store(before_ptr + at_state, tl.where(is_first, 0.0, before), mask=mask)
        of_inputs_ptr -= 4 * H
        before_ptr -= H
        if OF_CELLS:
            carried_cell += next_grad_cell
        grad = next_grad
        begins = next_begins
        before = next_before
        cell = cell_before
        cell_before = next_cell_before
        into = next_into
        forget = next_forget
        new = next_new
        out = next_out
    tl.store(of_state_ptr + at_initial, carried, mask=mask)
    tl.store(of_cell_ptr + at_initial, carried_cell, mask=mask)


def forward(
    inputs: Tensor, state: Tensor, cell: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None, keeps: bool,
    processors: int, *, half: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """States h and c ``[N, T, H]``, and the gates i, f, g and o, ``[T, N, 4 H]`` or ``[0]``.

    Args:
        inputs: ``[N, T, 4 H]`` float32.
        state: h before the first step, ``[N, H]`` float32, contiguous.
        cell: c likewise.
        begins: bool ``[N, T]``.
        weight: ``[4 H, H]`` float32.
        bias: ``[4 H]``, contiguous, or None.
        keeps: whether a backward pass follows.
        processors: multiprocessors of the device.
        half: whether products take float16 operands, and gates the hardware's tanh; else all is float32.
    """
    (num_envs, steps, _), hidden = inputs.shape, weight.shape[1]
    inputs, weight = dense_rows(inputs), weight.contiguous()
    states = inputs.new_empty(num_envs, steps, hidden)
    cells = torch.empty_like(states)
    kept = inputs.new_empty((steps, num_envs, 4 * hidden) if keeps else (0,))
    rows = rows_of(num_envs, processors)
    args = (
        inputs, state, cell, begins.view(torch.uint8), weight, weight if bias is None else bias, states, cells, kept,
        num_envs, steps, rows, inputs.stride(0), inputs.stride(1), begins.stride(0), begins.stride(1),
    )  # fmt: skip
    constants = {**widths(hidden), "BLOCK": BLOCK, "HAS_BIAS": bias is not None, "KEEPS": keeps}
    grid, direct = (triton.cdiv(num_envs, rows),), direct_kernels() if half else None
    if direct is None:
        constants |= {"HALF": half, "FAST": half}
        launch(_forward_kernel, grid, args, constants, num_warps=WARPS, num_stages=1)
    else:
        launch(direct.lstm_forward, grid, args, constants, num_warps=WARPS)
    return states, cells, kept


def backward(
    grad: Tensor, grad_cell: Tensor | None, states: Tensor, cells: Tensor, kept: Tensor, state: Tensor, cell: Tensor,
    begins: Tensor, weight: Tensor, processors: int, *, half: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What the loss says of inputs ``[N, T, 4 H]``, h before each step ``[N, T, H]``, and the gradients of both states.

    Args:
        grad: of h ``[N, T, H]``.
        grad_cell: of c, or None for 0; the other arguments are as :func:`forward` takes and gives them.
        states: h after each step.
        cells: c after each step.
        kept: the gates.
        state: h before the first step.
        cell: c before the first step.
        begins: True where an episode begins.
        weight: of the recurrence.
        processors: multiprocessors of the device.
        half: as in :func:`forward`.
    """
    num_envs, steps, hidden = states.shape
    grad, weight = dense_rows(grad), weight.contiguous()
    of_cells = grad if grad_cell is None else dense_rows(grad_cell)
    of_inputs = states.new_empty(num_envs, steps, 4 * hidden)
    before, of_state, of_cell = torch.empty_like(states), torch.empty_like(state), torch.empty_like(cell)
    rows = rows_of(num_envs, processors)
    args = (
        states, cells, kept, state, cell, begins.view(torch.uint8), weight, of_inputs, before, of_state, of_cell,
        num_envs, steps, rows, grad.stride(0), grad.stride(1), of_cells.stride(0), of_cells.stride(1), begins.stride(0),
        begins.stride(1),
    )  # fmt: skip
    constants = {**widths(hidden), "BLOCK": BLOCK, "OF_CELLS": grad_cell is not None}
    grid, direct = (triton.cdiv(num_envs, rows),), direct_kernels() if half else None
    if direct is None:
        constants |= {"HALF": half, "FAST": half}
        launch(_backward_kernel, grid, (grad, of_cells, *args), constants, num_warps=WARPS, num_stages=1)
    else:
        largest = largest_of(grad) if grad_cell is None else torch.maximum(largest_of(grad), largest_of(grad_cell))
        launch(direct.lstm_backward, grid, (grad, of_cells, largest, *args), constants, num_warps=WARPS)
    return of_inputs, before, of_state, of_cell
