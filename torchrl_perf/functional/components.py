"""Rewards, values and advantages of several components, and their weighted sums."""

import torch
from torch import Tensor

from torchrl_perf.functional.wide import computed_wide, widened


def weighted_sum(components: Tensor, weights: Tensor) -> Tensor:
    """``sum_c w_c x_c``, where a component of weight 0 counts as 0 whatever its value, NaN included.

    Args:
        components: ``[*, C]`` float.
        weights: ``[C]``, or ``[*, C]`` for weights of each row.

    Returns:
        ``[*, 1]``, in the dtype of the components.
    """
    values = widened(components)
    weights = weights.to(values.dtype)
    return torch.where(weights == 0, 0.0, values * weights).sum(-1, keepdim=True).to(components.dtype)


@computed_wide
def standardized_components(components: Tensor) -> Tensor:
    """Each component with mean 0 and standard deviation 1 over all the batch; 0 where all of it is equal.

    Args:
        components: ``[*, C]`` float.

    Returns:
        The same shape.
    """
    rows = components.reshape(-1, components.shape[-1])
    width = rows.amax(0) - rows.amin(0)
    scale = rows.std(0, correction=0).clamp_min(1e-4)
    return torch.where(width == 0, 0.0, (components - rows.mean(0)) / scale)
