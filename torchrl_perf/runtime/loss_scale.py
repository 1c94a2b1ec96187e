"""The scale of a float16 loss, adapted on the device."""

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["LossScale"]


class LossScale:
    """Factor on a loss whose float16 gradients would vanish, lowered where they overflow (arXiv:1710.03740).

    ``torch.amp.GradScaler`` without a host read: scale, counter and flag are tensors that are updated in place, so that
    the scale adapts inside of a captured graph too. A step: ``scaled(loss).backward()``, ``check(norm)``, an optimiser
    that divides by ``scale`` and skips on ``overflow``, ``update()``.

    Args:
        device: of the tensors.
        initial: scale at the start; lower than GradScaler's 65,536, since losses of values are large.
        interval: steps without an overflow after which the scale is doubled.

    Raises:
        ValueError: for a scale below 1 or not finite, which an overflow could not lower, or an interval below 1.

    Attributes:
        scale: float32 0-d, at least 1.
        steps: steps since the last change, int32 0-d.
        overflow: bool 0-d: the last gradients were not finite, and a smaller scale may help. At scale 1 it is False:
            the gradients themselves are bad.
        finite: bool 0-d, whether the last gradients were finite.
    """

    def __init__(self, device: torch.device | str, *, initial: float = 2.0**12, interval: int = 2_000) -> None:
        if not 1.0 <= initial < math.inf or interval < 1:
            raise ValueError(
                f"LossScale: expected a finite initial >= 1 and interval >= 1, received {initial} and {interval}. "
                "Remedy: the defaults."
            )
        self.interval = interval
        self.scale = torch.tensor(float(initial), dtype=torch.float32, device=device)
        self.steps = torch.zeros((), dtype=torch.int32, device=device)
        self.overflow = torch.zeros((), dtype=torch.bool, device=device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """``loss * scale``, float32, or float64 for a loss of that dtype."""
        return (loss if loss.dtype == torch.float64 else loss.float()) * self.scale

    def check(self, norm: Tensor) -> Tensor:
        """Sets ``overflow`` from the norm of the scaled gradients, 0-d, and returns the norm without the scale."""
        self.finite.copy_(norm.isfinite())
        self.overflow.copy_(~self.finite & (self.scale > 1))
        return norm / self.scale

    def update(self) -> None:
        """Halves the scale after an overflow, doubles it after ``interval`` steps without one."""
        steps = (self.steps + 1) * self.finite
        grows = steps >= self.interval
        factor = torch.where(self.finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.scale.copy_((self.scale * factor).clamp(1.0, 2.0**60))
        self.steps.copy_(torch.where(grows, 0, steps))

    def state_dict(self) -> dict[str, Any]:
        """Scale and counter."""
        return {"scale": self.scale, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` in place: a captured graph stays valid."""
        self.scale.copy_(state_dict["scale"])
        self.steps.copy_(state_dict["steps"])
