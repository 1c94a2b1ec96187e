"""Long short-term memory (in the form of ``torch.nn.LSTM``): one step, and a sequence with resets.

    i, f, o = sigmoid(W_i x + b_i + W_h h + b_h),  g = tanh(likewise)
    c' = f c + i g
    h' = o tanh(c')

Hochreiter and Schmidhuber, "Long short-term memory", 1997. As in :mod:`torchrl_perf.functional.memory.gru`, the part of
the inputs is one matrix product outside, and the recurrence one operator, ``torchrl_perf::lstm_sequence``, with a
backward pass of its own. Dimension key: ``H`` hidden units.
"""

from typing import Any

import torch
from torch import Tensor

from torchrl_perf.functional.memory.rows import (
    add_bias,
    dense,
    env_major,
    grad_or_none,
    keeps_gates,
    refuse_second_gradients,
    takes_one_launch,
    time_major,
)
from torchrl_perf.kernels import cell_kernels, step_kernels
from torchrl_perf.runtime.upstream.tensors import is_transformed

__all__ = ["lstm_cell", "lstm_sequence", "lstm_step"]


def lstm_step(
    inputs: Tensor, state: Tensor, cell: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One step of the recurrence.

    Args:
        inputs: ``W_i x + b_i``, ``[N, 4 H]``: input, forget, cell and output gate.
        state: h of the step before, ``[N, H]``.
        cell: c of the step before, ``[N, H]``.
        weight: ``W_h``, ``[4 H, H]``.
        bias: ``b_h``, ``[4 H]``, or None.

    Returns:
        h and c of this step, each ``[N, H]``.
    """
    gates = torch.nn.functional.linear(state, weight, bias)
    into, forget, new, out = (gates + inputs.to(gates.dtype)).chunk(4, -1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(cell), cell


def lstm_cell(
    x: Tensor,
    state: Tensor,
    cell: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step from the input itself, as ``torch.nn.LSTMCell``; on CUDA without a gradient in one launch.

    Args:
        x: ``[N, I]``.
        state: h of the step before, ``[N, H]``.
        cell: c of the step before, ``[N, H]``.
        weight_ih: ``W_i``, ``[4 H, I]``.
        weight_hh: ``W_h``, ``[4 H, H]``.
        bias_ih: ``b_i``, ``[4 H]``, or None.
        bias_hh: ``b_h``, ``[4 H]``; None where ``bias_ih`` is.

    Returns:
        h and c of this step, each ``[N, H]``.
    """
    args = (x, state, cell, weight_ih, weight_hh, bias_ih, bias_hh)
    if takes_one_launch(*args):
        return torch.ops.torchrl_perf.lstm_cell(*args)
    return lstm_step(torch.nn.functional.linear(x, weight_ih, bias_ih), state, cell, weight_hh, bias_hh)


@torch.library.custom_op("torchrl_perf::lstm_cell", mutates_args=())
def _cell(
    x: Tensor,
    state: Tensor,
    cell: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if kernels := step_kernels(x):
        return kernels.lstm(x, state, cell, weight_ih, weight_hh, dense(bias_ih), dense(bias_hh))
    return lstm_step(torch.nn.functional.linear(x, weight_ih, bias_ih), state, cell, weight_hh, bias_hh)


@_cell.register_fake
def _(
    x: Tensor,
    state: Tensor,
    cell: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return state.new_empty(state.shape), cell.new_empty(cell.shape)


def lstm_sequence(
    inputs: Tensor,
    state: Tensor,
    cell: Tensor,
    begins: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """All steps of ``[N, T]`` sequences; a row's states are 0 before each step that begins an episode.

    Args:
        inputs: ``W_i x + b_i``, ``[N, T, 4 H]``.
        state: h before the first step, ``[N, H]``.
        cell: c before the first step, ``[N, H]``.
        begins: bool ``[N, T]``, True where an episode begins.
        weight: ``W_h``, ``[4 H, H]``.
        bias: ``b_h``, ``[4 H]``, or None.
        input_bias: ``b_i`` where ``inputs`` hold a copy without a gradient: it is found with that of ``b_h``, which is
            the same. It is not added.

    Returns:
        h and c of each step, each ``[N, T, H]``, contiguous, in ``weight``'s dtype.
    """
    keeps = keeps_gates(inputs, state, cell, weight, bias, input_bias)
    state, cell = (each.to(weight.dtype).contiguous() for each in (state, cell))
    inputs = inputs.to(weight.dtype)
    if is_transformed():
        return _of_steps(inputs, state, cell, begins, weight, bias)
    return torch.ops.torchrl_perf.lstm_sequence(inputs, state, cell, begins, weight, bias, input_bias, keeps)[:2]


def _of_steps(
    inputs: Tensor, state: Tensor, cell: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same, one step after the other, of operations that ``torch.func`` transforms."""
    states, cells = [], []
    for now, begin in zip(inputs.unbind(1), begins.unsqueeze(-1).unbind(1), strict=True):
        state, cell = lstm_step(now, state.masked_fill(begin, 0), cell.masked_fill(begin, 0), weight, bias)
        states.append(state)
        cells.append(cell)
    return torch.stack(states, 1), torch.stack(cells, 1)


@torch.library.custom_op("torchrl_perf::lstm_sequence", mutates_args=())
def _forward(
    inputs: Tensor, state: Tensor, cell: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None,
    input_bias: Tensor | None, keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """States h and c ``[N, T, H]``, and for the backward pass i, f, g and o: ``[T, N, 4 H]``, or ``[0]``."""
    if kernels := cell_kernels("lstm", inputs, weight):
        return kernels.forward(inputs, state, cell, begins, weight.contiguous(), dense(bias), keeps)
    num_envs, steps, _ = inputs.shape
    hidden = weight.shape[1]
    inputs, begins = time_major(inputs), time_major(begins.unsqueeze(-1))
    states, cells = (inputs.new_empty(steps, num_envs, hidden) for _ in range(2))
    kept = inputs.new_empty((steps, num_envs, 4 * hidden) if keeps else (0,))
    columns = weight.t()
    for t in range(steps):
        state, cell = state.masked_fill(begins[t], 0), cell.masked_fill(begins[t], 0)
        gates = add_bias(state, columns, bias).add_(inputs[t])
        into, forget, new, out = gates.chunk(4, -1)
        gates[:, : 2 * hidden].sigmoid_()
        new.tanh_()
        out.sigmoid_()
        cell = torch.addcmul(forget * cell, into, new, out=cells[t])
        state = torch.mul(out, cell.tanh(), out=states[t])
        if keeps:
            kept[t].copy_(gates)
    return env_major(states), env_major(cells), kept


@torch.library.custom_op("torchrl_perf::lstm_sequence_backward", mutates_args=())
def _backward(
    grad: Tensor,
    grad_cell: Tensor | None,
    states: Tensor,
    cells: Tensor,
    kept: Tensor,
    state: Tensor,
    cell: Tensor,
    begins: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of inputs ``[N, T, 4 H]``, which are those of the gates, of both initial states, weight and biases."""
    if kernels := cell_kernels("lstm", grad, weight):
        return kernels.backward(grad, grad_cell, (states, cells, kept, state, cell, begins, weight.contiguous()))
    of_cells = None if grad_cell is None else time_major(grad_cell)
    by_time = (time_major(each) for each in (states, cells))
    return _backward_loop(
        time_major(grad), of_cells, *by_time, kept, state, cell, time_major(begins.unsqueeze(-1)), weight
    )


def _backward_loop(
    grad: Tensor,
    grad_cell: Tensor | None,
    states: Tensor,
    cells: Tensor,
    kept: Tensor,
    state: Tensor,
    cell: Tensor,
    begins: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same, of time-major tensors."""
    steps, num_envs, hidden = states.shape
    before = torch.cat((state.unsqueeze(0), states[:-1])).masked_fill_(begins, 0)
    cell_before = torch.cat((cell.unsqueeze(0), cells[:-1])).masked_fill_(begins, 0)
    into, forget, new, out = kept.chunk(4, -1)
    squashed = cells.tanh()
    # what a step's gradient is multiplied by, for all steps at once: the loop is left with the recurrence
    by_out = squashed * out * (1 - out)
    to_cell = out * (1 - squashed * squashed)
    by_cell = torch.cat(
        (new * into * (1 - into), cell_before * forget * (1 - forget), into * (1 - new * new)), -1
    ).unflatten(-1, (3, hidden))
    of_gates = states.new_empty(steps, num_envs, 4 * hidden)
    carried, carried_cell = torch.zeros_like(state), torch.zeros_like(cell)
    for t in range(steps - 1, -1, -1):
        of_state = grad[t] + carried
        carried_cell = carried_cell if grad_cell is None else carried_cell + grad_cell[t]
        of_cell = torch.addcmul(carried_cell, of_state, to_cell[t])
        gates = of_gates[t].unflatten(-1, (4, hidden))
        torch.mul(of_cell.unsqueeze(-2), by_cell[t], out=gates[:, :3])
        torch.mul(of_state, by_out[t], out=gates[:, 3])
        carried = (of_gates[t] @ weight).masked_fill_(begins[t], 0)
        carried_cell = of_cell.mul_(forget[t]).masked_fill_(begins[t], 0)
    flat, of_bias = of_gates.flatten(0, 1), of_gates.sum((0, 1))
    of_weight = flat.t() @ before.flatten(0, 1)
    return env_major(of_gates), carried, carried_cell, of_weight, of_bias, of_bias.clone()


@_forward.register_fake
def _(
    inputs: Tensor, state: Tensor, cell: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None,
    input_bias: Tensor | None, keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_envs, steps, hidden = *inputs.shape[:2], weight.shape[1]
    kept = inputs.new_empty((steps, num_envs, 4 * hidden) if keeps else (0,))
    return inputs.new_empty(num_envs, steps, hidden), inputs.new_empty(num_envs, steps, hidden), kept


@_backward.register_fake
def _(
    grad: Tensor,
    grad_cell: Tensor | None,
    states: Tensor,
    cells: Tensor,
    kept: Tensor,
    state: Tensor,
    cell: Tensor,
    begins: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_envs, steps, hidden = states.shape
    of_states = states.new_empty(num_envs, hidden), states.new_empty(num_envs, hidden)
    of_parameters = (weight.new_empty(shape) for shape in ((4 * hidden, hidden), (4 * hidden,), (4 * hidden,)))
    return states.new_empty(num_envs, steps, 4 * hidden), *of_states, *of_parameters


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, state, cell, begins, weight, bias, input_bias, _ = inputs
    ctx.save_for_backward(*output, state, cell, begins, weight)
    ctx.has_bias, ctx.has_input_bias = bias is not None, input_bias is not None
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # few losses have a gradient of c


def _gradients(ctx: Any, grad: Tensor | None, grad_cell: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    grad = torch.zeros_like(ctx.saved_tensors[0]) if grad is None else grad
    backward = torch.ops.torchrl_perf.lstm_sequence_backward
    *of_others, of_weight, of_bias, of_input_bias = backward(grad, grad_cell, *ctx.saved_tensors)
    of_biases = grad_or_none(of_bias, ctx.has_bias), grad_or_none(of_input_bias, ctx.has_input_bias)
    return *of_others, None, of_weight, *of_biases, None


_forward.register_autograd(_gradients, setup_context=_setup_context)
refuse_second_gradients(_backward, "lstm_sequence")
