"""Categorical distributions over the allowed actions of each row, defined for rows without any.

A row that allows no action acts as if it allowed action 0 alone: that action has log-probability 0, the entropy is 0
and no gradient reaches the logits. So no result is NaN, and the host need not check for such rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_perf.functional.wide import computed_wide, widened

UNROLLED = 8
"""Longest sum of a row that Inductor writes out in place of a reduction."""


def effective_mask(mask: Tensor) -> Tensor:
    """The mask itself, and action 0 where a row allows none.

    Args:
        mask: ``[*, D]`` bool, True for the allowed actions.

    Returns:
        ``[*, D]`` bool with at least one True in each row.
    """
    first = torch.arange(mask.shape[-1], device=mask.device) == 0
    return mask | (first & ~mask.any(-1, keepdim=True))


def of_rows(flag: Tensor, rows: Sequence[int]) -> Tensor:
    """A flag for each row, in a shape that broadcasts to rows ``[*]``.

    Args:
        flag: ``[*]`` or ``[*, 1]``; or the same of envs ``[N]``, for all agents of rows ``[N, A]``.
        rows: the batch shape ``[*]``.

    Returns:
        ``[*]``, or such that it broadcasts to it; a view.
    """
    if flag.ndim > len(rows):
        flag = flag.squeeze(-1)
    while flag.ndim < len(rows):
        flag = flag.unsqueeze(-1)
    return flag


def of_agents(mask: Tensor, values: Tensor) -> Tensor:
    """A mask of actions, in a shape that broadcasts to values ``[*, D]``.

    Args:
        mask: ``[*, D]``; or ``[N, D]`` of envs, for all agents of values ``[N, A, D]``.
        values: ``[*, D]``.

    Returns:
        A view.
    """
    while mask.ndim < values.ndim:
        mask = mask.unsqueeze(-2)
    return mask


def mask_of_indices(indices: Tensor, num_actions: int, padding_value: int | None = None) -> Tensor:
    """A mask of the actions that are listed.

    Args:
        indices: int64 ``[*, K]``.
        num_actions: D.
        padding_value: entries that stand for no action; None for none.

    Returns:
        ``[*, D]`` bool.
    """
    shape = (*indices.shape[:-1], num_actions)
    listed = torch.ones_like(indices) if padding_value is None else (indices != padding_value).to(indices.dtype)
    place = indices if padding_value is None else torch.where(listed > 0, indices, 0)
    counts = torch.zeros(shape, dtype=indices.dtype, device=indices.device)
    return counts.scatter_add(-1, place, listed) > 0


@computed_wide
def masked_log_softmax(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log-probabilities of the allowed actions, ``-inf`` for the others.

    Args:
        logits: ``[*, D]`` float; those of actions that are not allowed may be anything, NaN included.
        mask: bool, broadcasts to ``[*, D]``, True for the allowed actions; all by default.

    Returns:
        ``[*, D]``. The gradient is 0 for actions that are not allowed, and in rows that allow one action or none.
    """
    if mask is None:
        return logits.log_softmax(-1)
    # in a row that allows none, the logit of action 0 is ignored too
    forced = effective_mask(mask) & ~mask
    return logits.masked_fill(~mask, -torch.inf).masked_fill(forced, 0.0).log_softmax(-1)


@computed_wide
def masked_expectation(log_probs: Tensor, values: Tensor) -> Tensor:
    """``sum_d p_d x_d``, where actions of probability 0 count as 0 whatever their value.

    Args:
        log_probs: ``[*, D]``, ``-inf`` where an action is not allowed.
        values: ``[*, D]``.

    Returns:
        ``[*]``, differentiable in both.
    """
    probs = log_probs.exp()
    return (probs * values.masked_fill(probs == 0, 0.0)).sum(-1)


@computed_wide
def masked_entropy(log_probs: Tensor) -> Tensor:
    """``-sum_d p_d log p_d`` over the possible actions, exact.

    Args:
        log_probs: ``[*, D]``, ``-inf`` where an action is not allowed.

    Returns:
        ``[*]`` nats, 0 for rows with one possible action.
    """
    return -masked_expectation(log_probs, log_probs)


@computed_wide
def masked_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(p || q) = sum_d p_d (log p_d - log q_d)``, exact.

    Args:
        log_p: ``[*, D]``, ``-inf`` where an action is not allowed.
        log_q: ``[*, D]``, likewise.

    Returns:
        ``[*]`` nats; infinite, as it should be, where ``q`` excludes an action that ``p`` takes.
    """
    # masked before the difference: (-inf) - (-inf) is NaN, and so would be its gradient
    possible = log_p != -torch.inf
    gap = log_p.masked_fill(~possible, 0.0) - log_q.masked_fill(~possible, 0.0)
    return masked_expectation(log_p, gap)


def chosen(values: Tensor, index: Tensor) -> Tensor:
    """The value of each row at an index, as ``values.gather(-1, index).squeeze(-1)``.

    Compiled, of up to eight values all are read and one is kept, bit for bit the same: the gradient of a gather fills a
    tensor with zeros and adds to it, in launches of their own.

    Args:
        values: ``[*, D]`` float.
        index: int64 ``[*, 1]``.

    Returns:
        ``[*]``.
    """
    if not torch.compiler.is_compiling() or values.shape[-1] > UNROLLED:
        return values.gather(-1, index).squeeze(-1)
    hit = index == torch.arange(values.shape[-1], device=values.device)
    return torch.where(hit, values, 0.0).sum(-1)


def gumbel_argmax(log_probs: Tensor, uniform: Tensor | None = None) -> Tensor:
    """A draw from each row by the Gumbel-max trick: ``argmax(log p + G)``; an action of ``-inf`` is never drawn.

    Args:
        log_probs: ``[*, D]``, normalised or not. The noise of 16 bits would be drawn in float32 all the same: with a
            thousand equal actions the first would have 40 times the share of the last.
        uniform: ``[*, D]`` numbers in [0, 1), float32, or float64 for float64; fresh ones by default.

    Returns:
        ``[*]`` int64.
    """
    log_probs = widened(log_probs)
    limits = torch.finfo(log_probs.dtype)
    # a draw of exactly 0 (one in 2**24) or 1 would give an infinite noise, level with the actions that are never drawn
    if uniform is None:
        uniform = torch.rand(log_probs.shape, dtype=log_probs.dtype, device=log_probs.device)
    noise = uniform.clamp(limits.tiny, 1 - limits.eps / 2)
    return (log_probs.detach() - (-noise.log()).log()).argmax(-1)
