"""DomiRank: which cells of the graph of fuel dominate their neighbours.

Dimension key: ``N`` rows, ``H``, ``W`` cells, ``V`` = H W vertices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_perf.envs.fuel_breaks.fire import edges, ends

__all__ = ["domirank", "fuel_graph"]


def fuel_graph(burnable: Tensor, neighbours: int = 8) -> Tensor:
    """Adjacency ``[N, V, V]`` float64 of burnable cells that touch, of bool ``[N, H, W]``.

    Raises:
        ValueError: for a number of neighbours other than 4 or 8.
    """
    rows, height, width = burnable.shape
    number = torch.arange(height * width, device=burnable.device).view(height, width)
    graph = torch.zeros(rows, height * width, height * width, dtype=torch.float64, device=burnable.device)
    for step in edges(neighbours):
        first, second = ends(step, height, width)
        a, b = number[first].flatten(), number[second].flatten()
        joined = (burnable[(slice(None), *first)] & burnable[(slice(None), *second)]).flatten(1).double()
        graph[:, a, b] = joined
        graph[:, b, a] = joined
    return graph


def domirank(burnable: Tensor, *, neighbours: int = 8, share: float = 0.5) -> Tensor:
    """DomiRank of every cell: ``Gamma = sigma (sigma A + I)^-1 A 1``.

    Engsig, Tejedor, Moreno, Foufoula-Georgiou, Kasmi, "DomiRank centrality reveals structural fragility of complex
    networks via node dominance" (Nature Communications 15, 2024, doi 10.1038/s41467-023-44257-0). ``sigma`` lies in (0,
    -1 / lambda_min): near 0 the rank is that of the degree, near the other end vertices compete and dominant ones
    stand among subdued neighbours.

    Args:
        burnable: bool ``[N, H, W]``.
        neighbours: 8 or 4.
        share: sigma as a share of its upper end, in (0, 1).

    Returns:
        float64 ``[N, H, W]``, 0 where nothing burns.

    Raises:
        ValueError: for a share outside (0, 1).
    """
    if not 0.0 < share < 1.0:
        raise ValueError(
            f"share: expected sigma as a share in (0, 1) of -1 / lambda_min, received {share}. Remedy: share=0.9, for "
            "example."
        )
    graph = fuel_graph(burnable, neighbours)
    least = torch.linalg.eigvalsh(graph)[:, 0].clamp_max(-1.0)  # an edge alone has -1
    sigma = (share / -least).view(-1, 1, 1)
    degree = graph.sum(-1, keepdim=True)
    unit = torch.eye(graph.shape[-1], dtype=graph.dtype, device=graph.device)
    rank = torch.linalg.solve(sigma * graph + unit, sigma * degree)
    return rank.view(burnable.shape)
