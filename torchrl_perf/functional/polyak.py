"""Target networks that follow slowly (arXiv:1509.02971)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.functional.wide import wide_dtype


def polyak_update_(targets: Sequence[Tensor], sources: Sequence[Tensor], tau: float | Tensor) -> None:
    """``target <- target + tau (source - target)`` for all tensors in one call, in place and without a host wait.

    Each step is computed in float32 at least and rounded to the target's dtype. A target of 16 bits does not move if a
    step is less than half of its last bit, which with a tau of .005 is nearly always so: keep targets in float32.
    Sources may be of another dtype.

    Args:
        targets: tensors that are overwritten, without a gradient.
        sources: tensors of the same shapes; no gradient flows to them.
        tau: in [0, 1], a number or a 0-d tensor on the device; 1 copies.

    Raises:
        ValueError: where the two lists differ in length.
    """
    if len(targets) != len(sources):
        raise ValueError(
            f"sources: expected {len(targets)} tensors, one for each target, received {len(sources)}. Remedy: one "
            "source for each target."
        )
    with torch.no_grad():
        if {tensor.dtype for tensor in (*targets, *sources)} == {torch.float32}:
            torch._foreach_lerp_(list(targets), list(sources), _weights(tau, targets))
            return
        wide = [target.to(wide_dtype(target.dtype)) for target in targets]
        converted = [source.to(target.dtype) for target, source in zip(wide, sources, strict=True)]
        torch._foreach_lerp_(wide, converted, _weights(tau, wide))
        for target, value in zip(targets, wide, strict=True):
            target.copy_(value)


def _weights(tau: float | Tensor, targets: Sequence[Tensor]) -> Any:
    """A number, or a 0-d tensor for each target in its dtype: as a number it would be read by the host."""
    if not isinstance(tau, Tensor):
        return tau
    by_dtype = {dtype: tau.to(dtype) for dtype in dict.fromkeys(target.dtype for target in targets)}
    return [by_dtype[target.dtype] for target in targets]
