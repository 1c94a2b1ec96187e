"""Linear recurrences as cells: minGRU (arXiv:2410.01201) and the linear recurrent unit (arXiv:2303.06349).

Their state does not pass through a nonlinearity on its way from step to step, so that a sequence is a scan over time
instead of a loop: the one that GAE uses, with a backward pass that is the same scan the other way round. Dimension key:
``H`` hidden units.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.functional.memory.rows import dense, takes_one_launch
from torchrl_perf.functional.scan import linear_recurrence, reverse_linear_recurrence
from torchrl_perf.kernels import linear_kernels, step_kernels
from torchrl_perf.runtime.upstream.tensors import is_transformed

__all__ = [
    "came_back",
    "came_back_differentiable",
    "lru_sequence",
    "lru_step",
    "min_gru_candidate",
    "min_gru_cell",
    "min_gru_sequence",
    "min_gru_slopes",
    "min_gru_step",
    "rotations",
    "scan",
]


def scan(decay: Tensor, value: Tensor, initial: Tensor) -> Tensor:
    """``y_t = value_t + decay_t y_(t-1)``, differentiable in all three, as one node of a graph.

    Args:
        decay: ``[N, T, H]``; exactly 0 cuts the recurrence.
        value: ``[N, T, H]``, of the same dtype.
        initial: y before the first step, ``[N, H]``.

    Returns:
        ``[N, T, H]`` in ``value``'s dtype; computed in at least float32.
    """
    if is_transformed():
        states, state = [], initial
        for kept, new in zip(decay.unbind(1), value.unbind(1), strict=True):
            # not 0 times a state, which may be infinite
            state = new + torch.where(kept == 0, 0.0, kept * state)
            states.append(state)
        return torch.stack(states, 1).to(value.dtype)
    return torch.ops.torchrl_perf.linear_scan(decay, value, initial)


@torch.library.custom_op("torchrl_perf::linear_scan", mutates_args=())
def _scan(decay: Tensor, value: Tensor, initial: Tensor) -> Tensor:
    solved = _recurrence(decay, value, initial).to(value.dtype).contiguous()
    return solved.clone() if solved is value else solved  # one step is the value itself


def _recurrence(decay: Tensor, value: Tensor, initial: Tensor) -> Tensor:
    """:func:`linear_recurrence`, of no envs too."""
    return linear_recurrence(decay, value, initial) if value.numel() else value


@torch.library.custom_op("torchrl_perf::linear_scan_backward", mutates_args=())
def _scan_backward(grad: Tensor, decay: Tensor, solved: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    of_decay, of_value, of_initial = _scan_slopes(grad, decay, solved, initial, came_back)
    # a compiler believes in the layout that it is told, so that there is one whatever comes in
    return of_decay.contiguous(), of_value.clone(memory_format=torch.contiguous_format), of_initial.contiguous()


def _scan_slopes(
    grad: Tensor, decay: Tensor, solved: Tensor, initial: Tensor, back: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of decay, value and first state."""
    of_value = back(decay, grad)
    before = torch.cat((initial.unsqueeze(1), solved[:, :-1]), 1)
    of_decay = torch.where(decay == 0, 0.0, of_value * before).to(decay.dtype)
    return of_decay, of_value, torch.where(decay[:, 0] == 0, 0.0, decay[:, 0] * of_value[:, 0])


def _following(decay: Tensor) -> Tensor:
    """The decay of the step behind each, 0 at the last."""
    return torch.cat((decay[:, 1:], torch.zeros_like(decay[:, :1])), 1)


def came_back(decay: Tensor, grad: Tensor) -> Tensor:
    """What comes back to each step of a scan, in ``grad``'s dtype: ``y_t = grad_t + decay_(t+1) y_(t+1)``.

    Args:
        decay: ``[N, T, H]``, of the scan.
        grad: of its results, ``[N, T, H]``.
    """
    if not grad.numel():
        return grad
    return reverse_linear_recurrence(_following(decay), grad.to(decay.dtype)).to(grad.dtype)


def came_back_differentiable(decay: Tensor, grad: Tensor) -> Tensor:
    """The same by :func:`scan`, which can be differentiated: of gradients that are themselves differentiated."""
    backwards = scan(_following(decay).flip(1), grad.to(decay.dtype).flip(1), torch.zeros_like(decay[:, 0]))
    return backwards.flip(1).to(grad.dtype)


@_scan.register_fake
def _(decay: Tensor, value: Tensor, initial: Tensor) -> Tensor:
    return value.new_empty(value.shape)


@_scan_backward.register_fake
def _(grad: Tensor, decay: Tensor, solved: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return decay.new_empty(decay.shape), grad.new_empty(grad.shape), initial.new_empty(initial.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    decay, _, initial = inputs
    ctx.save_for_backward(decay, output, initial)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled():
        return _scan_slopes(grad, *ctx.saved_tensors, came_back_differentiable)
    return torch.ops.torchrl_perf.linear_scan_backward(grad, *ctx.saved_tensors)


_scan.register_autograd(_gradients, setup_context=_setup_context)


# -- minGRU ----------------------------------------------------------------------------------------------------------


def min_gru_candidate(inputs: Tensor) -> Tensor:
    """``g`` of the paper, which keeps a state positive: ``x + 1/2`` above 0 and ``sigmoid(x)`` below."""
    return torch.where(inputs >= 0, inputs + 0.5, torch.sigmoid(inputs))


def min_gru_step(inputs: Tensor, state: Tensor) -> Tensor:
    """One step: ``h' = (1 - z) h + z g(c)`` with ``z = sigmoid`` of the gate's half of the inputs.

    Args:
        inputs: ``W x + b``, ``[N, 2 H]``: gate and candidate.
        state: h of the step before, ``[N, H]``.

    Returns:
        h of this step, ``[N, H]``.
    """
    gate, candidate = inputs.to(state.dtype).chunk(2, -1)
    return torch.lerp(state, min_gru_candidate(candidate), torch.sigmoid(gate))


def min_gru_cell(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One step from the input itself; on CUDA without a gradient in one launch.

    Args:
        x: ``[N, I]``.
        state: h of the step before, ``[N, H]``.
        weight: of gate and candidate, ``[2 H, I]``.
        bias: ``[2 H]``, or None.

    Returns:
        h of this step, ``[N, H]``.
    """
    if takes_one_launch(x, state, weight, bias):
        return torch.ops.torchrl_perf.min_gru_cell(x, state, weight, bias)
    return min_gru_step(torch.nn.functional.linear(x, weight, bias), state)


@torch.library.custom_op("torchrl_perf::min_gru_cell", mutates_args=())
def _cell(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if kernels := step_kernels(x):
        return kernels.min_gru(x, state, weight, dense(bias))
    return min_gru_step(torch.nn.functional.linear(x, weight, bias), state)


@_cell.register_fake
def _(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return state.new_empty(state.shape)


def min_gru_sequence(inputs: Tensor, initial: Tensor, begins: Tensor) -> Tensor:
    """All steps of ``[N, T]`` sequences; a row's state is 0 before each step that begins an episode.

    The paper solves it in logarithms, since its products of decays underflow there; the scan here multiplies decays of
    at most 1 alone, and needs none.

    Args:
        inputs: ``W x + b``, ``[N, T, 2 H]``.
        initial: h before the first step, ``[N, H]``.
        begins: bool ``[N, T]``, True where an episode begins.

    Returns:
        h of each step, ``[N, T, H]``.
    """
    inputs, initial = inputs.to(initial.dtype), initial.contiguous()
    if is_transformed():
        gate, candidate = inputs.chunk(2, -1)
        decay = torch.sigmoid(-gate).masked_fill(begins.unsqueeze(-1), 0)
        return scan(decay, torch.sigmoid(gate) * min_gru_candidate(candidate), initial)
    return torch.ops.torchrl_perf.min_gru_sequence(inputs, initial, begins)


def _solved(inputs: Tensor, initial: Tensor, begins: Tensor) -> Tensor:
    """The same of PyTorch's operations."""
    gate, candidate = inputs.chunk(2, -1)
    decay = torch.sigmoid(-gate).masked_fill(begins.unsqueeze(-1), 0)
    solved = _recurrence(decay, torch.sigmoid(gate) * min_gru_candidate(candidate), initial)
    return solved.to(inputs.dtype).contiguous()


def min_gru_slopes(
    grad: Tensor, states: Tensor, inputs: Tensor, initial: Tensor, begins: Tensor,
    back: Callable[[Tensor, Tensor], Tensor] = came_back_differentiable,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of inputs ``[N, T, 2 H]`` and first state ``[N, H]`` of minGRU, of PyTorch's operations.

    Args:
        grad: of the states, ``[N, T, H]``.
        states: of each step, ``[N, T, H]``.
        inputs: of :func:`min_gru_sequence`, as the next two.
        initial: h before the first step.
        begins: True where an episode begins.
        back: :func:`came_back`, or :func:`came_back_differentiable` where the gradients are differentiated.
    """
    gate, raw = inputs.chunk(2, -1)
    first, update, low = begins.unsqueeze(-1), torch.sigmoid(gate), torch.sigmoid(raw)
    decay = torch.sigmoid(-gate).masked_fill(first, 0)
    of_state = back(decay, grad.to(inputs.dtype))
    before = torch.cat((initial.unsqueeze(1), states[:, :-1]), 1).masked_fill(first, 0)
    of_gate = of_state * (min_gru_candidate(raw) - before) * update * (1 - update)
    of_raw = of_state * update * torch.where(raw >= 0, 1.0, low * (1 - low))
    return torch.cat((of_gate, of_raw), -1), (decay[:, 0] * of_state[:, 0]).contiguous()


@torch.library.custom_op("torchrl_perf::min_gru_sequence", mutates_args=())
def _min_gru(inputs: Tensor, initial: Tensor, begins: Tensor) -> Tensor:
    if kernels := linear_kernels(inputs):
        return kernels.forward(inputs, initial, begins)
    return _solved(inputs, initial, begins)


@torch.library.custom_op("torchrl_perf::min_gru_sequence_backward", mutates_args=())
def _min_gru_backward(
    grad: Tensor, states: Tensor, inputs: Tensor, initial: Tensor, begins: Tensor
) -> tuple[Tensor, Tensor]:
    if kernels := linear_kernels(inputs):
        return kernels.backward(grad, states, inputs, initial, begins)
    return min_gru_slopes(grad, states, inputs, initial, begins, came_back)


@_min_gru.register_fake
def _(inputs: Tensor, initial: Tensor, begins: Tensor) -> Tensor:
    num_envs, steps, width = inputs.shape
    return inputs.new_empty(num_envs, steps, width // 2)


@_min_gru_backward.register_fake
def _(grad: Tensor, states: Tensor, inputs: Tensor, initial: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    return inputs.new_empty(inputs.shape), initial.new_empty(initial.shape)


def _min_gru_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, *inputs)


def _min_gru_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        return *min_gru_slopes(grad, *ctx.saved_tensors), None
    return *torch.ops.torchrl_perf.min_gru_sequence_backward(grad, *ctx.saved_tensors), None


_min_gru.register_autograd(_min_gru_gradients, setup_context=_min_gru_context)


# -- linear recurrent unit -------------------------------------------------------------------------------------------


def rotations(angle: Tensor, num_steps: int) -> Tensor:
    """``angle * t`` for t from 1 to ``num_steps``, in one turn: ``[T, H]``.

    Args:
        angle: ``[H]``, radians a step.
        num_steps: T.
    """
    # in float64: after a thousand steps a float32 angle is off by more than a state's own rounding
    steps = torch.arange(1, num_steps + 1, dtype=torch.float64, device=angle.device)
    turned = steps.unsqueeze(-1) * angle.to(torch.float64)
    whole = (turned.detach() / (2 * torch.pi)).round() * (2 * torch.pi)
    return (turned - whole).to(angle.dtype)


def lru_step(real: Tensor, imaginary: Tensor, state: Tensor, decay: Tensor, angle: Tensor) -> Tensor:
    """One step of ``s' = decay e^(i angle) s + v`` of complex numbers.

    Args:
        real: real part of v, ``[N, H]``.
        imaginary: its imaginary part.
        state: real part and imaginary part of s, ``[N, 2 H]``.
        decay: ``[H]``, in (0, 1).
        angle: ``[H]``, radians a step.

    Returns:
        s', ``[N, 2 H]``.
    """
    past, past_imaginary = state.chunk(2, -1)
    cos, sin = decay * angle.cos(), decay * angle.sin()
    return torch.cat((real + cos * past - sin * past_imaginary, imaginary + sin * past + cos * past_imaginary), -1)


def lru_sequence(
    real: Tensor, imaginary: Tensor, initial: Tensor, begins: Tensor, decay: Tensor, angle: Tensor
) -> Tensor:
    """All steps of ``[N, T]`` sequences; a row's state is 0 before each step that begins an episode.

    The state is solved in coordinates that turn with it, ``e^(-i angle t) s_t``, in which its decay is a real number:
    two real scans.

    Args:
        real: real part of v, ``[N, T, H]``.
        imaginary: its imaginary part.
        initial: s before the first step, ``[N, 2 H]``.
        begins: bool ``[N, T]``, True where an episode begins.
        decay: ``[H]``, in (0, 1).
        angle: ``[H]``, radians a step.

    Returns:
        s of each step, ``[N, T, 2 H]``.
    """
    turned = rotations(angle, real.shape[1])
    cos, sin = turned.cos(), turned.sin()
    values = torch.cat((real * cos + imaginary * sin, imaginary * cos - real * sin), -1)
    decays = torch.cat((decay, decay)).expand_as(values).masked_fill(begins.unsqueeze(-1), 0)
    real, imaginary = scan(decays, values, initial).chunk(2, -1)
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), -1)
