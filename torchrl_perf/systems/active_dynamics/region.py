"""How wrong a learned field is all over a region, wherever its data come from.

Dimension key: ``P`` points, ``S`` numbers of the learned state.
"""

import torch
from torch import Tensor

from torchrl_perf.envs.latent_field import LatentField
from torchrl_perf.systems.active_dynamics.evaluation import Alignment
from torchrl_perf.systems.active_dynamics.seq_vae import SeqVAE

__all__ = ["POINTS", "region_error", "region_points"]

POINTS = 15
"""Points along each axis of the region."""


def region_points(half_width: float, *, device: torch.device | None = None) -> Tensor:
    """Points ``[225, 2]`` evenly over the square ``[-half_width, half_width]^2``."""
    axis = torch.linspace(-half_width, half_width, POINTS, device=device)
    return torch.cartesian_prod(axis, axis)


@torch.no_grad()
def region_error(model: SeqVAE, env: LatentField, alignment: Alignment, points: Tensor, *, horizon: int) -> Tensor:
    """The share of the movement from points that predictions miss: 0 is perfect, 1 as if nothing moved.

    Each point follows the true field for ``horizon`` steps without inputs and noise, and so does its learned
    counterpart, by the inverse of the map, under the learned one: neither the filter nor the learner's own trajectory
    takes part. Both ends are compared in true coordinates. No host read.

    Args:
        model: the autoencoder.
        env: has the true field; its state is left alone.
        alignment: from learned to true states.
        points: ``[P, 2]``, true states.
        horizon: steps.

    Returns:
        ``sum |found - true|^2 / sum |true - start|^2`` over all points, 0-d, at least 0.
    """
    still = torch.zeros_like(points)
    true = points
    for _ in range(horizon):
        true = env.predict(true, still)
    inputs = still.unsqueeze(-2).expand(-1, horizon, -1)
    begin = (points - alignment.bias) @ torch.linalg.pinv(alignment.weight)
    found = alignment(model.predict(begin, inputs)[:, -1])
    return (found - true).square().sum() / (true - points).square().sum()
