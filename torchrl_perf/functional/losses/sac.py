"""The losses of soft actor-critic (arXiv:1812.05905), as functions of tensors."""

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.functional.parts import sum_of_all
from torchrl_perf.functional.wide import computed_wide


@computed_wide
def weighted_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """``sum(w x) / sum(w)`` over the rows, or the plain mean without weights, as TorchRL's losses reduce.

    Args:
        values: ``[B]``.
        weights: ``[B]`` importance weights of prioritised replay (arXiv:1511.05952), or None.

    Returns:
        0-d; 0 where all weights are.
    """
    if weights is None:
        return values.mean()
    total = sum_of_all(weights)
    return sum_of_all(values * weights) / torch.where(total == 0, 1.0, total)


@computed_wide
def critic_rows(value: Tensor, target: Tensor, loss_function: str = "l2") -> tuple[Tensor, Tensor]:
    """Loss of the K critics against one target in each row, summed over the critics.

    Args:
        value: ``[*, K]``.
        target: ``[*]``.
        loss_function: ``"l2"`` (the squared difference) or ``"smooth_l1"``, TorchRL's default.

    Returns:
        The loss ``[*]`` and, detached, the largest absolute difference of each row ``[*]``, its priority.
    """
    error = value - target.unsqueeze(-1)
    if loss_function == "smooth_l1":
        loss = F.smooth_l1_loss(value, target.unsqueeze(-1).expand_as(value), reduction="none")
    else:
        loss = error.square()
    return loss.sum(-1), error.detach().abs().amax(-1)


@computed_wide
def soft_target(
    reward: Tensor,
    terminated: Tensor,
    next_value: Tensor,
    next_log_prob: Tensor,
    alpha: Tensor,
    discount: Tensor | float,
) -> Tensor:
    """``r + discount (1 - terminated) (min_k Q_k(s', a') - alpha log pi(a' | s'))``, without a gradient.

    Args:
        reward: ``[B]``, summed over the steps of an n-step target.
        terminated: ``[B]`` bool: whether the next state is terminal; a truncated step bootstraps. The networks' values
            of terminal states are ignored, NaN or not.
        next_value: ``[B, K]`` the target critics' values of the next state and a fresh action.
        next_log_prob: ``[B]`` of that action.
        alpha: 0-d temperature.
        discount: gamma to the power of the steps to the next state, ``[B]`` or a number.

    Returns:
        ``[B]`` targets.
    """
    bootstrap = next_value.amin(-1) - alpha * next_log_prob
    return (reward + discount * torch.where(terminated, 0.0, bootstrap)).detach()
