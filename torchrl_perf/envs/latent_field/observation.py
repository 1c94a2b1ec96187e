"""From points of the plane to many channels, with and without noise.

Dimension key: ``D`` channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["NOISES", "OBSERVATIONS", "ObservationMap", "draw_observation"]

OBSERVATIONS = ("log_linear", "linear", "identity", "mlp")
NOISES = ("none", "gaussian", "poisson")
MAX_RATE = 1e6
"""Most counts expected in a bin: beyond it float32 cannot tell neighbouring counts apart."""
_HIDDEN = 16


class ObservationMap(nn.Module):
    """A fixed random map from points ``[*, 2]`` to the means of D channels ``[*, D]``.

    * ``"identity"``: the point itself, D = 2.
    * ``"linear"``: ``C z + b`` with ``C ~ N(0, 1) / sqrt(2)`` and ``b = 0``.
    * ``"log_linear"``: ``exp(C z + b) dt``, expected counts in a bin of length ``dt``; the same ``b`` in all channels,
      such that the mean over channels and over a circle around the origin is ``rate``. Capped at a million.
    * ``"mlp"``: two layers, ``W_2 tanh(W_1 z + b_1)``, with 16 hidden units.

    Args:
        kind: one of these names.
        size: D.
        dt: length of a bin, in which the log-linear map counts; the others have no bins.
        rate: mean of the log-linear map; unused by the others.
        radius: of the circle; unused by the others.
        seed: names the random numbers, which are the same on every device.
        device: of the buffers.
        dtype: of the buffers.

    Raises:
        ValueError: for an unknown kind, a size below 1 (or other than 2 for the identity), a rate that is not positive.
    """

    weight: Tensor
    bias: Tensor
    inner_weight: Tensor
    inner_bias: Tensor

    def __init__(
        self,
        kind: str,
        size: int,
        *,
        dt: float = 0.1,
        rate: float = 1.0,
        radius: float = 1.0,
        seed: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _check_kind(kind, size, rate)
        self.kind, self.size, self.dt = kind, size, dt
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        tables: dict[str, Tensor] = {}
        if kind in ("linear", "log_linear"):
            tables["weight"] = normal(size, 2) / math.sqrt(2.0)
            tables["bias"] = torch.zeros(size, dtype=torch.float64)
        if kind == "log_linear":
            # The mean of exp(c . z) over a circle of radius R is the modified Bessel function I_0(|c| R).
            mean = torch.special.i0(tables["weight"].norm(dim=-1) * radius).mean()
            tables["bias"] += math.log(rate / dt) - mean.log()
        if kind == "mlp":
            tables["inner_weight"], tables["inner_bias"] = normal(_HIDDEN, 2), 0.5 * normal(_HIDDEN)
            tables["weight"] = normal(size, _HIDDEN) / math.sqrt(_HIDDEN)
        for name, table in tables.items():
            self.register_buffer(name, table.to(device=device, dtype=dtype))

    def forward(self, z: Tensor) -> Tensor:
        """Means ``[*, D]`` at points ``[*, 2]``."""
        if self.kind == "identity":
            return z.clone()
        if self.kind == "mlp":
            return torch.tanh(_affine(z, self.inner_weight, self.inner_bias)) @ self.weight.T
        scores = _affine(z, self.weight, self.bias)
        if self.kind == "linear":
            return scores
        return (scores.exp() * self.dt).clamp(max=MAX_RATE)


def draw_observation(mean: Tensor, noise: str, std: float) -> Tensor:
    """Observations of the means ``[*, D]``: themselves, with normal noise, or counts.

    Args:
        mean: ``[*, D]``; of ``"poisson"`` at least 0. Where it is NaN there are no counts.
        noise: ``"none"``, ``"gaussian"`` or ``"poisson"``.
        std: standard deviation of the normal noise; unused by the others.

    Returns:
        ``[*, D]`` of the same dtype, a new tensor, or the mean itself without noise.
    """
    if noise == "gaussian":
        return mean + std * torch.randn_like(mean)
    if noise == "poisson":
        # A rejection sampler would loop for ever on a rate that is NaN.
        return torch.poisson(torch.nan_to_num(mean, nan=0.0, posinf=MAX_RATE))
    return mean


def _affine(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``W z + b`` for two inputs, elementwise, so that a row's result does not depend on the number of rows."""
    x, y = z.unsqueeze(-2).unbind(-1)
    return x * weight[:, 0] + y * weight[:, 1] + bias


def _check_kind(kind: str, size: int, rate: float) -> None:
    if kind not in OBSERVATIONS:
        raise ValueError(f"observation: expected one of {list(OBSERVATIONS)}, received {kind!r}. Remedy: one of these.")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"observation_size: expected a positive int, received {size!r}. Remedy: 1 or more.")
    if kind == "identity" and size != 2:
        raise ValueError(
            f"observation_size: expected 2 with observation='identity', received {size}. Remedy: leave it out, or "
            "observation='linear'."
        )
    if not 0.0 < rate < MAX_RATE:
        raise ValueError(
            f"rate: expected a positive number of counts in a bin, received {rate!r}. Remedy: rate=5.0, for example."
        )
