"""Betweenness: how many of the shortest ways through the fuel lead over a cell.

Dimension key: ``N`` rows, ``H``, ``W`` cells, ``V`` = H W vertices, sources by vertices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_perf.envs.fuel_breaks.domirank import fuel_graph

__all__ = ["betweenness"]

TOGETHER = 64
"""Graphs that are searched at once; each takes some 10 V^2 numbers."""


def betweenness(burnable: Tensor, *, neighbours: int = 8) -> Tensor:
    """Betweenness of every cell: over all pairs of others, the share of shortest ways between them that pass it.

    Brandes, "A faster algorithm for betweenness centrality" (Journal of Mathematical Sociology 25, 2001), of all
    sources at once: a level of the breadth-first search is one product of matrices. Each pair counts once.

    Args:
        burnable: bool ``[N, H, W]``.
        neighbours: 8 or 4.

    Returns:
        float64 ``[N, H, W]``, 0 where nothing burns.
    """
    rows = [_of_graphs(fuel_graph(part, neighbours)) for part in burnable.split(TOGETHER)]
    return torch.cat(rows).view(burnable.shape)


def _of_graphs(graph: Tensor) -> Tensor:
    """``[N, V]`` of adjacencies ``[N, V, V]``."""
    ways = torch.eye(graph.shape[-1], dtype=graph.dtype, device=graph.device).expand_as(graph)  # shortest, from sources
    distance = torch.where(ways > 0, 0, -1)
    front, depth = ways, 0
    while bool(front.any()):
        depth += 1
        front = (front @ graph).masked_fill(distance >= 0, 0.0)
        distance = torch.where(front > 0, depth, distance)
        ways = ways + front
    below = torch.zeros_like(ways)  # of a source and a vertex: over targets behind it, the share of ways through it
    for level in range(depth, 0, -1):
        share = torch.where(distance == level, (1.0 + below) / ways.clamp_min(1.0), 0.0)
        below = below + torch.where(distance == level - 1, (share @ graph) * ways, 0.0)
    return torch.where(distance == 0, 0.0, below).sum(-2) / 2
