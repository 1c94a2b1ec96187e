"""Gluon kernels of the gated recurrent unit: all steps of a sequence, with resets, in one launch a direction.

Reference: :mod:`torchrl_perf.functional.memory.gru`, whose loops define the values. The gradient of the weights is a
matrix product over all steps, which is cuBLAS's afterwards: the backward kernel writes its two operands.
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
    load3,
    load4,
    operand,
    place,
    rows_of,
    sigmoid,
    store3,
    store4,
    tanh,
    widths,
)
from torchrl_perf.kernels.column_sums import column_sums
from torchrl_perf.kernels.launch import dense_rows, launch

__all__ = ["backward", "forward"]


@gluon.jit(do_not_specialize=["num_envs", "steps", "rows"])  # 1 would be no tensor
def _forward_kernel(
    inputs_ptr, initial_ptr, begins_ptr, weight_ptr, bias_ptr, states_ptr, kept_ptr, num_envs, steps, rows, in_row,
    in_step, begin_row, begin_step,
    H: gl.constexpr, PAD: gl.constexpr, BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr, KEEPS: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], warps_per_cta=[1, gl.num_warps()], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    of_reset = operand(weight_ptr, 0, True, H, PAD, right)
    of_update = operand(weight_ptr, 1, True, H, PAD, right)
    of_new = operand(weight_ptr, 2, True, H, PAD, right)
    bias_reset = bias_row(bias_ptr, 0, HAS_BIAS, H, PAD, mma)
    bias_update = bias_row(bias_ptr, 1, HAS_BIAS, H, PAD, mma)
    bias_new = bias_row(bias_ptr, 2, HAS_BIAS, H, PAD, mma)
    first, i, h, is_row, mask = place(rows, num_envs, H, PAD, BLOCK, mma)
    inputs_ptr += first * in_row
    begins_ptr += first * begin_row
    states_ptr += first * steps * H
    kept_ptr += first * 4 * H
    r = i[:, None]
    at_input, at_begin, at_state, at_kept = r * in_row + h, i * begin_row, r * (steps * H) + h, r * (4 * H) + h
    state = gl.load(initial_ptr + first * H + r * H + h, mask=mask, other=0.0)
    # what a step reads is asked for a step ahead, so that no step waits for memory
    begins = gl.load(begins_ptr + at_begin, mask=is_row, other=0)
    x_reset, x_update, x_new = load3(inputs_ptr + at_input, mask, H)
    exchanged = gl.allocate_shared_memory(gl.float16, [BLOCK, PAD], shared)
    for t in range(steps):
        state = gl.where((begins != 0)[:, None], 0.0, state)
        exchanged.store(state.to(gl.float16))
        inputs_ptr += in_step
        begins_ptr += begin_step
        has_next = t + 1 < steps
        begins = gl.load(begins_ptr + at_begin, mask=is_row & has_next, other=0)
        next_reset, next_update, next_new = load3(inputs_ptr + at_input, mask & has_next, H)
        known = exchanged.load(left)
        reset = sigmoid(mma_v2(known, of_reset, x_reset + bias_reset))
        update = sigmoid(mma_v2(known, of_update, x_update + bias_update))
        gate_new = mma_v2(known, of_new, gl.zeros([BLOCK, PAD], gl.float32, mma) + bias_new)
        new = tanh(x_new + reset * gate_new)
        state = new + update * (state - new)
        gl.store(states_ptr + at_state, state, mask=mask)
        states_ptr += H
        if KEEPS:
            store4(kept_ptr + at_kept, reset, update, new, gate_new, mask, H)
            kept_ptr += num_envs.to(gl.int64) * 4 * H
        x_reset, x_update, x_new = next_reset, next_update, next_new


@gluon.jit
def _slopes(grad, before, reset, update, new, gate_new):
    """Gradients of reset and update gate, of the new one, and of ``W_hn h + b_hn``."""
    d_new = grad * (1.0 - update) * (1.0 - new * new)
    d_update = grad * (before - new) * update * (1.0 - update)
    d_reset = d_new * gate_new * reset * (1.0 - reset)
    return d_reset, d_update, d_new, d_new * reset


@gluon.jit(do_not_specialize=["num_envs", "steps", "rows"])
def _backward_kernel(
    grad_ptr, largest_ptr, states_ptr, kept_ptr, initial_ptr, begins_ptr, weight_ptr, of_inputs_ptr, of_gate_ptr,
    before_ptr, of_initial_ptr, num_envs, steps, rows, grad_row, grad_step, begin_row, begin_step,
    H: gl.constexpr, PAD: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], warps_per_cta=[1, gl.num_warps()], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    by_reset = operand(weight_ptr, 0, False, H, PAD, right)
    by_update = operand(weight_ptr, 1, False, H, PAD, right)
    by_new = operand(weight_ptr, 2, False, H, PAD, right)
    first, i, h, is_row, mask = place(rows, num_envs, H, PAD, BLOCK, mma)
    r, t = i[:, None], (steps - 1).to(gl.int64)
    # everything at this program's rows, and then step by step from the last one on
    grad_ptr += first * grad_row + t * grad_step
    begins_ptr += first * begin_row + t * begin_step
    states_ptr += (first * steps + t - 1) * H
    kept_ptr += (t * num_envs + first) * 4 * H
    out = first * steps + t
    at_grad, at_begin, at_kept, at_state = r * grad_row + h, i * begin_row, r * (4 * H) + h, r * (steps * H) + h
    largest = gl.maximum(gl.load(largest_ptr + first + i, mask=is_row, other=1.0), 1e-30)[:, None]
    scale, carried = 1.0 / largest, gl.zeros([BLOCK, PAD], gl.float32, mma)
    exchanged = gl.allocate_shared_memory(gl.float16, [3, BLOCK, PAD], shared)
    grad = gl.load(grad_ptr + at_grad, mask=mask, other=0.0)
    begins = gl.load(begins_ptr + at_begin, mask=is_row, other=0)
    before = gl.load(states_ptr + at_state, mask=mask & (steps > 1), other=0.0)
    reset, update, new, gate_new = load4(kept_ptr + at_kept, mask, H)
    for back in range(steps):
        if back + 1 == steps:
            before = gl.load(initial_ptr + first * H + r * H + h, mask=mask, other=0.0)
        is_first = (begins != 0)[:, None]
        before = gl.where(is_first, 0.0, before)
        grad += carried
        d_reset, d_update, d_new, d_gate = _slopes(grad, before, reset, update, new, gate_new)
        # float16 has no small numbers: gradients are scaled by the largest one that their row starts from
        exchanged.index(0).store((d_reset * scale).to(gl.float16))
        exchanged.index(1).store((d_update * scale).to(gl.float16))
        exchanged.index(2).store((d_gate * scale).to(gl.float16))
        carried = grad * update * scale
        store3(of_inputs_ptr + out * 3 * H + r * (steps * 3 * H) + h, d_reset, d_update, d_new, mask, H)
        gl.store(of_gate_ptr + out * H + at_state, d_gate, mask=mask)
        gl.store(before_ptr + out * H + at_state, before, mask=mask)
        grad_ptr -= grad_step
        begins_ptr -= begin_step
        states_ptr -= H
        kept_ptr -= num_envs.to(gl.int64) * 4 * H
        out -= 1
        has_next = back + 1 < steps
        grad = gl.load(grad_ptr + at_grad, mask=mask & has_next, other=0.0)
        begins = gl.load(begins_ptr + at_begin, mask=is_row & has_next, other=0)
        before = gl.load(states_ptr + at_state, mask=mask & (back + 2 < steps), other=0.0)
        reset, update, new, gate_new = load4(kept_ptr + at_kept, mask & has_next, H)
        carried = mma_v2(exchanged.index(0).load(left), by_reset, carried)
        carried = mma_v2(exchanged.index(1).load(left), by_update, carried)
        carried = mma_v2(exchanged.index(2).load(left), by_new, carried)
        carried = gl.where(is_first, 0.0, carried * largest)
    gl.store(of_initial_ptr + first * H + r * H + h, carried, mask=mask)


def forward(
    inputs: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None, keeps: bool
) -> tuple[Tensor, Tensor]:
    """States ``[N, T, H]``, and reset, update and new gate with ``W_hn h + b_hn``, ``[T, N, 4 H]`` or ``[0]``.

    Args:
        inputs: ``[N, T, 3 H]`` float32.
        initial: ``[N, H]`` float32, contiguous.
        begins: bool ``[N, T]``.
        weight: ``[3 H, H]`` float32.
        bias: ``[3 H]``, contiguous, or None.
        keeps: whether a backward pass follows.
    """
    (num_envs, steps, _), hidden = inputs.shape, weight.shape[1]
    inputs, weight, rows = dense_rows(inputs), weight.contiguous(), rows_of(inputs)
    states = inputs.new_empty(num_envs, steps, hidden)
    kept = inputs.new_empty((steps, num_envs, 4 * hidden) if keeps else (0,))
    args = (
        inputs, initial, begins.view(torch.uint8), weight, weight if bias is None else bias, states, kept, num_envs,
        steps, rows, inputs.stride(0), inputs.stride(1), begins.stride(0), begins.stride(1),
    )  # fmt: skip
    constants = {**widths(hidden), "HAS_BIAS": bias is not None, "KEEPS": keeps}
    launch(_forward_kernel, (triton.cdiv(num_envs, rows),), args, constants, num_warps=WARPS)
    return states, kept


def backward(
    grad: Tensor, states: Tensor, kept: Tensor, initial: Tensor, begins: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of inputs ``[N, T, 3 H]``, the first state, weight and bias, and of a bias of the inputs.

    Args:
        grad: of the states ``[N, T, H]``; the other arguments are as :func:`forward` takes and gives them.
        states: after each step.
        kept: gates.
        initial: the first state, ``[N, H]``.
        begins: True where an episode begins.
        weight: of the recurrence.
    """
    num_envs, steps, hidden = states.shape
    grad, weight, rows = dense_rows(grad), weight.contiguous(), rows_of(states)
    of_inputs = states.new_empty(num_envs, steps, 3 * hidden)
    of_gate, before, of_initial = torch.empty_like(states), torch.empty_like(states), torch.empty_like(initial)
    args = (
        grad, largest_of(grad), states, kept, initial, begins.view(torch.uint8), weight, of_inputs, of_gate, before,
        of_initial, num_envs, steps, rows, grad.stride(0), grad.stride(1), begins.stride(0), begins.stride(1),
    )  # fmt: skip
    launch(_backward_kernel, (triton.cdiv(num_envs, rows),), args, widths(hidden), num_warps=WARPS)
    of_weight = torch.empty_like(weight)
    before = before.flatten(0, 1)
    for part, place_of in ((of_inputs[..., : 2 * hidden], slice(2 * hidden)), (of_gate, slice(2 * hidden, None))):
        torch.mm(part.flatten(0, 1).t(), before, out=of_weight[place_of])
    of_input_bias, of_bias = column_sums(of_inputs, of_gate, 2 * hidden)
    return of_inputs, of_initial, of_weight, of_bias, of_input_bias
