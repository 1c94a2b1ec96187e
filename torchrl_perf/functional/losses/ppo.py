"""The clipped surrogate objective of PPO (arXiv:1707.06347), as a function of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_perf.functional.parts import moments_of_all
from torchrl_perf.functional.rows.valid import spread
from torchrl_perf.functional.wide import compute_dtype, computed_wide

LEAST_STD = 1e-6  # as in TorchRL's losses
BLOCK = 1_024
"""Advantages that are summed up at once; blocks are merged."""


def normalized_advantage(
    advantage: Tensor, valid: Tensor | None = None, exclude_dims: Sequence[int] = (), *, least_std: float = LEAST_STD
) -> Tensor:
    """``(advantage - mean) / std`` of the rows that count; equal numbers and a single one give exactly 0.

    Args:
        advantage: any shape, floating point; 16 bits are widened to float32 first.
        valid: bool, of the leading dims of ``advantage``: the rows that count; the others become 0, whatever they hold.
            None if all count.
        exclude_dims: dims with separate statistics, such as that of agents; negative ones count from the end.
        least_std: lower bound of the (unbiased) standard deviation.

    Returns:
        The same shape, float64 for float64 and float32 otherwise.
    """
    advantage = advantage.to(compute_dtype(advantage))
    excluded = {dim % advantage.ndim for dim in exclude_dims}
    dims = [dim for dim in range(advantage.ndim) if dim not in excluded]
    if valid is not None:
        return _of_valid(advantage, spread(valid, advantage), dims, least_std)
    if not dims or all(advantage.shape[dim] == 1 for dim in dims) or not advantage.numel():
        return torch.zeros_like(advantage)
    if excluded:
        std, mean = torch.std_mean(advantage, dims, keepdim=True)
        low, high = advantage.amin(dims, keepdim=True), advantage.amax(dims, keepdim=True)
    else:
        std, mean, low, high = moments_of_all(advantage)
    # the rounded mean of equal numbers may differ from them, and that difference over so small a deviation is not 0;
    # infinite advantages become NaN, so that they are noticed
    return (advantage - mean) / std.clamp_min(least_std).masked_fill(low == high, torch.inf)


def _of_valid(advantage: Tensor, chosen: Tensor, dims: Sequence[int], least_std: float) -> Tensor:
    """:func:`normalized_advantage` of the elements in ``chosen``, of the same shape."""
    if not dims:
        return torch.zeros_like(advantage)
    count = chosen.sum(dims, keepdim=True)
    mean = torch.where(chosen, advantage, 0.0).sum(dims, keepdim=True) / count.clamp_min(1)
    centred = torch.where(chosen, advantage - mean, 0.0)
    std = (centred.square().sum(dims, keepdim=True) / (count - 1).clamp_min(1)).sqrt()
    low = torch.where(chosen, advantage, torch.inf).amin(dims, keepdim=True)
    high = torch.where(chosen, advantage, -torch.inf).amax(dims, keepdim=True)
    return torch.where((low == high) | ~chosen, 0.0, centred / std.clamp_min(least_std))


def advantage_summary(advantage: Tensor, valid: Tensor | None = None, *, batch_dims: int = 0) -> Tensor:
    """What a part of a minibatch tells the others of its advantages, for :func:`normalized_by`.

    Args:
        advantage: ``[*, ...]``, floating point.
        valid: bool, of its leading dims: the rows that count. None if all count.
        batch_dims: number of the dims ``[*]`` of several minibatches at once.

    Returns:
        ``[*, 5]`` float64: number, mean, sum of squared deviations from it, least and greatest of those that count.
    """
    chosen = torch.ones_like(advantage, dtype=torch.bool) if valid is None else spread(valid, advantage)
    chosen, values = (part.reshape(*part.shape[:batch_dims], -1) for part in (chosen, advantage.to(torch.float64)))
    # blocks whose numbers stay in registers: over a whole minibatch each sum would read and gather its rows anew
    blocks = 1 if values.shape[-1] % BLOCK else max(values.shape[-1] // BLOCK, 1)
    chosen, values = (part.unflatten(-1, (blocks, -1)) for part in (chosen, values))
    count = chosen.sum(-1).to(torch.float64)
    mean = torch.where(chosen, values, 0.0).sum(-1) / count.clamp_min(1.0)
    squares = torch.where(chosen, values - mean.unsqueeze(-1), 0.0).square().sum(-1)
    low, high = torch.where(chosen, values, torch.inf).amin(-1), torch.where(chosen, values, -torch.inf).amax(-1)
    parts = torch.stack([count, mean, squares, low, high], -1)
    return merged_summary(parts.movedim(-2, 0)) if blocks > 1 else parts.squeeze(-2)


def merged_summary(parts: Tensor) -> Tensor:
    """The summaries ``[*, 5]`` of minibatches from those of their parts, ``[R, *, 5]``."""
    counts, means, squares, low, high = parts.unbind(-1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp_min(1.0)
    total = (squares + counts * (means - mean).square()).sum(0)
    return torch.stack([count, mean, total, low.amin(0), high.amax(0)], -1)


def normalized_by(
    advantage: Tensor, summary: Tensor, valid: Tensor | None = None, *, least_std: float = LEAST_STD
) -> Tensor:
    """:func:`normalized_advantage` of a part of a minibatch, by the summary of the whole.

    Args:
        advantage: any shape, floating point.
        summary: ``[5]`` float64, as :func:`merged_summary` gives it.
        valid: bool, of its leading dims: the rows that count; the others become 0. None if all count.
        least_std: lower bound of the (unbiased) standard deviation.

    Returns:
        The same shape, float64 for float64 and float32 otherwise.
    """
    dtype = compute_dtype(advantage)
    count, mean, squares, low, high = summary.unbind()
    std = (squares / (count - 1.0).clamp_min(1.0)).sqrt().clamp_min(least_std)
    # divided once, and not for each row
    normal = (advantage.to(torch.float64) - mean) * std.masked_fill(low == high, torch.inf).reciprocal()
    return (normal if valid is None else torch.where(spread(valid, normal), normal, 0.0)).to(dtype)


@computed_wide
def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float
) -> tuple[Tensor, Tensor]:
    """``min(r A, clip(r, 1 - eps, 1 + eps) A)`` for the probability ratio ``r = exp(log_ratio)``.

    Args:
        log_ratio: ``[*]`` log-probability of the stored action under the policy, less the stored one.
        advantage: ``[*]``.
        low: ``log(1 - eps)``.
        high: ``log(1 + eps)``.

    Returns:
        The objective ``[*]``, to be maximised, and whether the ratio was clipped, ``[*]`` bool.
    """
    clipped = log_ratio.clamp(low, high)  # pyright: ignore[reportCallIssue]  (a float and a tensor may be mixed)
    gain = torch.minimum(log_ratio.exp() * advantage, clipped.exp() * advantage)
    return gain, clipped != log_ratio
