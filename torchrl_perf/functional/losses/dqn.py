"""Deep Q-learning (arXiv:1312.5602) as functions of tensors: action values, double-Q targets, losses."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.functional.wide import computed_wide

LossKind = Literal["huber", "l2"]


def action_value(values: Tensor, action: Tensor) -> Tensor:
    """Value of the action that was taken.

    Args:
        values: ``[*, D]`` float, one value for each action.
        action: ``[*]`` int64 indices, or ``[*, D]`` one-hot of any dtype.

    Returns:
        ``[*]``.
    """
    if action.shape == values.shape:
        return (values * action).sum(-1)
    return values.gather(-1, action.unsqueeze(-1)).squeeze(-1)


@computed_wide
def q_targets(
    reward: Tensor,
    terminated: Tensor,
    discount: float | Tensor,
    target_values: Tensor,
    *,
    online_values: Tensor | None = None,
    action_mask: Tensor | None = None,
) -> Tensor:
    """``reward + discount * Q_target(s', argmax_a Q(s', a))``, without the second term where the step terminated.

    With ``online_values`` the next action is the online network's: double Q-learning (arXiv:1509.06461), which does
    not overestimate as the maximum of one noisy network does.

    Args:
        reward: ``[*]`` float; for n-step returns the discounted sum of the window.
        terminated: ``[*]`` bool. The next value of a terminated step may be anything, NaN included.
        discount: gamma, or gamma ** steps as a tensor that broadcasts to ``[*]``.
        target_values: ``[*, D]``, the target network's values of the true next observation.
        online_values: ``[*, D]``, the online network's, to choose the action; by default the target's own.
        action_mask: ``[*, D]`` bool, True for the actions that are allowed in the next state; all by default.

    Returns:
        ``[*]``.
    """
    choosing = target_values if online_values is None else online_values
    if action_mask is not None:
        choosing = choosing.masked_fill(~action_mask, -torch.inf)
    following = action_value(target_values, choosing.argmax(-1))
    return reward + torch.where(terminated, 0.0, discount * following)


@computed_wide
def q_loss(prediction: Tensor, target: Tensor, kind: LossKind = "huber", weight: Tensor | None = None) -> Tensor:
    """Mean loss of the temporal differences, weighted as prioritised replay asks (arXiv:1511.05952).

    Args:
        prediction: ``[*]`` values of the actions taken.
        target: ``[*]``, without gradient.
        kind: ``"huber"``, quadratic up to a difference of 1 and linear beyond, or ``"l2"``, the square.
        weight: ``[*]`` importance weights; the sum of the weighted losses is divided by that of the weights, as in
            TorchRL's losses. 1 by default.

    Returns:
        0-d.
    """
    distance = F.smooth_l1_loss if kind == "huber" else F.mse_loss
    if weight is None:
        return distance(prediction, target)
    losses = distance(prediction, target, reduction="none")
    total = weight.sum()
    # rows that count nothing at all add nothing
    return (losses * weight).sum() / torch.where(total == 0, 1.0, total)
