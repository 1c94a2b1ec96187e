"""Reduction of a loss's rows, with importance weights and rows that do not count."""

from typing import Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.functional.sac import weighted_mean

Reduction = Literal["none", "mean", "sum"]
REDUCTIONS = get_args(Reduction)


def reduce_rows(
    values: Tensor, weights: Tensor | None = None, valid: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """``sum(w x) / sum(w)`` over the rows that count, their weighted sum, or the weighted rows.

    Args:
        values: ``[*]``, one number for each row; anything in rows that do not count, NaN included.
        weights: ``[*]`` importance weights of prioritised replay (arXiv:1511.05952); 1 by default.
        valid: bool ``[*]``, True for the rows that count; all do by default.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, as in TorchRL's losses.

    Returns:
        0-d, or ``[*]`` with ``"none"``, where rows that do not count are 0. The mean of no row is 0.
    """
    if valid is not None:
        values = torch.where(valid, values, 0.0)
        weights = valid.to(values.dtype) if weights is None else torch.where(valid, weights, 0.0)
    if reduction == "none":
        return values if weights is None else values * weights
    if reduction == "sum":
        return values.sum() if weights is None else (values * weights).sum()
    if valid is None:
        return weighted_mean(values, weights)
    total = cast("Tensor", weights).sum()
    return (values * weights).sum() / torch.where(total > 0, total, 1.0)


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
