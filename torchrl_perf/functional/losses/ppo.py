"""The clipped surrogate objective of PPO (arXiv:1707.06347), as a function of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_perf.functional.rows.valid import spread
from torchrl_perf.functional.wide import compute_dtype, computed_wide

LEAST_STD = 1e-6  # as in TorchRL's losses


def normalized_advantage(
    advantage: Tensor, valid: Tensor | None = None, exclude_dims: Sequence[int] = (), *, least_std: float = LEAST_STD
) -> Tensor:
    """``(advantage - mean) / std`` of the rows that count; equal numbers and a single one give exactly 0.

    Args:
        advantage: any shape, floating point; 16 bits are widened to float32 first.
        valid: bool, the leading dims of ``advantage``: the rows that count; the others become 0, whatever stands in
            them. None where all count.
        exclude_dims: dims that keep statistics of their own, such as that of agents; negative ones count from the end.
        least_std: the standard deviation, the unbiased one, counts as this at least.

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
        std, mean = torch.std_mean(advantage)
        low, high = advantage.aminmax()
    # the mean of equal numbers is rounded, and its distance from them over so small a deviation is not 0; infinite ones
    # become NaN, and are found
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
