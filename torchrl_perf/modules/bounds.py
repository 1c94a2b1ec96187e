"""The bounds of continuous actions, read from a spec."""

from typing import Any, cast

import torch
from torch import Tensor
from torchrl.data import Bounded, TensorSpec


def action_bounds(spec: TensorSpec, *, finite: bool = True) -> tuple[Tensor, Tensor]:
    """Least and greatest actions of a spec ``[*, D]``; waits for the host, at construction.

    Args:
        spec: of floats.
        finite: refuse actions without bounds; otherwise theirs are infinite.

    Returns:
        ``[D]`` each, copies.

    Raises:
        ValueError: for another kind of spec, and for bounds that are infinite, leave no room between them, or differ
            between rows.
    """
    kinds = Bounded if finite else TensorSpec
    if not isinstance(spec, kinds) or not spec.dtype.is_floating_point or not spec.shape:
        raise ValueError(
            f"spec: expected continuous actions with bounds (Bounded [*, D], floating point), received "
            f"{type(spec).__name__} {list(spec.shape)} of {spec.dtype}. Remedy: EpsilonGreedy for discrete actions; a "
            "transform that bounds unbounded ones."
        )
    if not isinstance(spec, Bounded):
        limit = torch.full(spec.shape[-1:], torch.inf, dtype=spec.dtype, device=spec.device)
        return -limit, limit
    space = cast("Any", spec.space)
    low, high = (bound.reshape(-1, spec.shape[-1]) for bound in (space.low, space.high))
    allowed = (low < high) & (low == low[0]) & (high == high[0])
    if finite:
        allowed &= low.isfinite() & high.isfinite()
    if not bool(allowed.all()):
        raise ValueError(
            f"spec: expected {'finite ' if finite else ''}bounds with low < high, the same for all rows, received low "
            f"{low} and high {high}. Remedy: bound and scale the actions in a transform of the env."
        )
    return low[0].clone(), high[0].clone()
