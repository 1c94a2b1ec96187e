"""From inputs to pushes: what an input does to a point, which a learner does not know."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["ACTION_ENCODERS", "ActionEncoder", "make_action_encoder"]

ACTION_ENCODERS = ("identity", "linear", "mlp")
_HIDDEN = 16


class ActionEncoder(nn.Module):
    """A fixed random map from inputs and points, ``[*, 2]`` each, to pushes ``[*, 2]``.

    * ``"identity"``: the input itself.
    * ``"linear"``: ``M a``, with M a rotation and scales from .7 to 1.3 along its axes, the same everywhere.
    * ``"mlp"``: ``M a + .3 |a| W tanh(V [a, z])``: what an input does depends on where the point is, and not in
      proportion to its size. Without an input there is no push.

    Args:
        kind: one of these names.
        seed: names the random numbers, which are the same on every device.
        device: of the buffers.
        dtype: of the buffers.

    Raises:
        ValueError: for an unknown kind.
    """

    weight: Tensor
    inner_weight: Tensor
    outer_weight: Tensor

    def __init__(
        self,
        kind: str,
        *,
        seed: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if kind not in ACTION_ENCODERS:
            raise ValueError(
                f"action_encoder: expected one of {list(ACTION_ENCODERS)} or a function, received {kind!r}. Remedy: "
                "one of these."
            )
        self.kind = kind
        if kind == "identity":
            return
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(3, dtype=torch.float64, generator=generator)
        angle, scales = 2.0 * math.pi * uniform[0], 0.7 + 0.6 * uniform[1:]
        turn = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos())).view(2, 2)
        tables = {"weight": turn * scales}
        if kind == "mlp":
            tables["inner_weight"] = torch.randn(_HIDDEN, 4, dtype=torch.float64, generator=generator)
            outer = torch.randn(2, _HIDDEN, dtype=torch.float64, generator=generator)
            tables["outer_weight"] = 0.3 * outer / math.sqrt(_HIDDEN)
        for name, table in tables.items():
            self.register_buffer(name, table.to(device=device, dtype=dtype))

    def forward(self, action: Tensor, latent: Tensor) -> Tensor:
        """Pushes ``[*, 2]`` of inputs ``[*, 2]`` at points ``[*, 2]``."""
        if self.kind == "identity":
            return action
        push = _product(action, self.weight)
        if self.kind == "linear":
            return push
        bent = _product(torch.tanh(_product(torch.cat((action, latent), -1), self.inner_weight)), self.outer_weight)
        return push + action.norm(dim=-1, keepdim=True) * bent


def _product(values: Tensor, weight: Tensor) -> Tensor:
    """``W v``, elementwise, so that a row's result does not depend on the number of rows."""
    return (values.unsqueeze(-2) * weight).sum(-1)


def make_action_encoder(kind: str, *, seed: int, device: torch.device, dtype: torch.dtype) -> ActionEncoder | None:
    """The encoder of a name; None for the identity, which needs no work."""
    encoder = ActionEncoder(kind, seed=seed, device=device, dtype=dtype)
    return None if kind == "identity" else encoder
