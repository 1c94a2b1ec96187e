"""Rewards, values and advantages of several components, and their weighted sums."""

import torch
from torch import Tensor


def weighted_sum(components: Tensor, weights: Tensor) -> Tensor:
    """``sum_c w_c x_c``, where a component of weight 0 counts as 0 whatever its value, NaN included.

    Args:
        components: ``[*, C]`` float.
        weights: ``[C]``, or ``[*, C]`` for weights of each row.

    Returns:
        ``[*, 1]``.
    """
    weights = weights.to(components.dtype)
    return torch.where(weights == 0, 0.0, components * weights).sum(-1, keepdim=True)


def standardized_components(components: Tensor) -> Tensor:
    """Each component with mean 0 and standard deviation 1 over all the batch; 0 where all of it is equal.

    Args:
        components: ``[*, C]`` float.

    Returns:
        The same shape.
    """
    rows = components.reshape(-1, components.shape[-1])
    low, high = rows.amin(0), rows.amax(0)
    scale = rows.std(0, correction=0).clamp_min(1e-4)
    return torch.where(low == high, 0.0, (components - rows.mean(0)) / scale)
