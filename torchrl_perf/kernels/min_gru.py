"""Triton kernels of minGRU: gates, candidates, resets and the scan of a whole sequence, in one launch a direction.

Reference: :func:`torchrl_perf.functional.memory.linear.min_gru_sequence`. A program walks through time with some units
of one env, a tile of steps at a time, as those of :mod:`torchrl_perf.kernels.scan` do.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.gates import sigmoid
from torchrl_perf.kernels.launch import dense_rows, launch
from torchrl_perf.kernels.scan import scan_tile

__all__ = ["backward", "forward"]

NUMBERS = ["steps"]
MANY = 2**17
"""Units of all envs that fill a GPU with programs of 32 units."""


@triton.jit
def _read(inputs_ptr, begins_ptr, t, unit, steps, in_step, begin_step, H: tl.constexpr):
    """What gates and candidates are made of at some steps, and which of them begin an episode."""
    is_step = t < steps
    mask = is_step & (unit < H)
    gate = tl.load(inputs_ptr + t * in_step + unit, mask=mask, other=0.0)
    raw = tl.load(inputs_ptr + t * in_step + H + unit, mask=mask, other=0.0)
    return gate, raw, tl.load(begins_ptr + t * begin_step, mask=is_step, other=0) != 0


@triton.jit(do_not_specialize=NUMBERS)
def _forward_kernel(
    inputs_ptr, initial_ptr, begins_ptr, states_ptr, steps, in_row, in_step, begin_row, begin_step,
    H: tl.constexpr, STEPS: tl.constexpr, UNITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    unit = (tl.program_id(1) * UNITS + tl.arange(0, UNITS))[:, None]
    inputs_ptr += row * in_row
    begins_ptr += row * begin_row
    states_ptr += row * steps * H
    carry = tl.reshape(tl.load(initial_ptr + row * H + unit, mask=unit < H, other=0.0), [UNITS])
    t = tl.arange(0, STEPS)[None, :]
    gate, raw, first = _read(inputs_ptr, begins_ptr, t, unit, steps, in_step, begin_step, H)
    for _ in range(0, steps, STEPS):
        # the next tile is on its way while this one is solved
        ahead = _read(inputs_ptr, begins_ptr, t + STEPS, unit, steps, in_step, begin_step, H)
        is_step, update = t < steps, sigmoid(gate)
        decay = tl.where(is_step, tl.where(first, 0.0, 1.0 - update), 1.0)
        value = tl.where(is_step, update * tl.where(raw >= 0.0, raw + 0.5, sigmoid(raw)), 0.0)
        solved, carry = scan_tile(decay, value, carry, False, STEPS)
        tl.store(states_ptr + t * H + unit, solved, mask=is_step & (unit < H))
        gate, raw, first = ahead
        t += STEPS


@triton.jit
def _read_back(
    grad_ptr, states_ptr, inputs_ptr, initial_ptr, begins_ptr, t, unit, steps, grad_step, in_step, begin_step,
    H: tl.constexpr,
):  # fmt: skip
    """Of some steps: gate and flag of the step behind, gate, candidate and flag, gradient, and the state before."""
    is_step, follows = (t >= 0) & (t < steps), (t >= 0) & (t + 1 < steps)
    mask = is_step & (unit < H)
    following = tl.load(inputs_ptr + (t + 1) * in_step + unit, mask=follows & (unit < H), other=0.0)
    ends = tl.load(begins_ptr + (t + 1) * begin_step, mask=follows, other=0) != 0
    gate = tl.load(inputs_ptr + t * in_step + unit, mask=mask, other=0.0)
    raw = tl.load(inputs_ptr + t * in_step + H + unit, mask=mask, other=0.0)
    first = tl.load(begins_ptr + t * begin_step, mask=is_step, other=0) != 0
    grad = tl.load(grad_ptr + t * grad_step + unit, mask=mask, other=0.0)
    before = tl.load(states_ptr + (t - 1) * H + unit, mask=mask & (t > 0), other=0.0)
    before += tl.load(initial_ptr + unit + 0 * t, mask=mask & (t == 0), other=0.0)
    return following, ends, gate, raw, first, grad, before


@triton.jit(do_not_specialize=NUMBERS)
def _backward_kernel(
    grad_ptr, states_ptr, inputs_ptr, initial_ptr, begins_ptr, of_inputs_ptr, of_initial_ptr, steps, grad_row,
    grad_step, in_row, in_step, begin_row, begin_step,
    H: tl.constexpr, STEPS: tl.constexpr, UNITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    unit = (tl.program_id(1) * UNITS + tl.arange(0, UNITS))[:, None]
    grad_ptr += row * grad_row
    states_ptr += row * steps * H
    inputs_ptr += row * in_row
    begins_ptr += row * begin_row
    of_inputs_ptr += row * steps * 2 * H
    initial_ptr += row * H
    of_initial_ptr += row * H
    carry = tl.zeros([UNITS], tl.float32)
    tiles = tl.cdiv(steps, STEPS)
    t = (tiles * STEPS - 1 - tl.arange(0, STEPS))[None, :]  # backwards, so that the scan runs forwards
    following, ends, gate, raw, first, grad, before = _read_back(
        grad_ptr, states_ptr, inputs_ptr, initial_ptr, begins_ptr, t, unit, steps, grad_step, in_step, begin_step, H
    )
    for _ in range(tiles):
        ahead = _read_back(
            grad_ptr, states_ptr, inputs_ptr, initial_ptr, begins_ptr, t - STEPS, unit, steps, grad_step, in_step,
            begin_step, H,
        )  # fmt: skip
        mask = (t < steps) & (unit < H)
        # a gradient comes back through the gate of the step behind it
        decay = tl.where(t + 1 < steps, tl.where(ends, 0.0, 1.0 - sigmoid(following)), 1.0)
        grad, carry = scan_tile(decay, grad, carry, False, STEPS)
        update, low = sigmoid(gate), sigmoid(raw)
        before = tl.where(first, 0.0, before)
        candidate = tl.where(raw >= 0.0, raw + 0.5, low)
        place = of_inputs_ptr + t * 2 * H + unit
        tl.store(place, grad * (candidate - before) * update * (1.0 - update), mask=mask)
        tl.store(place + H, grad * update * tl.where(raw >= 0.0, 1.0, low * (1.0 - low)), mask=mask)
        of_first = tl.where(first, 0.0, grad * (1.0 - update))
        tl.store(of_initial_ptr + unit + 0 * t, of_first, mask=mask & (t == 0))
        following, ends, gate, raw, first, grad, before = ahead
        t -= STEPS


def forward(inputs: Tensor, initial: Tensor, begins: Tensor) -> Tensor:
    """States ``[N, T, H]``.

    Args:
        inputs: gate and candidate, ``[N, T, 2 H]`` float32.
        initial: ``[N, H]`` float32, contiguous.
        begins: bool ``[N, T]``.
    """
    (num_envs, steps, _), hidden = inputs.shape, initial.shape[1]
    inputs, states = dense_rows(inputs), inputs.new_empty(num_envs, steps, hidden)
    strides = inputs.stride(0), inputs.stride(1), begins.stride(0), begins.stride(1)
    args = (inputs, initial, begins.view(torch.uint8), states, steps, *strides)
    launch(_forward_kernel, *_plan(num_envs, hidden, args), num_warps=1)
    return states


def backward(grad: Tensor, states: Tensor, inputs: Tensor, initial: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of inputs ``[N, T, 2 H]`` and first state ``[N, H]``.

    Args:
        grad: of the states ``[N, T, H]``.
        states: as :func:`forward` gives them, of the same other arguments.
        inputs: gate and candidate.
        initial: the first state.
        begins: True where an episode begins.
    """
    num_envs, steps, hidden = states.shape
    grad, inputs = dense_rows(grad), dense_rows(inputs)
    of_inputs, of_initial = states.new_empty(num_envs, steps, 2 * hidden), torch.empty_like(initial)
    read = grad, states, inputs, initial, begins.view(torch.uint8)
    strides = [each.stride(dim) for each in (grad, inputs, begins) for dim in (0, 1)]
    args = (*read, of_inputs, of_initial, steps, *strides)
    launch(_backward_kernel, *_plan(num_envs, hidden, args), num_warps=1)
    return of_inputs, of_initial


def _plan(num_envs: int, hidden: int, args: tuple[Any, ...]) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, int]]:
    """Grid, arguments and constants of a launch: few units a program until that fills a GPU."""
    steps, units = (16, 16) if num_envs * hidden < MANY else (8, 32)
    grid = num_envs, triton.cdiv(hidden, units)
    return grid, args, {"H": hidden, "STEPS": steps, "UNITS": units}
