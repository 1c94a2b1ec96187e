"""Target networks that follow slowly (arXiv:1509.02971)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def polyak_update_(targets: Sequence[Tensor], sources: Sequence[Tensor], tau: float | Tensor) -> None:
    """``target <- target + tau (source - target)`` for all tensors in one call, in place and without a host wait.

    Args:
        targets: tensors that are overwritten, without a gradient.
        sources: tensors of the same shapes; no gradient flows to them.
        tau: in [0, 1], a number or a 0-d tensor on the device; 1 copies.

    Raises:
        ValueError: where the two lists differ in length.
    """
    if len(targets) != len(sources):
        raise ValueError(f"sources: expected {len(targets)} tensors, one for each target, received {len(sources)}.")
    # a 0-d tensor in the place of a number would be read by the host
    weight: Any = [tau] * len(targets) if isinstance(tau, Tensor) else tau
    with torch.no_grad():
        torch._foreach_lerp_(list(targets), list(sources), weight)
