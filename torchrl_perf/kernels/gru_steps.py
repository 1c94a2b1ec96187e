"""Triton kernels of the gated recurrent unit for any number of hidden units: a product and one launch a step.

Reference: :mod:`torchrl_perf.functional.memory.gru`, whose loops define the values; see
:mod:`torchrl_perf.kernels.gates`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.column_sums import column_sums
from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.gates import BLOCK, before_step, grid_of, place, sigmoid, tanh, tell_once
from torchrl_perf.kernels.launch import dense_rows, launch

__all__ = ["backward", "forward"]

NUMBERS = ["num_rows", "steps", "t"]


@triton.jit(do_not_specialize=NUMBERS)  # a variant for each step would be compiled
def _forward_kernel(
    gates_ptr, inputs_ptr, known_ptr, begins_ptr, states_ptr, kept_ptr, num_rows, steps, t, in_row, in_step, begin_row,
    begin_step,
    H: tl.constexpr, BLOCK: tl.constexpr, KEEPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row, unit, mask = place(num_rows, H, BLOCK)
    gates = gates_ptr + row * 3 * H + unit
    inputs = inputs_ptr + row * in_row + t.to(tl.int64) * in_step + unit
    of_reset, of_update, of_new = tl.load(gates, mask), tl.load(gates + H, mask), tl.load(gates + 2 * H, mask)
    state = tl.load(known_ptr + row * H + unit, mask)
    reset = sigmoid(tl.load(inputs, mask) + of_reset)
    update = sigmoid(tl.load(inputs + H, mask) + of_update)
    new = tanh(tl.load(inputs + 2 * H, mask) + reset * of_new)
    state = new + update * (state - new)
    tl.store(states_ptr + (row * steps + t) * H + unit, state, mask)
    if KEEPS:
        kept = kept_ptr + (t.to(tl.int64) * num_rows + row) * 4 * H + unit
        tl.store(kept, reset, mask)
        tl.store(kept + H, update, mask)
        tl.store(kept + 2 * H, new, mask)
        tl.store(kept + 3 * H, of_new, mask)
    # what the next step multiplies
    has_next = mask & (t + 1 < steps)
    begins = tl.load(begins_ptr + row * begin_row + (t + 1).to(tl.int64) * begin_step, has_next, other=0)
    tl.store(known_ptr + row * H + unit, tl.where(begins != 0, 0.0, state), has_next)


@triton.jit(do_not_specialize=NUMBERS)
def _backward_kernel(
    grad_ptr, carried_ptr, states_ptr, kept_ptr, initial_ptr, begins_ptr, of_inputs_ptr, of_gates_ptr, before_ptr,
    num_rows, steps, t, grad_row, grad_step, begin_row, begin_step,
    H: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row, unit, mask = place(num_rows, H, BLOCK)
    step, begins = t.to(tl.int64), begins_ptr + row * begin_row + t.to(tl.int64) * begin_step
    follows = mask & (t + 1 < steps)
    cut = tl.load(begins + begin_step, follows, other=1) != 0  # nothing comes back over a reset
    carried = tl.load(carried_ptr + row * H + unit, follows, other=0.0)
    grad = tl.load(grad_ptr + row * grad_row + step * grad_step + unit, mask) + tl.where(cut, 0.0, carried)
    kept = kept_ptr + (step * num_rows + row) * 4 * H + unit
    reset, update = tl.load(kept, mask), tl.load(kept + H, mask)
    new, of_new = tl.load(kept + 2 * H, mask), tl.load(kept + 3 * H, mask)
    at = (row * steps + step) * H + unit
    is_first = tl.load(begins, mask, other=0) != 0
    before = before_step(states_ptr, initial_ptr, is_first, at, row * H + unit, mask, t, H)
    d_new = grad * (1.0 - update) * (1.0 - new * new)
    d_update = grad * (before - new) * update * (1.0 - update)
    d_reset = d_new * of_new * reset * (1.0 - reset)
    at_gates = (row * steps + step) * 3 * H + unit
    tl.store(of_inputs_ptr + at_gates, d_reset, mask)
    tl.store(of_inputs_ptr + at_gates + H, d_update, mask)
    tl.store(of_inputs_ptr + at_gates + 2 * H, d_new, mask)
    tl.store(of_gates_ptr + at_gates, d_reset, mask)
    tl.store(of_gates_ptr + at_gates + H, d_update, mask)
    tl.store(of_gates_ptr + at_gates + 2 * H, d_new * reset, mask)
    tl.store(before_ptr + at, before, mask)
    tl.store(carried_ptr + row * H + unit, grad * update, mask)  # to which the product of the gates is added


def forward(
    inputs: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None, keeps: bool
) -> tuple[Tensor, Tensor]:
    """States ``[N, T, H]``, and reset, update and new gate with ``W_hn h + b_hn``, ``[T, N, 4 H]`` or ``[0]``.

    Arguments are those of :func:`torchrl_perf.kernels.gru.forward`.
    """
    (num_envs, steps, _), hidden = inputs.shape, weight.shape[1]
    tell_once("GRU", hidden)
    inputs = dense_rows(inputs)
    states, gates = inputs.new_empty(num_envs, steps, hidden), inputs.new_empty(num_envs, 3 * hidden)
    kept = inputs.new_empty((steps, num_envs, 4 * hidden) if keeps else (0,))
    known = initial.masked_fill(begins[:, :1], 0)
    columns, strides = weight.t(), (inputs.stride(0), inputs.stride(1), begins.stride(0), begins.stride(1))
    tensors, constants = (gates, inputs, known, begins.view(torch.uint8), states, kept), {"H": hidden, "BLOCK": BLOCK}
    for t in range(steps):
        if bias is None:
            torch.mm(known, columns, out=gates)
        else:
            torch.addmm(bias, known, columns, out=gates)
        args = (*tensors, num_envs, steps, t, *strides)
        launch(_forward_kernel, grid_of(known), args, {**constants, "KEEPS": keeps}, num_warps=4)
    return states, kept


def backward(
    grad: Tensor, states: Tensor, kept: Tensor, initial: Tensor, begins: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of inputs ``[N, T, 3 H]``, the first state, weight and bias, and of a bias of the inputs.

    Arguments are those of :func:`torchrl_perf.kernels.gru.backward`.
    """
    num_envs, steps, hidden = states.shape
    grad = dense_rows(grad)
    of_inputs, of_gates = (states.new_empty(num_envs, steps, 3 * hidden) for _ in range(2))
    before, carried = torch.empty_like(states), torch.empty_like(initial)
    read = grad, carried, states, kept, initial, begins.view(torch.uint8)
    strides = grad.stride(0), grad.stride(1), begins.stride(0), begins.stride(1)
    for t in range(steps - 1, -1, -1):
        args = (*read, of_inputs, of_gates, before, num_envs, steps, t, *strides)
        launch(_backward_kernel, grid_of(initial), args, {"H": hidden, "BLOCK": BLOCK}, num_warps=4)
        carried.addmm_(of_gates[:, t], weight)
    of_weight = of_gates.flatten(0, 1).t() @ before.flatten(0, 1)
    of_input_bias, of_bias = column_sums(of_inputs, of_gates[..., 2 * hidden :], 2 * hidden)
    return of_inputs, carried.masked_fill_(begins[:, :1], 0), of_weight, of_bias, of_input_bias
