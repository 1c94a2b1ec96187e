"""How good placements of breaks are: the same many fires for each of them.

Dimension key: ``R`` placements, ``H``, ``W`` cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_perf.envs.fuel_breaks.fire import burn
from torchrl_perf.envs.fuel_breaks.words import MAX_FIRES, burn_probability, burned_cells

__all__ = ["Assessment", "assess"]


@dataclass(frozen=True)
class Assessment:
    """Outcomes of many fires for R placements.

    Attributes:
        burned: mean share of all cells that burned, float64 ``[R]``.
        error: its standard error, float64 ``[R]``. Differences between placements have smaller errors, since the fires
            are the same.
        probability: share of the fires that burned each cell, float64 ``[R, H, W]``.
        fires: number of fires of each placement.
    """

    burned: Tensor
    error: Tensor
    probability: Tensor
    fires: int


def assess(
    breaks: Tensor,
    burnable: Tensor,
    threshold: Tensor,
    *,
    fires: int = 1024,
    neighbours: int = 8,
    sweeps: int | None = None,
    seed: int = 0,
) -> Assessment:
    """Light the same fires in each of R placements and let them burn out.

    Args:
        breaks: bool ``[R, H, W]``.
        burnable: bool ``[R, H, W]`` or ``[1, H, W]``, the landscape.
        threshold: int32 ``[R, D, H, W]`` or ``[1, D, H, W]`` of its bonds, see
            :func:`~torchrl_perf.envs.fuel_breaks.fire.thresholds`.
        fires: how many, rounded up to a multiple of 64.
        neighbours: 8 or 4.
        sweeps: of a fire.
        seed: names the fires.

    Returns:
        Mean, error and map of each placement.

    Raises:
        ValueError: for fewer than one fire.
    """
    if fires < 1:
        raise ValueError(f"fires: expected at least 1, received {fires}. Remedy: fires=1 or more.")
    groups = -(-fires // MAX_FIRES)
    seeds = torch.arange(groups, device=breaks.device) + seed * 1_000_003
    cells, probability = [], []
    for number in range(breaks.shape[0]):
        ground = burnable[number % len(burnable)].unsqueeze(0)
        free = ground & ~breaks[number]
        words = burn(
            seeds,
            free.expand(groups, -1, -1),
            ground,
            threshold[number % len(threshold)].unsqueeze(0),
            fires=MAX_FIRES,
            neighbours=neighbours,
            sweeps=sweeps,
        )
        cells.append(burned_cells(words, MAX_FIRES).flatten().double() / free[0].numel())
        probability.append(burn_probability(words, MAX_FIRES, torch.float64).mean(0))
    shares = torch.stack(cells)
    count = shares.shape[1]
    return Assessment(shares.mean(1), shares.std(1) / math.sqrt(count), torch.stack(probability), count)
