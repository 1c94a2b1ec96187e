"""The risk that a network of distributional values acts on."""

from typing import cast

import torch
from torch import Tensor, nn

from torchrl_perf.functional.losses.risk import Risk, RiskKind, check_risk, distort, distorted_mass


class RiskDistortion(nn.Module):
    """A :class:`~torchrl_perf.functional.Risk` whose parameter is a buffer.

    ``.to(device)`` moves it, ``state_dict`` holds it, and a captured graph honours what is written there in place, such
    as the level of each row before each action.

    Args:
        risk: kind and parameter ``eta``, a number or a tensor of the batch's shape ``[*]``.
        device: of the buffer.

    Attributes:
        eta: buffer, 0-d or ``[*]``.

    Raises:
        ValueError: for an unknown kind, or a number out of range.
    """

    eta: Tensor

    def __init__(self, risk: Risk, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.kind: RiskKind = cast("Risk", check_risk(risk)).kind
        self.register_buffer("eta", torch.as_tensor(risk.eta, dtype=torch.float32, device=device).clone())

    def _before(self, dims: int) -> Tensor:
        """``eta`` that broadcasts against a batch with ``dims`` further dims behind it."""
        return self.eta.reshape(*self.eta.shape, *[1] * dims) if self.eta.ndim else self.eta

    def levels(self, taus: Tensor) -> Tensor:
        """``[K]`` or ``[*, K]`` levels -> where to read the quantile function instead, ``[*, K]``."""
        return distort(taus, self._before(1), self.kind)

    def mass(self, cumulative: Tensor) -> Tensor:
        """Weights of a histogram for each action: ``[K]`` or ``[*, D, K]`` cumulative probabilities -> likewise."""
        return distorted_mass(cumulative, self._before(2), self.kind)


def make_risk(risk: Risk | None, device: torch.device) -> RiskDistortion | None:
    """The module, or None for none."""
    return None if risk is None else RiskDistortion(risk, device=device)
