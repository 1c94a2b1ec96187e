"""Fires that spread from cell to cell, many at once: every bit of a word is a fire.

The model of Alexandridis et al., "A cellular automata model for forest fire spread prediction" (Applied Mathematics and
Computation 204, 2008, doi 10.1016/j.amc.2008.06.046): a burning cell burns for one step, and in it sets each neighbour
with fuel alight with a probability of its own.

**What burns in the end is a cluster of open bonds.** A burning cell tries each neighbour once, and of two neighbours
only the one that burns first tries the other. So one number u in [0, 1) for each pair decides: the bond from a to b is
open where ``u < p(a -> b)``, that from b to a where ``u < p(b -> a)``, and the cells that burn are those that open
bonds lead to. This is the same distribution as a random number per cell and step (:func:`ignition_probability`) and
needs only four numbers per cell. With the same numbers, one more break never makes a further cell burn, except in fires
that would have begun at the break.

**Numbers are a function of a seed** (:func:`fire_numbers`), the same on every device, so that the same fire can be lit
for another set of breaks (common random numbers) without storing it. Probabilities are rounded to 1/65536.

Dimension key: ``N`` rows, ``M`` fires of a row (at most 64), ``H``, ``W`` cells, ``E`` edges of a cell (4, or 2 without
diagonals), ``D`` planes of bonds (2E, or E where both ways are alike), ``L`` landscapes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchrl_perf.envs.fuel_breaks.words import (
    burn_probability,
    burned_cells,
    burned_fraction,
    fire_numbers,
    high_bits,
    pack,
    word_dtype,
)

__all__ = [
    "burn",
    "burn_probability",
    "burned_cells",
    "burned_fraction",
    "default_sweeps",
    "edges",
    "fire_numbers",
    "ignition",
    "ignition_probability",
    "open_bonds",
    "spread",
    "thresholds",
]

LEVELS = 65536
"""Numbers that a bond's u can take."""
_EDGES = ((0, 1), (1, 0), (1, 1), (1, -1))
_CHECKED = 8
"""Sweeps between two checks, on a CPU, of whether anything still burns."""
_WORDS_ON_CPU, _WORDS_ON_CUDA = 1 << 16, 1 << 25
"""Random numbers made at a time: those of a few rows stay in the cache, more would not fit into the memory."""

Corner = tuple[slice, slice]


def edges(neighbours: int) -> tuple[tuple[int, int], ...]:
    """Steps (rows, columns) from a cell to those that it shares its E edges with: E, S and for 8 also SE, SW.

    Raises:
        ValueError: for another number than 4 or 8.
    """
    if neighbours not in (4, 8):
        raise ValueError(f"neighbours: expected 4 or 8, received {neighbours!r}. Remedy: one of the two.")
    return _EDGES[: neighbours // 2]


def default_sweeps(height: int, width: int) -> int:
    """Sweeps after which, near the percolation threshold too, fires have burned out: four lengths of the grid.

    With 4 neighbours at p = .5 or .55 and 20 x 20 cells, the longest of 6,400 fires took 64 sweeps; with 8 at .4 it
    took 26, and at .58 16. On 50 x 50 cells those near the threshold took up to 209.
    """
    return 4 * max(height, width)


def ends(step: tuple[int, int], height: int, width: int) -> tuple[Corner, Corner]:
    """Where the owners of the edges of one kind lie in a grid, and the cells at the other end, as slices."""
    first, second = zip(*(_pair(*part) for part in zip(step, (height, width), strict=True)), strict=True)
    return first, second  # pyright: ignore[reportReturnType]


def _pair(step: int, size: int) -> tuple[slice, slice]:
    shift = min(abs(step), size)
    low, high = slice(0, size - shift), slice(shift, size)
    return (low, high) if step >= 0 else (high, low)


def thresholds(probability: Tensor) -> Tensor:
    """Round the probabilities ``[*, 2E, H, W]`` of bonds to those that :func:`open_bonds` takes.

    Args:
        probability: float, plane e from the owner of an edge to its other end, plane E + e back, both where the owner
            lies; 0 where there is no other end.

    Returns:
        int32 ``[*, D, H, W]`` in 0..65536; D is E where all bonds are alike both ways.
    """
    level = (probability.double().clamp(0.0, 1.0) * LEVELS).round().to(torch.int32)
    forth, back = level.chunk(2, -3)
    return forth.contiguous() if torch.equal(forth, back) else level


def ignition(numbers: Tensor, burnable: Tensor, free: Tensor) -> Tensor:
    """Where each fire begins: uniform over the cells of ``free``, and as without breaks if that cell is free.

    A first choice is any burnable cell; a second one, any free cell, counts if the first has become a break.
    Together they are uniform: ``1/n + k/n * 1/(n - k) = 1/(n - k)`` for k breaks on n burnable cells.

    Args:
        numbers: int64 ``[N, M]``, the words for the ignition.
        burnable: bool ``[N, H, W]``.
        free: bool ``[N, H, W]``, burnable cells that are no break. A row without any has no fire.

    Returns:
        Words ``[N, H, W]`` with one bit for each fire.
    """
    flat = free.flatten(1)
    halves = numbers & 0xFFFFFFFF, high_bits(numbers, 32)
    cells = [_nth(half, among.flatten(1)) for half, among in zip(halves, (burnable, free), strict=True)]
    cell = torch.where(flat.gather(1, cells[0]), *cells)
    begins = cell.unsqueeze(-1) == torch.arange(flat.shape[1], device=cell.device)
    return pack(begins & flat.unsqueeze(1)).view(free.shape)


def _nth(number: Tensor, among: Tensor) -> Tensor:
    """Index ``[N, M]`` of a cell of ``among`` bool ``[N, C]``, uniform for ``number`` uniform in 0..2^32 - 1."""
    count = among.cumsum(1)
    rank = (number * count[:, -1:]) >> 32
    return torch.searchsorted(count, rank, right=True).clamp_max(among.shape[1] - 1)


def open_bonds(numbers: Tensor, threshold: Tensor, neighbours: int) -> Tensor:
    """Which bonds each fire finds open.

    Args:
        numbers: int64 ``[N, M, H W]``, the words of the cells.
        threshold: int32 ``[N, D, H, W]`` or ``[1, D, H, W]``, of :func:`thresholds`.
        neighbours: 8 or 4.

    Returns:
        Words ``[N, D, H, W]``.
    """
    kinds, planes = len(edges(neighbours)), threshold.shape[1]
    level = threshold.flatten(2).unsqueeze(1)  # [N or 1, 1, D, H W]
    drawn = [(numbers >> (16 * edge)) & (LEVELS - 1) for edge in range(kinds)]
    words = [pack(drawn[plane % kinds] < level[:, :, plane]) for plane in range(planes)]
    return torch.stack(words, 1).unflatten(-1, threshold.shape[2:])


def spread(start: Tensor, bonds: Tensor, free: Tensor, neighbours: int, sweeps: int) -> Tensor:
    """Let fires burn out: a fixed number of sweeps over the edges, each of which carries them a cell further or more.

    On a CPU, where reading a number is no wait, the sweeps end when nothing burns any more; elsewhere all are made. The
    result is the same. A fire that needs more sweeps is cut off.

    Args:
        start: words ``[N, H, W]``, of :func:`ignition`.
        bonds: words ``[N, D, H, W]``, of :func:`open_bonds`; closed across the edge of the grid.
        free: bool ``[N, H, W]``, cells that can burn.
        neighbours: 8 or 4.
        sweeps: how many, see :func:`default_sweeps`.

    Returns:
        Words ``[N, H, W]`` of the cells that have burned.
    """
    rows, height, width = start.shape
    kinds = edges(neighbours)
    # Cells first: the two ends of all edges of a kind are then two runs of memory, a fixed distance apart. The runs
    # also hold pairs across the grid's edge, which are not neighbours; their bonds are closed.
    burned = start.flatten(1).t().clone(memory_format=torch.contiguous_format)  # [H W, N]
    fuel = free.flatten(1).t().to(burned.dtype).neg()  # all bits
    bonds = bonds.flatten(2).permute(1, 2, 0).contiguous()  # [D, H W, N]
    ways: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for number, (down, right) in enumerate(kinds):
        apart = min(down * width + right, height * width)
        first, second = slice(0, height * width - apart), slice(apart, None)
        forth, back = bonds[number], bonds[(number + len(kinds)) % len(bonds)]
        ways.append((burned[first], burned[second], forth[first] & fuel[second], back[first] & fuel[first]))
    before = burned.clone()
    for sweep in range(1, sweeps + 1):
        for a, b, forth, _ in ways:
            b.bitwise_or_(a & forth)
        for a, b, _, back in reversed(ways):
            a.bitwise_or_(b & back)
        if sweep % _CHECKED == 0 and burned.device.type == "cpu" and sweep < sweeps:
            if not _read((burned ^ before).any()).item():
                break
            before.copy_(burned)
    return burned.t().reshape(rows, height, width)


def _read(flags: Tensor) -> np.ndarray:
    """Copy flags on a CPU to memory of NumPy's; no wait, and none is reported."""
    host = np.empty(tuple(flags.shape), dtype=np.bool_)
    torch.from_numpy(host).copy_(flags)
    return host


@torch.library.custom_op("torchrl_perf::burn", mutates_args=())
def _burn(
    seed: Tensor,
    free: Tensor,
    burnable: Tensor,
    threshold: Tensor,
    active: Tensor,
    fires: int,
    neighbours: int,
    sweeps: int,
) -> Tensor:
    rows, height, width = free.shape
    if free.device.type != "cpu":
        # the memory layout that the fake kernel promises to the compiler
        return _burn_rows(seed, free, burnable, threshold, fires, neighbours, sweeps).contiguous()
    # on a CPU, skip the rows whose fires are not wanted
    place = torch.from_numpy(np.flatnonzero(_read(active)))
    burned = torch.zeros(rows, height, width, dtype=word_dtype(fires))
    if len(place):
        seed, free = seed.index_select(0, place), free.index_select(0, place)
        burnable, threshold = (
            part if len(part) == 1 else part.index_select(0, place) for part in (burnable, threshold)
        )
        burned.index_copy_(0, place, _burn_rows(seed, free, burnable, threshold, fires, neighbours, sweeps))
    return burned


@_burn.register_fake
def _(
    seed: Tensor,
    free: Tensor,
    burnable: Tensor,
    threshold: Tensor,
    active: Tensor,
    fires: int,
    neighbours: int,
    sweeps: int,
) -> Tensor:
    return free.new_empty(free.shape, dtype=word_dtype(fires))


def _burn_rows(
    seed: Tensor, free: Tensor, burnable: Tensor, threshold: Tensor, fires: int, neighbours: int, sweeps: int
) -> Tensor:
    rows, height, width = free.shape
    room = _WORDS_ON_CPU if free.device.type == "cpu" else _WORDS_ON_CUDA
    part = max(1, room // (fires * (height * width + 1)))
    starts, bonds = [], []
    for first in range(0, rows, part):
        some = slice(first, first + part)
        numbers = fire_numbers(seed[some], fires, height * width)
        starts.append(ignition(numbers[..., -1], burnable.expand(free.shape)[some], free[some]))
        level = threshold if len(threshold) == 1 else threshold[some]
        bonds.append(open_bonds(numbers[..., :-1], level, neighbours))
    return spread(torch.cat(starts), torch.cat(bonds), free, neighbours, sweeps)


def burn(
    seed: Tensor,
    free: Tensor,
    burnable: Tensor,
    threshold: Tensor,
    *,
    active: Tensor | None = None,
    fires: int = 16,
    neighbours: int = 8,
    sweeps: int | None = None,
) -> Tensor:
    """Light M fires in each row and let them burn out: all of the above as one operator, opaque to compilers.

    Args:
        seed: int64 ``[N]``; fires of equal seeds are the same, whatever the breaks.
        free: bool ``[N, H, W]``, cells that can burn.
        burnable: bool ``[N, H, W]`` or ``[1, H, W]``, those that could without breaks.
        threshold: int32 ``[N, D, H, W]`` or ``[1, D, H, W]``, of :func:`thresholds`.
        active: bool ``[N]``, rows whose fires are wanted; all by default. The result of other rows is undefined.
        fires: M, at most 64.
        neighbours: 8 or 4.
        sweeps: of :func:`spread`; :func:`default_sweeps` by default.

    Returns:
        Words ``[N, H, W]`` (int16, int32 or int64, the shortest with M bits) of the cells that have burned.

    Raises:
        ValueError: for shapes that do not fit each other, fires and neighbours out of range.
    """
    rows, *grid = free.shape
    planes = (2 * len(edges(neighbours)), len(edges(neighbours)))
    word_dtype(fires)
    wanted = {"burnable": (burnable, [*grid]), "threshold": (threshold, [threshold.shape[1], *grid])}
    for name, (part, shape) in wanted.items():
        if list(part.shape[1:]) != shape or part.shape[0] not in (1, rows):
            raise ValueError(
                f"{name}: expected [{rows}, ...] or [1, ...] and cells {grid} as in free, received "
                f"{list(part.shape)}. Remedy: reshape it to the grid of free."
            )
    if threshold.shape[1] not in planes or seed.shape != (rows,):
        raise ValueError(
            f"expected thresholds of {planes[0]} or {planes[1]} planes and seeds [{rows}], received "
            f"{threshold.shape[1]} planes and seeds {list(seed.shape)}. Remedy: make both for {neighbours} neighbours."
        )
    active = torch.ones_like(seed, dtype=torch.bool) if active is None else active
    sweeps = default_sweeps(*grid) if sweeps is None else sweeps
    return torch.ops.torchrl_perf.burn(seed, free, burnable, threshold, active, fires, neighbours, sweeps)


def ignition_probability(burning: Tensor, probability: Tensor, neighbours: int) -> Tensor:
    """Probability that each cell is set alight in one step, ``1 - prod_j (1 - p_j)`` over its burning neighbours j.

    This is the model step by step; the cells that burn in the end have the same distribution as in :func:`burn`.

    Args:
        burning: bool ``[*, H, W]``.
        probability: float ``[*, 2E, H, W]`` of the bonds, as in :func:`thresholds`.
        neighbours: 8 or 4.

    Returns:
        ``[*, H, W]``, of the dtype of ``probability``; the caller checks whether a cell has fuel left.
    """
    kinds = edges(neighbours)
    spared = torch.ones(burning.shape, dtype=probability.dtype, device=burning.device)
    for number, step in enumerate(kinds):
        first, second = ends(step, *burning.shape[-2:])
        a, b = (..., *first), (..., *second)
        spared[b] *= 1.0 - probability[..., number, :, :][a] * burning[a]
        spared[a] *= 1.0 - probability[..., number + len(kinds), :, :][a] * burning[b]
    return 1.0 - spared
