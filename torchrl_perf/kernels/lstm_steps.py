"""Triton kernels of long short-term memory for any number of hidden units: a product and one launch a step.

Reference: :mod:`torchrl_perf.functional.memory.lstm`; see :mod:`torchrl_perf.kernels.gates`.
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
    gates_ptr, inputs_ptr, known_ptr, cell_ptr, begins_ptr, states_ptr, cells_ptr, kept_ptr, num_rows, steps, t, in_row,
    in_step, begin_row, begin_step,
    H: tl.constexpr, BLOCK: tl.constexpr, KEEPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row, unit, mask = place(num_rows, H, BLOCK)
    gates = gates_ptr + row * 4 * H + unit
    inputs = inputs_ptr + row * in_row + t.to(tl.int64) * in_step + unit
    begins = begins_ptr + row * begin_row + t.to(tl.int64) * begin_step
    first, at = row * H + unit, (row * steps + t) * H + unit
    cell = before_step(cells_ptr, cell_ptr, tl.load(begins, mask, other=0) != 0, at, first, mask, t, H)
    into = sigmoid(tl.load(inputs, mask) + tl.load(gates, mask))
    forget = sigmoid(tl.load(inputs + H, mask) + tl.load(gates + H, mask))
    new = tanh(tl.load(inputs + 2 * H, mask) + tl.load(gates + 2 * H, mask))
    out = sigmoid(tl.load(inputs + 3 * H, mask) + tl.load(gates + 3 * H, mask))
    cell = forget * cell + into * new
    state = out * tanh(cell)
    tl.store(states_ptr + at, state, mask)
    tl.store(cells_ptr + at, cell, mask)
    if KEEPS:
        kept = kept_ptr + (t.to(tl.int64) * num_rows + row) * 4 * H + unit
        tl.store(kept, into, mask)
        tl.store(kept + H, forget, mask)
        tl.store(kept + 2 * H, new, mask)
        tl.store(kept + 3 * H, out, mask)
    # what the next step multiplies
    has_next = mask & (t + 1 < steps)
    cut = tl.load(begins + begin_step, has_next, other=0) != 0
    tl.store(known_ptr + first, tl.where(cut, 0.0, state), has_next)


@triton.jit(do_not_specialize=NUMBERS)
def _backward_kernel(
    grad_ptr, grad_cell_ptr, carried_ptr, carried_cell_ptr, states_ptr, cells_ptr, kept_ptr, state_ptr, cell_ptr,
    begins_ptr, of_gates_ptr, before_ptr, num_rows, steps, t, grad_row, grad_step, cell_row, cell_step, begin_row,
    begin_step,
    H: tl.constexpr, BLOCK: tl.constexpr, OF_CELLS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row, unit, mask = place(num_rows, H, BLOCK)
    step, first = t.to(tl.int64), row * H + unit
    begins, at = begins_ptr + row * begin_row + step * begin_step, (row * steps + step) * H + unit
    follows = mask & (t + 1 < steps)
    cut = tl.load(begins + begin_step, follows, other=1) != 0  # nothing comes back over a reset
    grad = tl.load(grad_ptr + row * grad_row + step * grad_step + unit, mask)
    grad += tl.where(cut, 0.0, tl.load(carried_ptr + first, follows, other=0.0))
    of_cell = tl.where(cut, 0.0, tl.load(carried_cell_ptr + first, follows, other=0.0))
    if OF_CELLS:
        of_cell += tl.load(grad_cell_ptr + row * cell_row + step * cell_step + unit, mask)
    kept = kept_ptr + (step * num_rows + row) * 4 * H + unit
    into, forget = tl.load(kept, mask), tl.load(kept + H, mask)
    new, out = tl.load(kept + 2 * H, mask), tl.load(kept + 3 * H, mask)
    is_first = tl.load(begins, mask, other=0) != 0
    before = before_step(states_ptr, state_ptr, is_first, at, first, mask, t, H)
    past = before_step(cells_ptr, cell_ptr, is_first, at, first, mask, t, H)
    squashed = tanh(tl.load(cells_ptr + at, mask))
    of_cell += grad * out * (1.0 - squashed * squashed)
    gates = of_gates_ptr + (row * steps + step) * 4 * H + unit
    tl.store(gates, of_cell * new * into * (1.0 - into), mask)
    tl.store(gates + H, of_cell * past * forget * (1.0 - forget), mask)
    tl.store(gates + 2 * H, of_cell * into * (1.0 - new * new), mask)
    tl.store(gates + 3 * H, grad * squashed * out * (1.0 - out), mask)
    tl.store(before_ptr + at, before, mask)
    tl.store(carried_cell_ptr + first, of_cell * forget, mask)


def forward(
    inputs: Tensor, state: Tensor, cell: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """States h and c ``[N, T, H]``, and the gates i, f, g and o, ``[T, N, 4 H]`` or ``[0]``.

    Arguments are those of :func:`torchrl_perf.kernels.lstm.forward`.
    """
    (num_envs, steps, _), hidden = inputs.shape, weight.shape[1]
    tell_once("LSTM", hidden)
    inputs, gates = dense_rows(inputs), inputs.new_empty(num_envs, 4 * hidden)
    states, cells = (inputs.new_empty(num_envs, steps, hidden) for _ in range(2))
    kept = inputs.new_empty((steps, num_envs, 4 * hidden) if keeps else (0,))
    known, columns = state.masked_fill(begins[:, :1], 0), weight.t()
    strides = inputs.stride(0), inputs.stride(1), begins.stride(0), begins.stride(1)
    tensors = gates, inputs, known, cell, begins.view(torch.uint8), states, cells, kept
    constants = {"H": hidden, "BLOCK": BLOCK, "KEEPS": keeps}
    for t in range(steps):
        if bias is None:
            torch.mm(known, columns, out=gates)
        else:
            torch.addmm(bias, known, columns, out=gates)
        launch(_forward_kernel, grid_of(known), (*tensors, num_envs, steps, t, *strides), constants, num_warps=4)
    return states, cells, kept


def backward(
    grad: Tensor, grad_cell: Tensor | None, known: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of inputs ``[N, T, 4 H]``, which are those of the gates, of both first states, weight and biases.

    Arguments are those of :func:`torchrl_perf.kernels.lstm.backward`.
    """
    states, cells, kept, state, cell, begins, weight = known
    num_envs, steps, hidden = states.shape
    grad = dense_rows(grad)
    of_cells = grad if grad_cell is None else dense_rows(grad_cell)
    of_gates, before = states.new_empty(num_envs, steps, 4 * hidden), torch.empty_like(states)
    carried, carried_cell = torch.empty_like(state), torch.empty_like(cell)
    read = grad, of_cells, carried, carried_cell, states, cells, kept, state, cell, begins.view(torch.uint8)
    strides = [each.stride(dim) for each in (grad, of_cells, begins) for dim in (0, 1)]
    constants = {"H": hidden, "BLOCK": BLOCK, "OF_CELLS": grad_cell is not None}
    for t in range(steps - 1, -1, -1):
        args = (*read, of_gates, before, num_envs, steps, t, *strides)
        launch(_backward_kernel, grid_of(state), args, constants, num_warps=4)
        torch.mm(of_gates[:, t], weight, out=carried)
    for each in (carried, carried_cell):
        each.masked_fill_(begins[:, :1], 0)
    of_weight = of_gates.flatten(0, 1).t() @ before.flatten(0, 1)
    return of_gates, carried, carried_cell, of_weight, *column_sums(of_gates, None, 4 * hidden)
