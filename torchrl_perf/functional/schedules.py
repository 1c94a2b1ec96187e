"""Schedules in closed form: the value after any number of steps, at the same cost, from tensors alone.

A schedule computed from a counter cannot drift, resumes from the counter, and advances by 131,072 frames as cheaply as
by one. ``start``, ``end`` and ``steps`` may be tensors: a captured graph sees later changes of them.
"""

import torch
from torch import Tensor

from torchrl_perf.functional.wide import widened

Number = float | Tensor
ADAPTIVE_FACTOR = 1.5


def elapsed(step: Tensor, steps: Number) -> Tensor:
    """Share of the schedule that is over: ``min(step / steps, 1)``, and 1 for ``steps <= 0``.

    Args:
        step: steps taken so far, any shape, integer or float.
        steps: length of the schedule, in the same unit.

    Returns:
        float32 in [0, 1], shaped as ``step``.
    """
    step, steps = widened(step), _wide(steps)
    return torch.where(step >= steps, 1.0, step / steps)


def linear(step: Tensor, start: Number, end: Number, steps: Number) -> Tensor:
    """``start + (end - start) * min(step / steps, 1)``, exact at both ends.

    1 to .1 in 10 steps is .37 after 7 and .1 after 100.

    Args:
        step: steps taken so far, any shape.
        start: value at step 0.
        end: value from step ``steps`` on.
        steps: length of the schedule.

    Returns:
        float32, shaped as ``step``.
    """
    share = elapsed(step, steps)
    return _wide(start) * (1.0 - share) + _wide(end) * share


def exponential(step: Tensor, start: Number, end: Number, steps: Number) -> Tensor:
    """``start * (end / start) ** min(step / steps, 1)``: the same factor each step.

    Args:
        step: steps taken so far, any shape.
        start: value at step 0, positive.
        end: value from step ``steps`` on, positive.
        steps: length of the schedule.

    Returns:
        float32, shaped as ``step``.
    """
    share, start, end = elapsed(step, steps), _wide(start), _wide(end)
    if isinstance(start, Tensor) or isinstance(end, Tensor):
        ratio = torch.as_tensor(end / start, device=share.device)
        return torch.where(share >= 1.0, end, start * ratio**share)
    return torch.where(share >= 1.0, end, start * (end / start) ** share)


def adaptive(rate: Tensor, divergence: Tensor, desired: Number, least: Number, greatest: Number) -> Tensor:
    """A learning rate that follows the KL divergence of the updates, by the rule of rsl_rl (arXiv:2509.10771).

    It is divided by 1.5 where the divergence is above ``2 desired``, multiplied by 1.5 where it is between 0 and
    ``desired / 2``, and left alone otherwise, for a divergence that is not finite as well.

    Args:
        rate: 0-d.
        divergence: 0-d, of the policy before the step from the one that collected.
        desired: divergence that is aimed at.
        least: bound that a division does not cross.
        greatest: bound that a multiplication does not cross.

    Returns:
        0-d, of the rate's dtype.
    """
    wide, desired = widened(rate), _wide(desired)
    lower, higher = (wide / ADAPTIVE_FACTOR).clamp_min(least), (wide * ADAPTIVE_FACTOR).clamp_max(greatest)
    is_small = (divergence > 0.0) & (divergence < desired / 2.0)
    return torch.where(divergence > 2.0 * desired, lower, torch.where(is_small, higher, wide)).to(rate.dtype)


def _wide(number: Number) -> Number:
    """A number, or a tensor of at least 32 bits: in 16 a share of .999 is 1."""
    return widened(number) if isinstance(number, Tensor) else number
