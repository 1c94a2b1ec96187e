"""The clipped surrogate objective of PPO (arXiv:1707.06347), as a function of tensors."""

import torch
from torch import Tensor

from torchrl_perf.functional.wide import computed_wide


@computed_wide
def normalized_advantage(advantage: Tensor) -> Tensor:
    """``(advantage - mean) / std`` over all elements; constants and a single element give 0 exactly.

    Args:
        advantage: any shape, floating point.

    Returns:
        The same shape and dtype. The standard deviation is the unbiased one, at least 1e-4, as in TorchRL's losses.
    """
    if advantage.numel() < 2:
        return torch.zeros_like(advantage)
    std, mean = torch.std_mean(advantage)
    # the rounded mean of equal numbers may be another number; what is not finite stays so
    least, greatest = torch.aminmax(advantage)
    return (advantage - mean) / std.clamp_min(1e-4).masked_fill(least == greatest, torch.inf)


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
