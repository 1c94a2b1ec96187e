"""Triton kernel of one Adam step of all parameters of an optimiser, and of targets that follow them, in one launch.

Each program owns a block of one parameter. It sums the squares that the gradients' kernel left
(:mod:`torchrl_perf.kernels.members`), all of them and in one order, so that every program knows the norm and whether
the step is to be taken without a launch of its own for that.

Reference: :func:`torchrl_perf.functional.adam.adam_step_`. Import this module only where Triton is.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.functional.adam import AdamSettings
from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.launch import launch

__all__ = ["BLOCK", "Columns", "Layout", "launch_step"]

BLOCK = 512
"""Numbers of a program."""
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _chosen(tensors, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The tensor that this program has a block of."""
    found = tensors[0]
    for p in tl.static_range(1, COUNT):
        found = tl.where(tl.program_id(0) >= FIRST[p], tensors[p], found)
    return found


@triton.jit
def _number(VALUES: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, SHIFT: tl.constexpr):
    """The number of a list that belongs to this program's parameter."""
    found = tl.program_id(0) * 0 + VALUES[SHIFT]
    for p in tl.static_range(1, COUNT):
        found = tl.where(tl.program_id(0) >= FIRST[p], VALUES[p + SHIFT], found)
    return found


@triton.jit
def _setting(VALUES: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The same of numbers that are not whole."""
    found = tl.full((), VALUES[0], tl.float32)
    for p in tl.static_range(1, COUNT):
        if VALUES[p] != VALUES[p - 1]:
            found = tl.where(tl.program_id(0) >= FIRST[p], VALUES[p], found)
    return found


@triton.jit
def _rate(rates, RATES: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The step size of this program's parameter."""
    rate_ptr = rates[RATES[0]]
    for p in tl.static_range(1, COUNT):
        if RATES[p] != RATES[p - 1]:
            rate_ptr = tl.where(tl.program_id(0) >= FIRST[p], rates[RATES[p]], rate_ptr)
    return tl.load(rate_ptr).to(tl.float32)


@triton.jit
def _moved(
    param, g, mean, spread, rate, decay, step, BETA1: tl.constexpr, LOG1: tl.constexpr, BETA2: tl.constexpr,
    LOG2: tl.constexpr, EPS: tl.constexpr, DECOUPLED: tl.constexpr,
):  # fmt: skip
    """Parameter and moments after a step."""
    value = param
    if DECOUPLED:
        value = param * (1.0 - rate * decay)
    else:
        g = g + decay * param
    # 1 - beta ** step would lose half of its digits in float32
    count = step.to(tl.float64)
    of_mean = (1.0 - tl.exp(count * LOG1)).to(tl.float32) if BETA1 > 0 else 1.0
    of_spread = tl.sqrt(1.0 - tl.exp(count * LOG2)).to(tl.float32) if BETA2 > 0 else 1.0
    mean += (1.0 - BETA1) * (g - mean)
    spread = BETA2 * spread + (1.0 - BETA2) * g * g
    return value - rate * (mean / of_mean) / (tl.sqrt(spread) / of_spread + EPS), mean, spread


@triton.jit
def _step_kernel(
    squares_ptr, loss_ptr, steps_ptr, norm_ptr, taken_ptr, norms_ptr, tau_ptr, values, grads, means, spreads, targets,
    rates, limit, tau,
    FIRST: tl.constexpr, SIZES: tl.constexpr, PLACES: tl.constexpr, NUMBERS: tl.constexpr, RATES: tl.constexpr,
    BETA1: tl.constexpr, LOG1: tl.constexpr, BETA2: tl.constexpr, LOG2: tl.constexpr, EPS: tl.constexpr,
    DECAY: tl.constexpr, DECOUPLED: tl.constexpr, SQUARES: tl.constexpr, PAD: tl.constexpr, TAIL: tl.constexpr,
    CLIPS: tl.constexpr, FOLLOWS: tl.constexpr, TAU_IS_TENSOR: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A block of the parameter that this program belongs to.

    The squares of parameter p are those from PLACES[p] on; the last TAIL parameters have none, but are one number each.
    """
    wait_for_previous(EARLY)
    COUNT: tl.constexpr = len(SIZES)
    program = tl.program_id(0)
    s = tl.arange(0, PAD)
    squares = tl.load(squares_ptr + s, mask=s < SQUARES, other=0.0)
    total = tl.sum(squares, 0)
    for p in tl.static_range(COUNT - TAIL, COUNT):
        alone = tl.load(grads[p])
        total += alone * alone
    norm = tl.sqrt(total)
    loss = tl.load(loss_ptr)
    applies = tl.maximum(tl.abs(norm), tl.abs(loss), propagate_nan=tl.PropagateNan.ALL) < _INFINITY
    first = _number(FIRST, FIRST, COUNT, 0)
    i = (program - first) * BLOCK + tl.arange(0, BLOCK)
    size = _number(SIZES, FIRST, COUNT, 0)
    mask = i < size
    is_changed = i < tl.where(applies, size, 0)
    g = tl.load(_chosen(grads, FIRST, COUNT) + i, mask=mask, other=0.0)
    number = _number(NUMBERS, FIRST, COUNT, 0)
    if program == first:
        is_own = (s >= _number(PLACES, FIRST, COUNT, 0)) & (s < _number(PLACES, FIRST, COUNT, 1))
        own = tl.sum(tl.where(is_own, squares, 0.0), 0)
        if TAIL > 0:
            own = tl.where(program >= FIRST[COUNT - TAIL], tl.sum(g * g, 0), own)
        tl.store(norms_ptr + number, tl.sqrt(own))
    if program == 0:
        tl.store(norm_ptr, norm)
        tl.store(taken_ptr, applies)
    if CLIPS:
        g = g / tl.maximum(norm / limit, 1.0)
    param_ptr = _chosen(values, FIRST, COUNT)
    mean_ptr = _chosen(means, FIRST, COUNT)
    spread_ptr = _chosen(spreads, FIRST, COUNT)
    param = tl.load(param_ptr + i, mask=mask, other=0.0)
    mean = tl.load(mean_ptr + i, mask=mask, other=0.0)
    spread = tl.load(spread_ptr + i, mask=mask, other=0.0)
    value, mean, spread = _moved(
        param, g, mean, spread, _rate(rates, RATES, FIRST, COUNT), _setting(DECAY, FIRST, COUNT),
        tl.load(steps_ptr + number) + 1.0, BETA1, LOG1, BETA2, LOG2, EPS, DECOUPLED,
    )  # fmt: skip
    tl.store(mean_ptr + i, mean, mask=is_changed)
    tl.store(spread_ptr + i, spread, mask=is_changed)
    tl.store(param_ptr + i, value, mask=is_changed)
    if FOLLOWS:
        target_ptr = _chosen(targets, FIRST, COUNT)
        target = tl.load(target_ptr + i, mask=mask, other=0.0)
        share = tau
        if TAU_IS_TENSOR:
            share = tl.load(tau_ptr).to(tl.float32)
        target += share * (tl.where(is_changed, value, param) - target)
        tl.store(target_ptr + i, target, mask=mask)


class Columns(NamedTuple):
    """Tensors of a step, one of each for every parameter: float32, dense and of equal strides."""

    params: tuple[Tensor, ...]
    means: tuple[Tensor, ...]
    """Of the gradients."""
    spreads: tuple[Tensor, ...]
    """Means of their squares."""
    targets: tuple[Tensor, ...]
    """What follows; may be empty."""
    steps: Tensor
    """Taken before, ``[P]`` float32, not written."""
    norms: Tensor
    """``[P]`` float32, written: the norm of each gradient."""


class Layout(NamedTuple):
    """What a launch needs to know beside its tensors."""

    places: Sequence[int]
    """The first square of each parameter and, behind them, how many there are; the last parameters, of one number each,
    may be missing."""
    groups: Sequence[int]
    """Which each parameter belongs to."""
    numbers: Sequence[int]
    """Where each one is in ``steps`` and ``norms``."""
    settings: Sequence[AdamSettings]
    """Of the groups, which differ in the weight decay alone."""
    limit: float
    """Largest norm; infinity for none."""


def launch_step(
    columns: Columns,
    grads: tuple[Tensor, ...],
    squares: Tensor,
    loss: Tensor,
    rates: tuple[Tensor, ...],
    tau: float | Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """The step, or none where the norm or the loss is not finite; targets follow in any case.

    Args:
        columns: what is written.
        grads: one for each parameter, with its strides.
        squares: float32, whose sum is the square of the norm of all gradients but those without a place.
        loss: 0-d float32.
        rates: step sizes of the groups, 0-d.
        tau: how far targets go.
        layout: of these.

    Returns:
        The norm, 0-d float32, and whether the step was taken, 0-d bool.
    """
    places, groups, numbers, settings, limit = layout
    params = columns.params
    tail = len(params) + 1 - len(places)
    blocks = [triton.cdiv(param.numel(), BLOCK) for param in params]
    first = tuple(itertools.accumulate(blocks, initial=0))
    norm, taken = squares.new_empty(()), squares.new_empty((), dtype=torch.bool)
    (beta1, beta2), eps, _, decoupled = settings[0]
    is_tensor = isinstance(tau, Tensor)
    constants: dict[str, Any] = {
        "FIRST": first[:-1], "SIZES": tuple(param.numel() for param in params),
        "PLACES": (*places, *[places[-1]] * tail), "NUMBERS": tuple(numbers), "RATES": tuple(groups),
        "BETA1": beta1, "LOG1": math.log(beta1) if beta1 else 0.0, "BETA2": beta2,
        "LOG2": math.log(beta2) if beta2 else 0.0, "EPS": eps,
        "DECAY": tuple(settings[group].weight_decay for group in groups), "DECOUPLED": decoupled,
        "SQUARES": places[-1], "PAD": triton.next_power_of_2(places[-1]), "TAIL": tail, "CLIPS": limit < math.inf,
        "FOLLOWS": len(columns.targets) > 0, "TAU_IS_TENSOR": is_tensor, "BLOCK": BLOCK,
    }  # fmt: skip
    launch(
        _step_kernel, (first[-1],),
        (
            squares, loss, columns.steps, norm, taken, columns.norms, tau if is_tensor else norm, params, grads,
            columns.means, columns.spreads, columns.targets or params, rates, min(limit, 3e38),
            0.0 if is_tensor else float(tau),
        ),
        constants, num_warps=4,
    )  # fmt: skip
    return norm, taken
