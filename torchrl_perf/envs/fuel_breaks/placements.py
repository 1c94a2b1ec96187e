"""Placements of fuel breaks that need no learning: random, a column, a cross, and the cells of highest centrality.

Dimension key: ``N`` rows, ``H``, ``W`` cells.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_perf.envs.fuel_breaks.betweenness import betweenness
from torchrl_perf.envs.fuel_breaks.domirank import domirank

__all__ = ["betweenness_breaks", "column_breaks", "cross_breaks", "domirank_breaks", "first_cells", "random_breaks"]


def first_cells(score: Tensor, allowed: Tensor, budget: int) -> Tensor:
    """The ``budget`` allowed cells of the highest scores, equal ones in row-major order; fewer where fewer are allowed.

    Args:
        score: ``[N, H, W]`` or ``[H, W]``, finite.
        allowed: bool ``[N, H, W]``.
        budget: number of cells.

    Returns:
        bool ``[N, H, W]``.
    """
    flat = allowed.flatten(1)
    ranked = score.expand(allowed.shape).flatten(1).masked_fill(~flat, -torch.inf)
    place = ranked.sort(dim=1, descending=True, stable=True).indices[:, :budget]
    return (torch.zeros_like(flat).scatter(1, place, True) & flat).view(allowed.shape)


def random_breaks(burnable: Tensor, budget: int, *, generator: torch.Generator | None = None) -> Tensor:
    """``budget`` burnable cells at random, all sets equally likely: bool ``[N, H, W]`` of bool ``[N, H, W]``."""
    score = torch.rand(burnable.shape, generator=generator, dtype=torch.float64, device=burnable.device)
    return first_cells(score, burnable, budget)


def column_breaks(burnable: Tensor, budget: int) -> Tensor:
    """The middle column from north to south, then those beside it: bool ``[N, H, W]`` of bool ``[N, H, W]``.

    A column of a square grid needs as many breaks as it has rows, 5 % of 20 x 20 cells; with fewer there is a gap.
    """
    width = burnable.shape[-1]
    away = torch.arange(width, device=burnable.device) - width // 2
    order = 2 * away.abs() - (away < 0).long()  # complete one column before the next
    return first_cells(-order.double().expand(burnable.shape), burnable, budget)


def cross_breaks(burnable: Tensor, budget: int) -> Tensor:
    """The middle column and row, from the middle outwards: bool ``[N, H, W]`` of bool ``[N, H, W]``.

    A whole cross of 20 x 20 cells is 39 breaks.
    """
    rows, columns = (
        (torch.arange(side, device=burnable.device) - side // 2).abs().double() for side in burnable.shape[-2:]
    )
    near = torch.minimum(rows.unsqueeze(-1), columns) * sum(burnable.shape[-2:])
    return first_cells(-(near + rows.unsqueeze(-1) + columns), burnable, budget)


def domirank_breaks(burnable: Tensor, budget: int, *, neighbours: int = 8, share: float = 0.5) -> Tensor:
    """The burnable cells of the highest DomiRank: bool ``[N, H, W]`` of bool ``[N, H, W]``; see :func:`domirank`.

    On uniform ground of 20 x 20 the best 20 hold more than random ones where fires spread to 8 neighbours (.783 against
    .834 of the cells burn at p = .4), but not where they spread to 4.
    """
    return first_cells(domirank(burnable, neighbours=neighbours, share=share), burnable, budget)


def betweenness_breaks(burnable: Tensor, budget: int, *, neighbours: int = 8, anew: bool = False) -> Tensor:
    """The burnable cells of the highest betweenness: bool ``[N, H, W]`` of bool ``[N, H, W]``.

    Args:
        burnable: bool ``[N, H, W]``.
        budget: number of cells.
        neighbours: 8 or 4.
        anew: compute it after each break for the fuel that is left, which is ``budget`` times the work: cells of the
            highest betweenness lie side by side, and a break takes the ways away from those beside it.
    """
    if not anew:
        return first_cells(betweenness(burnable, neighbours=neighbours), burnable, budget)
    left = burnable
    for _ in range(budget):
        left = left & ~first_cells(betweenness(left, neighbours=neighbours), left, 1)
    return burnable & ~left
