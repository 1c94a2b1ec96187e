"""The gated recurrent unit (arXiv:1406.1078, in the form of ``torch.nn.GRU``): one step, and a sequence with resets.

    r = sigmoid(W_ir x + b_ir + W_hr h + b_hr)
    z = sigmoid(W_iz x + b_iz + W_hz h + b_hz)
    n = tanh(W_in x + b_in + r (W_hn h + b_hn))
    h' = (1 - z) n + z h

The input's part ``W_i x + b_i`` of all steps is one matrix product outside of the recurrence. What is left runs as one
operator, ``torchrl_perf::gru_sequence``, with a backward pass of its own: one product a step instead of a graph of
eleven nodes a step, and the gradients of the weights from one product over all steps. A compiler sees one node,
whatever the number of steps. Dimension key: ``H`` hidden units.
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

__all__ = ["gru_cell", "gru_sequence", "gru_step"]


def gru_step(inputs: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One step of the recurrence.

    Args:
        inputs: ``W_i x + b_i``, ``[N, 3 H]``: reset, update and new gate.
        state: h of the step before, ``[N, H]``.
        weight: ``W_h``, ``[3 H, H]``.
        bias: ``b_h``, ``[3 H]``, or None.

    Returns:
        h of this step, ``[N, H]``.
    """
    gates = torch.nn.functional.linear(state, weight, bias)
    inputs = inputs.to(gates.dtype)
    (in_reset, in_update, in_new), (of_reset, of_update, of_new) = inputs.chunk(3, -1), gates.chunk(3, -1)
    reset, update = torch.sigmoid(in_reset + of_reset), torch.sigmoid(in_update + of_update)
    new = torch.tanh(in_new + reset * of_new)
    return new + update * (state - new)


def gru_cell(
    x: Tensor,
    state: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> Tensor:
    """One step from the input itself, as ``torch.nn.GRUCell``; on CUDA without a gradient in one launch.

    Args:
        x: ``[N, I]``.
        state: h of the step before, ``[N, H]``.
        weight_ih: ``W_i``, ``[3 H, I]``.
        weight_hh: ``W_h``, ``[3 H, H]``.
        bias_ih: ``b_i``, ``[3 H]``, or None.
        bias_hh: ``b_h``, ``[3 H]``; None where ``bias_ih`` is.

    Returns:
        h of this step, ``[N, H]``.
    """
    args = (x, state, weight_ih, weight_hh, bias_ih, bias_hh)
    if takes_one_launch(*args):
        return torch.ops.torchrl_perf.gru_cell(*args)
    return gru_step(torch.nn.functional.linear(x, weight_ih, bias_ih), state, weight_hh, bias_hh)


@torch.library.custom_op("torchrl_perf::gru_cell", mutates_args=())
def _cell(
    x: Tensor, state: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None, bias_hh: Tensor | None
) -> Tensor:
    if kernels := step_kernels(x):
        return kernels.gru(x, state, weight_ih, weight_hh, dense(bias_ih), dense(bias_hh))
    return gru_step(torch.nn.functional.linear(x, weight_ih, bias_ih), state, weight_hh, bias_hh)


@_cell.register_fake
def _(
    x: Tensor, state: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None, bias_hh: Tensor | None
) -> Tensor:
    return state.new_empty(state.shape)


def gru_sequence(
    inputs: Tensor,
    initial: Tensor,
    begins: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    input_bias: Tensor | None = None,
) -> Tensor:
    """All steps of ``[N, T]`` sequences; a row's state is 0 before each step that begins an episode.

    Args:
        inputs: ``W_i x + b_i``, ``[N, T, 3 H]``.
        initial: h before the first step, ``[N, H]``.
        begins: bool ``[N, T]``, True where an episode begins.
        weight: ``W_h``, ``[3 H, H]``.
        bias: ``b_h``, ``[3 H]``, or None.
        input_bias: ``b_i`` where ``inputs`` hold a copy without a gradient: it is found with that of ``b_h``, most of
            which is the same sum. It is not added.

    Returns:
        h of each step, ``[N, T, H]``, contiguous, in ``weight``'s dtype.
    """
    keeps = keeps_gates(inputs, initial, weight, bias, input_bias)
    inputs, initial = inputs.to(weight.dtype), initial.to(weight.dtype).contiguous()
    if is_transformed():
        return _of_steps(inputs, initial, begins, weight, bias)
    return torch.ops.torchrl_perf.gru_sequence(inputs, initial, begins, weight, bias, input_bias, keeps)[0]


def _of_steps(inputs: Tensor, state: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same, one step after the other, of operations that ``torch.func`` transforms."""
    states = []
    for now, begin in zip(inputs.unbind(1), begins.unsqueeze(-1).unbind(1), strict=True):
        state = gru_step(now, state.masked_fill(begin, 0), weight, bias)
        states.append(state)
    return torch.stack(states, 1)


@torch.library.custom_op("torchrl_perf::gru_sequence", mutates_args=())
def _forward(
    inputs: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None, input_bias: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """States ``[N, T, H]``, and for the backward pass r, z, n and ``W_hn h + b_hn``: ``[T, N, 4 H]``, or ``[0]``."""
    if kernels := cell_kernels("gru", inputs, weight):
        return kernels.forward(inputs, initial, begins, weight.contiguous(), dense(bias), keeps)
    num_envs, steps, _ = inputs.shape
    hidden = weight.shape[1]
    inputs, begins = time_major(inputs), time_major(begins.unsqueeze(-1))
    states = inputs.new_empty(steps, num_envs, hidden)
    kept = inputs.new_empty((steps, num_envs, 4 * hidden) if keeps else (0,))
    columns, state = weight.t(), initial
    for t in range(steps):
        state = state.masked_fill(begins[t], 0)
        gates = add_bias(state, columns, bias)
        both = (inputs[t, :, : 2 * hidden] + gates[:, : 2 * hidden]).sigmoid_()
        reset, update = both.chunk(2, -1)
        of_new = gates[:, 2 * hidden :]
        new = torch.addcmul(inputs[t, :, 2 * hidden :], reset, of_new).tanh_()
        if keeps:
            torch.cat((both, new, of_new), -1, out=kept[t])
        state = torch.lerp(new, state, update, out=states[t])
    return env_major(states), kept


@torch.library.custom_op("torchrl_perf::gru_sequence_backward", mutates_args=())
def _backward(
    grad: Tensor, states: Tensor, kept: Tensor, initial: Tensor, begins: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of inputs ``[N, T, 3 H]``, initial state, weight, bias and bias of the inputs."""
    if kernels := cell_kernels("gru", grad, weight):
        return kernels.backward(grad, states, kept, initial, begins, weight.contiguous())
    return _backward_loop(time_major(grad), time_major(states), kept, initial, time_major(begins.unsqueeze(-1)), weight)


def _backward_loop(
    grad: Tensor, states: Tensor, kept: Tensor, initial: Tensor, begins: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same, of time-major tensors."""
    steps, num_envs, hidden = states.shape
    before = torch.cat((initial.unsqueeze(0), states[:-1])).masked_fill_(begins, 0)
    reset, update, new, of_new = kept.chunk(4, -1)
    # what a step's gradient is multiplied by, for all steps at once: the loop is left with the recurrence
    by_new = (1 - update) * (1 - new * new)
    by_update = (before - new) * update * (1 - update)
    by_reset = of_new * reset * (1 - reset)
    of_gates = states.new_empty(steps, num_envs, 3 * hidden)
    of_inputs = states.new_empty(steps, num_envs, 3 * hidden)
    carried = torch.zeros_like(initial)
    for t in range(steps - 1, -1, -1):
        of_state = grad[t] + carried
        of_gates_t = of_gates[t]
        d_new = torch.mul(of_state, by_new[t], out=of_inputs[t, :, 2 * hidden :])
        torch.mul(d_new, by_reset[t], out=of_gates_t[:, :hidden])
        torch.mul(of_state, by_update[t], out=of_gates_t[:, hidden : 2 * hidden])
        torch.mul(d_new, reset[t], out=of_gates_t[:, 2 * hidden :])
        carried = torch.addmm(of_state * update[t], of_gates_t, weight).masked_fill_(begins[t], 0)
    of_inputs[..., : 2 * hidden] = of_gates[..., : 2 * hidden]
    flat, of_bias = of_gates.flatten(0, 1), of_gates.sum((0, 1))
    of_input_bias = torch.cat((of_bias[: 2 * hidden], of_inputs[..., 2 * hidden :].sum((0, 1))))
    return env_major(of_inputs), carried, flat.t() @ before.flatten(0, 1), of_bias, of_input_bias


@_forward.register_fake
def _(
    inputs: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None, input_bias: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (num_envs, steps, _), hidden = inputs.shape, weight.shape[1]
    return inputs.new_empty(num_envs, steps, hidden), inputs.new_empty((steps, num_envs, 4 * hidden) if keeps else (0,))


@_backward.register_fake
def _(
    grad: Tensor, states: Tensor, kept: Tensor, initial: Tensor, begins: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_envs, steps, hidden = states.shape
    shapes = (num_envs, steps, 3 * hidden), (num_envs, hidden), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,)
    return tuple(states.new_empty(shape) for shape in shapes)  # pyright: ignore[reportReturnType]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, initial, begins, weight, bias, input_bias, _ = inputs
    ctx.save_for_backward(*output, initial, begins, weight)
    ctx.has_bias, ctx.has_input_bias = bias is not None, input_bias is not None
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    found = torch.ops.torchrl_perf.gru_sequence_backward(grad, *ctx.saved_tensors)
    of_inputs, of_initial, of_weight, of_bias, of_input_bias = found
    of_biases = grad_or_none(of_bias, ctx.has_bias), grad_or_none(of_input_bias, ctx.has_input_bias)
    return of_inputs, of_initial, None, of_weight, *of_biases, None


_forward.register_autograd(_gradients, setup_context=_setup_context)
refuse_second_gradients(_backward, "gru_sequence")
