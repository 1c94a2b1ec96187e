"""Triton kernels of an optimiser's step: norms of all gradients in one launch, and Adam's step of all parameters.

PyTorch's fused kernels give a block of threads 65,536 numbers, so that of a policy's parameters a dozen blocks are made
and most of the device waits for them. Here a program has 1,024, of whichever tensor: all tensors are arguments, and a
program selects its own by its number.

Reference: :func:`torchrl_perf.functional.adam.adam_steps_`. Import this module only where Triton is.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.launch import launch

BLOCK = 1024
"""Numbers of a program."""
MANY = 48
"""Parameters of a launch, whose addresses are arguments."""


@triton.jit
def _chosen(tensors, part, FIRST: tl.constexpr):
    """Where the tensor of a part begins: that whose parts begin last at or before it."""
    address = tensors[0].to(tl.int64)
    for number in tl.static_range(1, len(FIRST)):
        address = tl.where(part >= FIRST[number], tensors[number].to(tl.int64), address)
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def _span(part, SIZES: tl.constexpr, FIRST: tl.constexpr):
    """The number of a part's tensor, the part's number in it, and the tensor's size."""
    tensor = part * 0
    first = part * 0
    size = part * 0 + SIZES[0]
    for number in tl.static_range(1, len(FIRST)):
        is_later = part >= FIRST[number]
        tensor = tl.where(is_later, number, tensor)
        first = tl.where(is_later, FIRST[number], first)
        size = tl.where(is_later, SIZES[number], size)
    return tensor, part - first, size


@triton.jit
def norms_kernel(
    count_ptr, part_ptr, norm_ptr, grads, SIZES: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr,
    COLS: tl.constexpr, PAD: tl.constexpr, WIDE: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Sum of squares of a part of a gradient; the program that is done last adds the parts, in a fixed order."""
    wait_for_previous(EARLY)
    part = tl.program_id(0)
    tensor, piece, size = _span(part, SIZES, FIRST)
    at = piece * SPAN + tl.arange(0, SPAN)
    grad = tl.load(_chosen(grads, part, FIRST) + at, mask=at < size, other=0.0)
    tl.store(part_ptr + tensor * COLS + piece, tl.sum(grad * grad, 0))
    done = tl.atomic_add(count_ptr, 1)  # releases what was stored, and acquires what the others stored
    if done == PARTS - 1:
        row = tl.arange(0, PAD)
        parts = row * 0  # of each tensor
        for number in tl.static_range(len(FIRST)):
            parts = tl.where(row == number, tl.cdiv(SIZES[number], SPAN), parts)
        total = tl.zeros((PAD,), dtype=tl.float32)
        for first in range(0, COLS, WIDE):
            col = first + tl.arange(0, WIDE)
            mask = col[None, :] < parts[:, None]
            place = part_ptr + (row * COLS)[:, None] + col[None, :]
            total += tl.sum(tl.load(place, mask=mask, other=0.0, cache_modifier=".cg"), 1)
        tl.store(norm_ptr + row, tl.sqrt(total), mask=row < len(SIZES))
        tl.store(count_ptr, 0)


@triton.jit
def adam_kernel(
    lr_ptr, scale_ptr, skip_ptr, step_ptr, tau_ptr, values, grads, means, squares, targets, SIZES: tl.constexpr,
    FIRST: tl.constexpr, STEPS: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, BETA1: tl.constexpr,
    BETA2: tl.constexpr, EPS: tl.constexpr, DECAY: tl.constexpr, DECOUPLED: tl.constexpr, FOLLOW: tl.constexpr,
    SPAN: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Adam's step of a part of a parameter, and what follows it; nothing of the first where ``skip`` is 1."""
    wait_for_previous(EARLY)
    part = tl.program_id(0)
    tensor, piece, size = _span(part, SIZES, FIRST)
    at = piece * SPAN + tl.arange(0, SPAN)
    mask = at < size
    param_ptr = _chosen(values, part, FIRST) + at
    if tl.load(skip_ptr) == 0.0:
        grad = tl.load(_chosen(grads, part, FIRST) + at, mask=mask, other=0.0) / tl.load(scale_ptr)
        mean_ptr = _chosen(means, part, FIRST) + at
        square_ptr = _chosen(squares, part, FIRST) + at
        mean = tl.load(mean_ptr, mask=mask, other=0.0)
        square = tl.load(square_ptr, mask=mask, other=0.0)
        param = tl.load(param_ptr, mask=mask, other=0.0)
        lr = tl.load(lr_ptr)
        step = tl.load(step_ptr + tensor * STEPS).to(tl.float64)
        # 1 - beta ** step would lose half of its digits in float32
        first = (1.0 - tl.exp(step * LOG1)).to(tl.float32)
        second = tl.sqrt(1.0 - tl.exp(step * LOG2)).to(tl.float32)
        if DECAY != 0.0 and DECOUPLED:
            param *= 1.0 - lr * DECAY
        elif DECAY != 0.0:
            grad += DECAY * param
        mean += (1.0 - BETA1) * (grad - mean)
        square = BETA2 * square + (1.0 - BETA2) * grad * grad
        param -= lr / first * mean / (tl.sqrt(square) / second + EPS)
        tl.store(mean_ptr, mean, mask=mask)
        tl.store(square_ptr, square, mask=mask)
        tl.store(param_ptr, param, mask=mask)
    if FOLLOW:
        target_ptr = _chosen(targets, part, FIRST) + at
        target = tl.load(target_ptr, mask=mask, other=0.0)
        following = target + tl.load(tau_ptr) * (tl.load(param_ptr, mask=mask, other=0.0) - target)
        tl.store(target_ptr, following, mask=mask)


def _layout(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Sizes of the tensors, the first part of each, the number of all parts, and the most of one."""
    sizes = tuple([tensor.numel() for tensor in tensors])
    counts = [max(1, -(-size // BLOCK)) for size in sizes]
    *first, parts = itertools.accumulate(counts, initial=0)
    return sizes, tuple(first), parts, max(counts)


def workspace(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What :func:`norms` of these tensors, or of some of them, keeps between two calls: a count, and partial sums."""
    device = tensors[0].device
    room = len(tensors) * _layout(tensors)[3]
    return torch.zeros((), dtype=torch.int32, device=device), torch.empty(room, device=device)


def norms(grads: Sequence[Tensor], count: Tensor, room: Tensor) -> Tensor:
    """Norm of each gradient, ``[P]``.

    Args:
        grads: contiguous float32.
        count: of :func:`workspace`.
        room: of :func:`workspace`.
    """
    out = room.new_empty(len(grads))
    for start in range(0, len(grads), MANY):
        some = tuple(grads[start : start + MANY])
        sizes, first, parts, cols = _layout(some)
        launch(
            norms_kernel, (parts,), (count, room, out[start:], some),
            {
                "SIZES": sizes, "FIRST": first, "PARTS": parts, "COLS": cols,
                "PAD": triton.next_power_of_2(len(some)), "WIDE": min(64, triton.next_power_of_2(cols)), "SPAN": BLOCK,
            },
            num_warps=4,
        )  # fmt: skip
    return out


def adam_(
    lists: tuple[Sequence[Tensor], ...],
    steps: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor],
    settings: Any,
    targets: Sequence[Tensor] = (),
    tau: Tensor | None = None,
) -> None:
    """One step in place.

    Args:
        lists: parameters, their gradients, means of those and of their squares: contiguous float32.
        steps: ``[P]`` float32, this one counted.
        numbers: step size, what gradients are divided by, and 1 to take no step: 0-d float32 each.
        settings: an :class:`~torchrl_perf.functional.adam.AdamSettings`.
        targets: shaped as the parameters, which move by ``tau`` towards them after the step, even if that is skipped.
        tau: 0-d float32.
    """
    (beta1, beta2), eps, decay, decoupled = settings
    for start in range(0, len(lists[0]), MANY):
        part = [tuple(each[start : start + MANY]) for each in lists]
        sizes, first, parts, _ = _layout(part[0])
        following = tuple(targets[start : start + MANY]) if targets else part[0]
        launch(
            adam_kernel, (parts,),
            (*numbers, steps[start:], numbers[0] if tau is None else tau, *part, following),
            {
                "SIZES": sizes, "FIRST": first, "STEPS": steps.stride(0),
                "LOG1": math.log(beta1) if beta1 else -math.inf, "LOG2": math.log(beta2) if beta2 else -math.inf,
                "BETA1": beta1, "BETA2": beta2, "EPS": eps, "DECAY": decay, "DECOUPLED": decoupled,
                "FOLLOW": bool(targets), "SPAN": BLOCK,
            },
            num_warps=4,
        )  # fmt: skip
