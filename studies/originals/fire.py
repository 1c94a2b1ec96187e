"""Fires one after the other, cell by cell or grid by grid, and the env around them, as fuel_breaks went through them.

The spread is that of :mod:`torchrl_perf.envs.fuel_breaks.fire`, so that the same numbers burn the same cells. The
original's own simulator was another; its loops were these: over envs, over simulations, over burning cells.

Dimension key: ``H``, ``W`` cells, ``E`` edges of a cell, ``M`` fires.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchrl_perf.envs.fuel_breaks.fire import LEVELS, edges, ends, thresholds
from torchrl_perf.envs.fuel_breaks.landscape import Landscape
from torchrl_perf.envs.fuel_breaks.words import fire_numbers

WORD, HALF = (1 << 64) - 1, (1 << 32) - 1
IsOpen = Callable[[int, int], bool]
"""Whether the bond of a plane (forth 0..E-1, back E..2E-1) is open at the cell that owns it."""


@dataclass(frozen=True)
class Ground:
    """A landscape as lists.

    Attributes:
        height: H.
        width: W.
        burnable: of each cell, row by row.
        level: thresholds in 0..65536 of each plane of bonds and cell, 2E lists.
        steps: (rows, columns) of the E edges.
    """

    height: int
    width: int
    burnable: list[bool]
    level: list[list[int]]
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, landscape: Landscape, neighbours: int = 8, index: int = 0) -> "Ground":
        """One of the landscapes, for 8 or 4 neighbours."""
        table = thresholds(landscape.bond_probabilities(neighbours))[index].flatten(1).tolist()
        steps = edges(neighbours)
        level = table if len(table) == 2 * len(steps) else [*table, *table]
        return cls(*landscape.size, landscape.burnable[index].flatten().tolist(), level, steps)


# -- one fire ---------------------------------------------------------------------------------------------------------


def by_cell(ground: Ground, free: Sequence[bool], start: int, is_open: IsOpen) -> set[int]:
    """One fire, burning cell by burning cell and neighbour by neighbour.

    Args:
        ground: the landscape.
        free: whether each cell can burn.
        start: cell where it begins, free.
        is_open: asked once for each burning cell and neighbour that has not burned.

    Returns:
        Cells that have burned.
    """
    height, width, kinds = ground.height, ground.width, len(ground.steps)
    ways = [(plane, *step) for plane, step in enumerate(ground.steps)]
    ways += [(plane + kinds, -step[0], -step[1]) for plane, step in enumerate(ground.steps)]
    burning, burned = [start], {start}
    while burning:
        lit: set[int] = set()
        for cell in burning:
            row, column = divmod(cell, width)
            for plane, down, right in ways:
                r, c = row + down, column + right
                if not (0 <= r < height and 0 <= c < width):
                    continue
                other = r * width + c
                if other in burned or not free[other]:
                    continue
                if is_open(plane, cell if plane < kinds else other):
                    lit.add(other)
        burned |= lit
        burning = list(lit)
    return burned


def by_grid(ground: Ground, free: np.ndarray, start: int, is_open: np.ndarray) -> np.ndarray:
    """One fire, all cells of a step at once in NumPy.

    Args:
        ground: the landscape.
        free: bool ``[H, W]``.
        start: cell where it begins, free.
        is_open: bool ``[2E, H, W]``, planes as in ``ground.level``.

    Returns:
        Bool ``[H, W]``, cells that have burned.
    """
    burned = np.zeros((ground.height, ground.width), dtype=bool)
    burned.flat[start] = True
    burning, kinds = burned.copy(), len(ground.steps)
    while burning.any():
        lit = np.zeros_like(burned)
        for plane, step in enumerate(ground.steps):
            first, second = ends(step, ground.height, ground.width)
            lit[second] |= burning[first] & is_open[plane][first]
            lit[first] |= burning[second] & is_open[plane + kinds][first]
        lit &= free & ~burned
        burned |= lit
        burning = lit
    return burned


# -- random numbers ---------------------------------------------------------------------------------------------------


def drawn(ground: Ground) -> IsOpen:
    """Bonds that are drawn as they are asked for."""
    return lambda plane, owner: random.random() * LEVELS < ground.level[plane][owner]


def drawn_grid(ground: Ground) -> np.ndarray:
    """All bonds of a fire, drawn at once: bool ``[2E, H, W]``, one number for both ways of an edge."""
    shape = (len(ground.steps), ground.height * ground.width)
    level = np.array(ground.level).reshape(2, *shape)
    return (np.random.random(shape) * LEVELS < level).reshape(-1, ground.height, ground.width)


def drawn_start(free: Sequence[bool]) -> int:
    """A free cell at random."""
    return random.choice([cell for cell, can in enumerate(free) if can])


def given_words(seed: int, fires: int, ground: Ground) -> list[list[int]]:
    """The 64-bit words of M fires of a seed, those of the package: one for each cell, and one for the start."""
    words = fire_numbers(torch.tensor([seed]), fires, ground.height * ground.width)[0]
    return [[word & WORD for word in row] for row in words.tolist()]


def given(ground: Ground, words: Sequence[int]) -> IsOpen:
    """Bonds of a fire by its words: edge e reads the e-th 16 bits of its owner's."""
    kinds = len(ground.steps)
    return lambda plane, owner: (words[owner] >> (16 * (plane % kinds))) & (LEVELS - 1) < ground.level[plane][owner]


def given_grid(ground: Ground, words: Sequence[int]) -> np.ndarray:
    """All bonds of a fire by its words: bool ``[2E, H, W]``."""
    is_open = given(ground, words)
    cells = ground.height * ground.width
    planes = [[is_open(plane, cell) for cell in range(cells)] for plane in range(2 * len(ground.steps))]
    return np.array(planes).reshape(-1, ground.height, ground.width)


def given_start(ground: Ground, free: Sequence[bool], word: int) -> int:
    """Where a fire begins by its last word: in a cell that could burn without breaks, or else in a free one."""
    places = [[cell for cell, can in enumerate(among) if can] for among in (ground.burnable, free)]
    first, second = (
        among[(half * len(among)) >> 32] for half, among in zip((word & HALF, word >> 32), places, strict=True)
    )
    return first if free[first] else second


def masks_by_cell(ground: Ground, seed: int, fires: int) -> np.ndarray:
    """What the fires of a seed burn without breaks, cell by cell: bool ``[M, H, W]``."""
    cells, shape = np.arange(ground.height * ground.width), (ground.height, ground.width)
    found = []
    for *words, last in given_words(seed, fires, ground):
        start = given_start(ground, ground.burnable, last)
        burned = by_cell(ground, ground.burnable, start, given(ground, words))
        found.append(np.isin(cells, list(burned)).reshape(shape))
    return np.array(found)


def masks_by_grid(ground: Ground, seed: int, fires: int) -> np.ndarray:
    """The same grid by grid."""
    free = np.array(ground.burnable).reshape(ground.height, ground.width)
    found = []
    for *words, last in given_words(seed, fires, ground):
        start = given_start(ground, ground.burnable, last)
        found.append(by_grid(ground, free, start, given_grid(ground, words)))
    return np.array(found)


# -- the env ----------------------------------------------------------------------------------------------------------


class BreakEnvLoop:
    """One landscape; a step takes a mask of breaks and lights M fires, one after the other.

    As in the original an episode is one step, its reward minus the sum of the cells that the fires burn, and the next
    state is the state: breaks are none of its planes.

    Args:
        ground: the landscape.
        planes: static planes ``[C, H, W]`` of the state.
        fires: M.
    """

    def __init__(self, ground: Ground, planes: np.ndarray, fires: int) -> None:
        self.ground, self.planes, self.fires = ground, planes, fires

    def step(self, mask: Sequence[bool], seed: int | None = None) -> tuple[np.ndarray, float, bool]:
        """State, reward, and that the episode is over.

        Args:
            mask: breaks, one for each cell.
            seed: of fires that are those of the package; by default they are drawn.
        """
        free = [can and not stop for can, stop in zip(self.ground.burnable, mask, strict=True)]
        burned = self.burned(free) if seed is None else self.burned_of(free, seed)
        return self.planes.copy(), -float(sum(burned)), True

    def burned(self, free: Sequence[bool]) -> list[int]:
        """Number of cells that each of M new fires burns."""
        is_open = drawn(self.ground)
        return [len(by_cell(self.ground, free, drawn_start(free), is_open)) for _ in range(self.fires)]

    def burned_by_grid(self, free: Sequence[bool]) -> list[int]:
        """The same, grid by grid."""
        ground, fires = self.ground, range(self.fires)
        array = np.array(free).reshape(ground.height, ground.width)
        return [int(by_grid(ground, array, drawn_start(free), drawn_grid(ground)).sum()) for _ in fires]

    def burned_of(self, free: Sequence[bool], seed: int) -> list[int]:
        """Number of cells that each fire of a seed burns."""
        found = []
        for *words, last in given_words(seed, self.fires, self.ground):
            start = given_start(self.ground, free, last)
            found.append(len(by_cell(self.ground, free, start, given(self.ground, words))))
        return found
