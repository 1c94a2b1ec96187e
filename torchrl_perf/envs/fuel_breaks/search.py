"""Placements of fuel breaks by search: swaps of a break and a free cell, judged by fires, for all landscapes at once.

Dimension key: ``L`` landscapes, ``S`` proposals of a round, ``H``, ``W`` cells, ``G`` words of fires.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_perf.envs.fuel_breaks.fire import burn
from torchrl_perf.envs.fuel_breaks.placements import column_breaks
from torchrl_perf.envs.fuel_breaks.words import MAX_FIRES, burned_fraction

__all__ = ["swap_search"]

NEAR = 2.0
"""Cells within this of a break, in rows and columns, are its neighbourhood."""
LOCAL = 0.5
"""Share of the proposals that move a break within its neighbourhood; the others move it anywhere."""


def swap_search(
    burnable: Tensor,
    threshold: Tensor,
    budget: int,
    *,
    start: Tensor | None = None,
    rounds: int = 150,
    proposals: int = 32,
    fires: int = 256,
    neighbours: int = 8,
    seed: int = 0,
) -> Tensor:
    """Improve placements by swaps: in each round the best of some proposals, if it is better under other fires.

    A proposal moves one break to an allowed cell, near it or anywhere. Proposals are compared under fires that are
    drawn anew in each round, and the best one replaces the placement if fires that have not chosen it say so as well:
    otherwise the search would collect what chance favoured. It is slow, and needs no learning: what a policy is
    compared with.

    Args:
        burnable: bool ``[L, H, W]``.
        threshold: int32 ``[L, D, H, W]`` of the bonds, see :func:`~torchrl_perf.envs.fuel_breaks.fire.thresholds`.
        budget: breaks of each landscape.
        start: bool ``[L, H, W]``, ``budget`` burnable cells each; a column by default.
        rounds: of the search.
        proposals: S.
        fires: by which each is judged, twice; rounded up to a multiple of 64.
        neighbours: 8 or 4.
        seed: names proposals and fires.

    Returns:
        Breaks, bool ``[L, H, W]``, as many as at the start.

    Raises:
        ValueError: for fewer than one round, proposal or fire, and a start of other cells than described.
    """
    for name, value in (("rounds", rounds), ("proposals", proposals), ("fires", fires)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, received {value}. Remedy: {name}=1 or more.")
    breaks = column_breaks(burnable, budget) if start is None else start.clone()
    if breaks.shape != burnable.shape or bool((breaks & ~burnable).any()):
        raise ValueError(
            f"start: expected burnable cells of {list(burnable.shape)}, received {list(breaks.shape)} or cells that do "
            "not burn. Remedy: column_breaks(burnable, budget), for example."
        )
    generator = torch.Generator(burnable.device).manual_seed(seed)
    judge = _Judge(burnable, threshold, -(-fires // MAX_FIRES), neighbours)
    rows = torch.arange(len(burnable), device=burnable.device)
    for number in range(rounds):
        proposed = _proposals(breaks, burnable, proposals, generator)
        best = judge(proposed, seed, 2 * number).argmin(1)
        chosen = proposed[rows, best]
        both = judge(torch.stack((breaks, chosen), 1), seed, 2 * number + 1)
        better = both[:, 1] < both[:, 0]
        breaks = torch.where(better.view(-1, 1, 1), chosen, breaks)
    return breaks


class _Judge:
    """Mean burned fractions ``[L, S]`` of placements ``[L, S, H, W]`` under fires that a round names."""

    def __init__(self, burnable: Tensor, threshold: Tensor, words: int, neighbours: int) -> None:
        self.burnable, self.threshold, self.words, self.neighbours = burnable, threshold, words, neighbours

    def __call__(self, breaks: Tensor, seed: int, number: int) -> Tensor:
        count, several = breaks.shape[:2]
        repeats = several * self.words
        ground = self.burnable.repeat_interleave(repeats, 0)
        free = ground & ~breaks.repeat_interleave(self.words, 1).flatten(0, 1)
        seeds = torch.arange(self.words, device=breaks.device) + self.words * (number + 1_000_003 * (seed + 1))
        words = burn(
            seeds.repeat(count * several),
            free,
            ground,
            self.threshold.repeat_interleave(repeats, 0),
            fires=MAX_FIRES,
            neighbours=self.neighbours,
        )
        return burned_fraction(words, MAX_FIRES, torch.float64).view(count, several, self.words).mean(-1)


def _proposals(breaks: Tensor, burnable: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``[L, S, H, W]``: placements that differ from ``breaks`` in one cell."""
    rows, height, width = breaks.shape

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=breaks.device)

    flat = breaks.flatten(1).unsqueeze(1)
    taken = draw(rows, count, height * width).masked_fill(~flat, -1.0).argmax(-1, keepdim=True)
    cells = torch.arange(height * width, device=breaks.device)
    down, right = (cells // width - taken // width).abs(), (cells % width - taken % width).abs()
    near = (down <= NEAR) & (right <= NEAR)
    free = (burnable & ~breaks).flatten(1).unsqueeze(1)
    local = near & free & (draw(rows, count, 1) < LOCAL)
    allowed = torch.where(local.any(-1, keepdim=True), local, free)
    added = draw(rows, count, height * width).masked_fill(~allowed, -1.0).argmax(-1, keepdim=True)
    # without a free cell there is nothing to swap
    moved = flat.expand(-1, count, -1).scatter(-1, taken, False).scatter(-1, added, True)
    return torch.where(free.any(-1, keepdim=True), moved, flat).view(rows, count, height, width)
