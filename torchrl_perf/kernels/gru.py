"""Triton kernels of the gated recurrent unit: all steps of a sequence, with resets, in one launch a direction.

Reference: :mod:`torchrl_perf.functional.memory.gru`, whose loops define the values. The gradient of the weights is a
matrix product over all steps, which is cuBLAS's afterwards: the backward kernel writes its two operands. Import this
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
    inputs_ptr, initial_ptr, begins_ptr, weight_ptr, bias_ptr, states_ptr, kept_ptr, num_envs, steps, rows, in_row,
    in_step, begin_row, begin_step,
    H: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, KEEPS: tl.constexpr,
    HALF: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    of_reset = tl.trans(weight_block(weight_ptr, 0, H, PAD, HALF))
    of_update = tl.trans(weight_block(weight_ptr, 1, H, PAD, HALF))
    of_new = tl.trans(weight_block(weight_ptr, 2, H, PAD, HALF))
    if HAS_BIAS:
        bias_reset = vector(bias_ptr, 0, H, PAD)
        bias_update = vector(bias_ptr, 1, H, PAD)
        bias_new = vector(bias_ptr, 2, H, PAD)
    else:
        bias_reset = tl.zeros((1, PAD), dtype=tl.float32)
        bias_update = bias_reset
        bias_new = bias_reset
    first = tl.program_id(0).to(tl.int64) * rows
    i = tl.arange(0, BLOCK)
    is_row = (i < rows) & (first + i < num_envs)
    r, h = i[:, None], tl.arange(0, PAD)[None, :]
    mask = is_row[:, None] & (h < H)
    inputs_ptr += first * in_row
    begins_ptr += first * begin_row
    states_ptr += first * steps * H
    kept_ptr += first * 4 * H
    at_input, at_begin, at_state, at_kept = r * in_row + h, i * begin_row, r * (steps * H) + h, r * (4 * H) + h
    state = tl.load(initial_ptr + first * H + r * H + h, mask=mask, other=0.0)
    # what a step reads is asked for a step ahead, so that no step waits for memory
    begins = tl.load(begins_ptr + at_begin, mask=is_row, other=0)
    x_reset = tl.load(inputs_ptr + at_input, mask=mask, other=0.0)
    x_update = tl.load(inputs_ptr + H + at_input, mask=mask, other=0.0)
    x_new = tl.load(inputs_ptr + 2 * H + at_input, mask=mask, other=0.0)
    for t in range(steps):
        inputs_ptr += in_step
        begins_ptr += begin_step
        has_next = t + 1 < steps
        next_begins = tl.load(begins_ptr + at_begin, mask=is_row & has_next, other=0)
        next_reset = tl.load(inputs_ptr + at_input, mask=mask & has_next, other=0.0)
        next_update = tl.load(inputs_ptr + H + at_input, mask=mask & has_next, other=0.0)
        next_new = tl.load(inputs_ptr + 2 * H + at_input, mask=mask & has_next, other=0.0)
        state = tl.where((begins != 0)[:, None], 0.0, state)
        reset = sigmoid(dot(state, of_reset, HALF) + (x_reset + bias_reset), FAST)
        update = sigmoid(dot(state, of_update, HALF) + (x_update + bias_update), FAST)
        gate_new = dot(state, of_new, HALF) + bias_new
        new = tanh(x_new + reset * gate_new, FAST)
        state = new + update * (state - new)
        tl.store(states_ptr + at_state, state, mask=mask)
        states_ptr += H
        if KEEPS:
            tl.store(kept_ptr + at_kept, reset, mask=mask)
            tl.store(kept_ptr + H + at_kept, update, mask=mask)
            tl.store(kept_ptr + 2 * H + at_kept, new, mask=mask)
            tl.store(kept_ptr + 3 * H + at_kept, gate_new, mask=mask)
            kept_ptr += num_envs.to(tl.int64) * 4 * H
        begins = next_begins
        x_reset = next_reset
        x_update = next_update
        x_new = next_new


@triton.jit(do_not_specialize=["num_envs", "steps", "rows"])
def _backward_kernel(
    grad_ptr, states_ptr, kept_ptr, initial_ptr, begins_ptr, weight_ptr, of_inputs_ptr, of_new_ptr, before_ptr,
    of_initial_ptr, num_envs, steps, rows, grad_row, grad_step, begin_row, begin_step,
    H: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    by_reset = weight_block(weight_ptr, 0, H, PAD, HALF)
    by_update = weight_block(weight_ptr, 1, H, PAD, HALF)
    by_new = weight_block(weight_ptr, 2, H, PAD, HALF)
    first = tl.program_id(0).to(tl.int64) * rows
    i = tl.arange(0, BLOCK)
    is_row = (i < rows) & (first + i < num_envs)
    r, h = i[:, None], tl.arange(0, PAD)[None, :]
    mask = is_row[:, None] & (h < H)
    last = (steps - 1).to(tl.int64)
    kept_step = num_envs.to(tl.int64) * 4 * H
    end = first * steps + last
    grad_ptr += first * grad_row + last * grad_step
    begins_ptr += first * begin_row + last * begin_step
    states_ptr += (end - 1) * H
    kept_ptr += last * kept_step + first * 4 * H
    of_inputs_ptr += end * 3 * H
    of_new_ptr += end * H
    before_ptr += end * H
    at_grad, at_begin, at_kept = r * grad_row + h, i * begin_row, r * (4 * H) + h
    at_inputs, at_state, at_initial = r * (steps * 3 * H) + h, r * (steps * H) + h, r * H + h
    initial = tl.load(initial_ptr + first * H + at_initial, mask=mask, other=0.0)
    grad = tl.load(grad_ptr + at_grad, mask=mask, other=0.0)
    begins = tl.load(begins_ptr + at_begin, mask=is_row, other=0)
    before = tl.load(states_ptr + at_state, mask=mask & (steps > 1), other=0.0)
    reset = tl.load(kept_ptr + at_kept, mask=mask, other=0.0)
    update = tl.load(kept_ptr + H + at_kept, mask=mask, other=0.0)
    new = tl.load(kept_ptr + 2 * H + at_kept, mask=mask, other=0.0)
    gate_new = tl.load(kept_ptr + 3 * H + at_kept, mask=mask, other=0.0)
    carried = tl.zeros((BLOCK, PAD), dtype=tl.float32)
    for t in range(steps):
        is_last = t + 1 == steps
        has_next = t + 1 < steps
        grad_ptr -= grad_step
        begins_ptr -= begin_step
        states_ptr -= H
        kept_ptr -= kept_step
        next_grad = tl.load(grad_ptr + at_grad, mask=mask & has_next, other=0.0)
        next_begins = tl.load(begins_ptr + at_begin, mask=is_row & has_next, other=0)
        next_before = tl.load(states_ptr + at_state, mask=mask & (t + 2 < steps), other=0.0)
        next_reset = tl.load(kept_ptr + at_kept, mask=mask & has_next, other=0.0)
        next_update = tl.load(kept_ptr + H + at_kept, mask=mask & has_next, other=0.0)
        next_new = tl.load(kept_ptr + 2 * H + at_kept, mask=mask & has_next, other=0.0)
        next_gate = tl.load(kept_ptr + 3 * H + at_kept, mask=mask & has_next, other=0.0)
        before = tl.where((begins != 0)[:, None], 0.0, tl.where(is_last, initial, before))
        grad += carried
        d_new = grad * (1.0 - update) * (1.0 - new * new)
        d_update = grad * (before - new) * update * (1.0 - update)
        d_gate = d_new * reset
        d_reset = d_new * gate_new * reset * (1.0 - reset)
        scale = scale_of(grad, HALF)
        carried = dot(d_reset * scale, by_reset, HALF)
        carried += dot(d_update * scale, by_update, HALF)
        carried += dot(d_gate * scale, by_new, HALF)
        carried = tl.where((begins != 0)[:, None], 0.0, carried / scale + grad * update)
        tl.store(of_inputs_ptr + at_inputs, d_reset, mask=mask)
        tl.store(of_inputs_ptr + H + at_inputs, d_update, mask=mask)
        tl.store(of_inputs_ptr + 2 * H + at_inputs, d_new, mask=mask)
        tl.store(of_new_ptr + at_state, d_gate, mask=mask)
        tl.store(before_ptr + at_state, before, mask=mask)
        of_inputs_ptr -= 3 * H
        of_new_ptr -= H
        before_ptr -= H
        grad = next_grad
        begins = next_begins
        before = next_before
        reset = next_reset
        update = next_update
        new = next_new
        gate_new = next_gate
    tl.store(of_initial_ptr + first * H + at_initial, carried, mask=mask)


def forward(
    inputs: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None, keeps: bool, processors: int,
    *, half: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """States ``[N, T, H]``, and reset, update and new gate with ``W_hn h + b_hn``, ``[T, N, 4 H]`` or ``[0]``.

    Args:
        inputs: ``[N, T, 3 H]`` float32.
        initial: ``[N, H]`` float32, contiguous.
        begins: bool ``[N, T]``.
        weight: ``[3 H, H]`` float32.
        bias: ``[3 H]``, contiguous, or None.
        keeps: whether a backward pass follows.
        processors: multiprocessors of the device.
        half: whether products take float16 operands, and gates the hardware's tanh; else all is float32.
    """
    (num_envs, steps, _), hidden = inputs.shape, weight.shape[1]
    inputs, weight = dense_rows(inputs), weight.contiguous()
    states = inputs.new_empty(num_envs, steps, hidden)
    kept = inputs.new_empty((steps, num_envs, 4 * hidden) if keeps else (0,))
    rows = rows_of(num_envs, processors)
    args = (
        inputs, initial, begins.view(torch.uint8), weight, weight if bias is None else bias, states, kept, num_envs,
        steps, rows, inputs.stride(0), inputs.stride(1), begins.stride(0), begins.stride(1),
    )  # fmt: skip
    constants = {**widths(hidden), "BLOCK": BLOCK, "HAS_BIAS": bias is not None, "KEEPS": keeps}
    grid, direct = (triton.cdiv(num_envs, rows),), direct_kernels() if half else None
    if direct is None:
        constants |= {"HALF": half, "FAST": half}
        launch(_forward_kernel, grid, args, constants, num_warps=WARPS, num_stages=1)
    else:
        launch(direct.gru_forward, grid, args, constants, num_warps=WARPS)
    return states, kept


def backward(
    grad: Tensor, states: Tensor, kept: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, processors: int,
    *, half: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of inputs ``[N, T, 3 H]`` and of ``W_hn h + b_hn``, h before each step, gradient of the first state.

    Args:
        grad: of the states ``[N, T, H]``; the other arguments are as :func:`forward` takes and gives them.
        states: after each step.
        kept: gates.
        initial: the first state, ``[N, H]``.
        begins: True where an episode begins.
        weight: of the recurrence.
        processors: multiprocessors of the device.
        half: as in :func:`forward`.
    """
    num_envs, steps, hidden = states.shape
    grad, weight = dense_rows(grad), weight.contiguous()
    of_inputs = states.new_empty(num_envs, steps, 3 * hidden)
    of_new, before, of_initial = torch.empty_like(states), torch.empty_like(states), torch.empty_like(initial)
    rows = rows_of(num_envs, processors)
    args = (
        states, kept, initial, begins.view(torch.uint8), weight, of_inputs, of_new, before, of_initial, num_envs, steps,
        rows, grad.stride(0), grad.stride(1), begins.stride(0), begins.stride(1),
    )  # fmt: skip
    constants, grid = {**widths(hidden), "BLOCK": BLOCK}, (triton.cdiv(num_envs, rows),)
    direct = direct_kernels() if half else None
    if direct is None:
        launch(_backward_kernel, grid, (grad, *args), {**constants, "HALF": half}, num_warps=WARPS, num_stages=1)
    else:
        launch(direct.gru_backward, grid, (grad, largest_of(grad), *args), constants, num_warps=WARPS)
    return of_inputs, of_new, before, of_initial
