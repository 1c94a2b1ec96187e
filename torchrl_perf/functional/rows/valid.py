"""Means over the rows that exist: absent agents and padding steps affect neither a result nor a gradient.

A row is left out by selection, never by a product with 0, so it may hold anything, NaN included. Sums are divided by
the number of rows that count; if none does, they are 0.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_perf.functional.losses.sac import weighted_mean
from torchrl_perf.functional.masked import of_rows
from torchrl_perf.functional.parts import mean_of_all, sum_of_all
from torchrl_perf.functional.wide import computed_wide

Reduction = Literal["none", "mean", "sum"]
REDUCTIONS = get_args(Reduction)


def fitted_rows(flag: Tensor, rows: Sequence[int], name: object = "valid") -> Tensor:
    """A flag of each row in the shape ``[*]`` of the rows.

    Args:
        flag: bool ``[*]`` or ``[*, 1]``; or of envs ``[N]``, for all agents of rows ``[N, A]``; or of agents
            ``[N, A]``, where a row is an env, ``[N]``, which counts if one of its agents does.
        rows: the shape ``[*]``.
        name: of the flag, for the error.

    Returns:
        bool ``[*]``.

    Raises:
        ValueError: for another dtype or shape.
    """
    fitted = of_rows(flag, rows)
    extra = fitted.ndim - len(rows)
    if extra > 0 and fitted.shape[: len(rows)] == torch.Size(rows):
        fitted = fitted.flatten(len(rows)).any(-1)
    fits = fitted.ndim == len(rows) and all(one in (1, size) for one, size in zip(fitted.shape, rows, strict=True))
    if flag.dtype != torch.bool or not fits:
        raise ValueError(
            f"{name}: expected bool {list(rows)} or {[*rows, 1]}, one for each row, received {flag.dtype} "
            f"{list(flag.shape)}. Remedy: a mask with the batch shape of the log-probabilities."
        )
    return fitted.expand(torch.Size(rows))


def spread(valid: Tensor, like: Tensor) -> Tensor:
    """``[*]`` flags over the dims that ``like [*, ...]`` has beyond them; a view."""
    return valid.reshape((*valid.shape, *(1,) * (like.ndim - valid.ndim))).expand_as(like)


@computed_wide
def kept(values: Tensor, valid: Tensor | None) -> Tensor:
    """The values ``[*, ...]`` of the rows that count, 0 in place of the others, to which no gradient flows."""
    return values if valid is None else torch.where(spread(valid, values), values, 0.0)


@computed_wide
def finite_where_absent(values: Tensor, valid: Tensor, fill: float = 0.0) -> Tensor:
    """The values ``[*, ...]``, with ``fill`` for what is not finite in rows that do not count.

    A network that reads such a row would give NaN, and the product of NaN with a gradient of 0 is NaN.
    """
    return torch.where(spread(valid, values) | values.isfinite(), values, fill)


@computed_wide
def valid_mean(values: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of the values ``[*, ...]`` of the rows that count, 0-d; 0 where none does.

    Args:
        values: ``[*, ...]``, floating point.
        valid: bool ``[*]``, or None where all count.
    """
    if valid is None:
        return mean_of_all(values)
    chosen = spread(valid, values)
    return sum_of_all(torch.where(chosen, values, 0.0)) / sum_of_all(chosen).clamp_min(1)


@computed_wide
def reduced(values: Tensor, valid: Tensor | None, reduction: str, weights: Tensor | None = None) -> Tensor:
    """Loss of each row, reduced as TorchRL's losses do.

    Args:
        values: ``[*, ...]``, floating point.
        valid: bool ``[*]``, or None where all count.
        reduction: ``"mean"`` over the rows that count, ``sum(w x) / sum(w)`` with weights; ``"sum"`` of them; or
            ``"none"``: each of them, 0 in the others.
        weights: ``[*]`` importance weights of prioritised replay (arXiv:1511.05952) of values ``[*]``; 1 by default.

    Returns:
        0-d, or ``[*, ...]`` for ``"none"``. The mean of no row is 0.
    """
    if reduction == "mean" and weights is None:
        return valid_mean(values, valid)
    values = kept(values, valid)
    if weights is not None:
        weights = kept(weights, valid)
        if reduction == "mean":
            return weighted_mean(values, weights)
        values = values * weights
    return sum_of_all(values) if reduction == "sum" else values


@computed_wide
def explained_variance(target: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
    """``1 - Var[target - value] / Var[target]`` over the rows that count.

    Args:
        target: ``[*, C]``.
        value: the same shape.
        valid: bool ``[*]``, or None where all count.

    Returns:
        ``[C]``; 1 is the best, and 0 that of a constant value.
    """
    eps = torch.finfo(target.dtype).eps
    rest, total = _variance(target - value, valid), _variance(target, valid)
    return 1.0 - rest / (total + eps)


def _variance(values: Tensor, valid: Tensor | None) -> Tensor:
    """Variance ``[C]`` of ``[*, C]`` over the rows, without Bessel's correction."""
    rows = values.flatten(0, -2)
    if valid is None:
        return torch.var(rows, dim=0, correction=0)
    chosen = valid.flatten().unsqueeze(-1)
    count = chosen.sum(0).clamp_min(1)
    mean = torch.where(chosen, rows, 0.0).sum(0) / count
    return torch.where(chosen, (rows - mean).square(), 0.0).sum(0) / count
