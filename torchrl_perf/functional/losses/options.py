"""Options, actions that last (Sutton, Precup and Singh, Artificial Intelligence 112, 1999), as functions of tensors.

An option runs until it terminates, and with the episode. Its step n = 1, 2, ... has been executed when the question
whether it goes on is asked. All that counts between two choices is the semi-Markov transition (s, o, R, n, s'), with
``R = sum_(i < n) gamma^i r_(t+i)``, and s' the state in which the option ended.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_perf.functional.scan import linear_recurrence
from torchrl_perf.functional.wide import compute_dtype, computed_wide, widened

Number = float | Tensor


@computed_wide
def time_hazard(
    steps: Tensor,
    *,
    hazard_min: Number,
    hazard_max: Number,
    steepness: Number,
    cap: Number = 1.0,
    hard_max: bool | Tensor = True,
    ceiling: Number = 0.8,
) -> Tensor:
    """Probability of termination that rises with the time an option has run.

    ``min(ceiling * sigmoid(10 steepness (p - 1/2)), cap)``, ``p = (steps - hazard_min) / (hazard_max - hazard_min)``;
    0 for ``steps < hazard_min``, and 1 for ``steps >= hazard_max`` where ``hard_max``, whatever the cap. Without a hard
    maximum the hazard goes on as it is, and an option may run for long. ``steepness=0`` and a cap give a constant.

    Args:
        steps: executed steps, any shape, integer or float.
        hazard_min: steps before which the hazard is 0; broadcasts to ``steps``, as do the others.
        hazard_max: steps at which the curve is over; greater than ``hazard_min``.
        steepness: of the sigmoid.
        cap: greatest probability before the hard maximum.
        hard_max: whether ``hazard_max`` ends the option for certain.
        ceiling: the sigmoid's greatest value.

    Returns:
        Probabilities, float.
    """
    progress = (steps - hazard_min) / (hazard_max - hazard_min)
    rate = ceiling * torch.sigmoid(10.0 * steepness * (progress - 0.5))
    rate = rate.clamp(max=cap)  # pyright: ignore[reportCallIssue, reportArgumentType]
    rate = torch.where(steps < hazard_min, 0.0, rate)
    if isinstance(hard_max, bool):
        return torch.where(steps >= hazard_max, 1.0, rate) if hard_max else rate
    return torch.where(hard_max & (steps >= hazard_max), 1.0, rate)


class OpenOption(NamedTuple):
    """The option that is running between two batches: what goes into :func:`option_segments` and what comes out.

    Attributes:
        running: bool ``[*]``, whether the last step belonged to an option.
        steps: int64 ``[*]``, steps that it had executed.
        returns: float ``[*]``, their discounted reward.
        done: bool ``[*]``, whether the last step ended the episode.
    """

    running: Tensor
    steps: Tensor
    returns: Tensor
    done: Tensor


class Segments(NamedTuple):
    """What ends at each boundary of a batch; boundary j lies before step j, so that step j - 1 is the option's last.

    Attributes:
        ended: bool ``[*, T]``, whether an option ended there; the rest has no meaning where none did.
        steps: int64 ``[*, T]``, its duration n.
        returns: float ``[*, T]``, ``R = sum_(i < n) gamma^i r_i``.
        first: int64 ``[*, T]``, time index of its first step, negative for one in an earlier batch.
    """

    ended: Tensor
    steps: Tensor
    returns: Tensor
    first: Tensor


def option_segments(
    start: Tensor, done: Tensor, reward: Tensor, gamma: float | Tensor, before: OpenOption
) -> tuple[Segments, OpenOption]:
    """Durations and discounted returns of the options that end in a batch, in static shapes.

    An option begins at a step with ``start`` and ends where the next one begins, or with the episode. One that begins
    in a batch and ends in a later one is counted in the later one, from ``before``: however a stream is cut into
    batches, the same options come out. That the last step of a batch was an option's last is known at boundary 0 of the
    next one at the latest, and is told there. Steps without an option, before the first start of an episode, are none.

    Args:
        start: bool ``[*, T]``, whether an option was chosen at the step.
        done: bool ``[*, T]``, whether the step ended the episode, by termination or truncation.
        reward: ``[*, T]``.
        gamma: discount of a step, a float or a 0-d tensor.
        before: the state after the batch before, or that of :func:`no_option`.

    Returns:
        The segments, and the state for the next batch; returns are float64 if reward is float64, else float32.
    """
    time = torch.arange(start.shape[-1], device=start.device)
    new_episode = _shifted(done, before.done)
    last_start = torch.where(start, time, -1).cummax(-1).values
    last_reset = torch.where(new_episode, time, -1).cummax(-1).values
    begun = last_start >= 0
    carried = (last_reset < 0) & before.running.unsqueeze(-1)
    running = torch.where(begun, last_start >= last_reset, carried)
    steps = time + 1 + torch.where(begun, -last_start, before.steps.unsqueeze(-1))
    dtype = compute_dtype(reward)
    gamma = gamma.to(dtype) if isinstance(gamma, Tensor) else gamma
    discounted = reward.to(dtype) * torch.pow(gamma, (steps - 1).to(dtype))
    returns = linear_recurrence((~start).to(dtype), discounted, before.returns.to(dtype), time_dim=-1)

    ended = _shifted(running, before.running) & (start | new_episode)
    lengths = _shifted(steps, before.steps)
    segments = Segments(ended, lengths, _shifted(returns, before.returns.to(returns.dtype)), time - lengths)
    return segments, OpenOption(running[..., -1], steps[..., -1], returns[..., -1], done[..., -1])


def no_option(like: Tensor) -> OpenOption:
    """The state before the first batch: no option runs.

    Args:
        like: float ``[*]``, of which shape, dtype (at least float32) and device are taken.
    """
    return OpenOption(
        torch.zeros_like(like, dtype=torch.bool),
        torch.zeros_like(like, dtype=torch.int64),
        torch.zeros_like(widened(like)),
        torch.zeros_like(like, dtype=torch.bool),
    )


@computed_wide
def smdp_target(returns: Tensor, discount: Tensor, terminated: Tensor, next_value: Tensor) -> Tensor:
    """``R + gamma^n V(s')``, without the second term where the option ended in a terminal state.

    Args:
        returns: ``[*]`` discounted reward of the option.
        discount: ``[*]``, gamma to the power of its duration.
        terminated: ``[*]`` bool; what ``next_value`` says there is not looked at, NaN or not.
        next_value: ``[*]`` value of the state in which it ended.

    Returns:
        ``[*]`` without a gradient.
    """
    return (returns + torch.where(terminated, 0.0, discount * next_value)).detach()


@computed_wide
def arrival_value(values: Tensor, option: Tensor, termination: Tensor, available: Tensor | None = None) -> Tensor:
    """``U(s', o) = (1 - beta) Q(s', o) + beta max_o' Q(s', o')``: the value of arriving in s' with an option.

    The target of intra-option learning, which learns of an option from each of its steps.

    Args:
        values: ``[*, O]`` option values of s'.
        option: ``[*]`` int64, the one that is running.
        termination: ``[*]`` probability beta that it ends in s'.
        available: ``[*, O]`` bool, True for the options that may be chosen there, at least one; all by default.

    Returns:
        ``[*]``.
    """
    kept = values.gather(-1, option.unsqueeze(-1)).squeeze(-1)
    choices = values if available is None else values.masked_fill(~available, -torch.inf)
    return torch.lerp(kept, choices.amax(-1), termination)


@computed_wide
def masked_mean(values: Tensor, weights: Tensor) -> Tensor:
    """``sum(w x) / sum(w)`` over all elements, 0 where all weights are 0; what has weight 0 may be NaN.

    Args:
        values: any shape, floating point.
        weights: the same shape, not negative; bool counts as 0 and 1.

    Returns:
        0-d.
    """
    weights = weights.to(values.dtype)
    total = (torch.where(weights > 0, values, 0.0) * weights).sum()
    return total / weights.sum().clamp_min(torch.finfo(values.dtype).tiny)


@computed_wide
def masked_standardize(values: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean) / std`` of the elements in the mask, 0 elsewhere; fewer than two elements, or equal ones, give 0.

    Equal ones give 0 exactly: their mean, rounded, may be another number, whose distance would count as a deviation.

    Args:
        values: any shape, floating point.
        mask: the same shape, bool.

    Returns:
        The same shape. The standard deviation is the unbiased one, at least 1e-4, as in TorchRL's losses.
    """
    if values.numel() == 0:
        return torch.zeros_like(values)
    centred = torch.where(mask, values - masked_mean(values, mask), 0.0)
    count = mask.sum()
    variance = centred.square().sum() / (count - 1).clamp_min(1)
    equal = torch.where(mask, values, -torch.inf).amax() == torch.where(mask, values, torch.inf).amin()
    scaled = centred / variance.sqrt().clamp_min(1e-4).masked_fill(equal, torch.inf)
    return torch.where(count > 1, scaled, 0.0)


def _shifted(tensor: Tensor, first: Tensor) -> Tensor:
    """One step later in time: ``first`` and then all but the last step."""
    return torch.cat([first.unsqueeze(-1), tensor[..., :-1]], -1)
