"""The claims of fuel_breaks on its simulator, its env and its update: loops over fires and images, and all at once."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from studies.fuel_breaks.images import images
from studies.originals import fire as loops
from studies.originals.fire import BreakEnvLoop, Ground
from studies.sitting import (
    CONFIRMED,
    NOT_REPRODUCED,
    PARTLY,
    Sitting,
    Variant,
    judge,
    times_text,
)
from torchrl_perf.envs.fuel_breaks import (
    FuelBreaks,
    Landscape,
    assess,
    column_breaks,
    cross_breaks,
    domirank_breaks,
    random_breaks,
)
from torchrl_perf.envs.fuel_breaks.fire import burn, open_bonds, spread, thresholds
from torchrl_perf.envs.fuel_breaks.words import burned_cells, fire_numbers

CELLS, GRID, BATCHED, GRAPH = "cell by cell", "grid by grid in NumPy", "batched", "batched, in a graph"
LOOP = "one env, one fire after the other"
FIRES = 16
"""Fires of an env; of loops those of one env are timed."""
FORMER, OPTIMISED_FIRES = 100, 3
"""Simulations of a step in the original's former configuration, and in the one that it calls optimised."""
CENTRE = {
    (4, 0.4): 0.014, (4, 0.5): 0.305, (4, 0.55): 0.726, (4, 0.58): 0.849, (4, 0.7): 0.974,
    (8, 0.2): 0.020, (8, 0.25): 0.271, (8, 0.3): 0.784, (8, 0.4): 0.946, (8, 0.58): 0.998,
}  # fmt: skip
"""Share of 50 x 50 cells that a fire from the centre burns, by neighbours and probability: other programs' results.

At the threshold of 4 neighbours few fires gave .272 once, and 4,000 of another program .305.
"""
PLACED = {
    (4, 0.58): (0.713, 0.525, 0.298, 0.318, 0.148),
    (4, 0.70): (0.944, 0.872, 0.440, 0.764, 0.209),
    (8, 0.30): (0.594, 0.445, 0.236, 0.316, 0.116),
    (8, 0.40): (0.914, 0.832, 0.424, 0.750, 0.188),
    (8, 0.58): (0.992, 0.938, 0.471, 0.886, 0.221),
}
"""Share of 20 x 20 cells: no break, 20 random ones, a column, 39 random ones, a cross; about +-.015."""
KINDS = ("none", "random 20", "column 20", "random 39", "cross 39")


# -- fires ------------------------------------------------------------------------------------------------------------


def fires(sitting: Sitting) -> None:
    """Fires one after the other, cell by cell and grid by grid, and those of many envs at once."""
    cases = sitting.pick(
        [(10, 8)], [(20, 1), (20, 64), (50, 64)], [(20, 1), (20, 64), (20, 4096), (50, 64), (50, 1024)]
    )
    for size, rows in cases:
        _fires_case(sitting, size, rows)
    names = [f"{size} x {size}, {rows} x {FIRES}" for size, rows in cases]
    after = GRAPH if sitting.cuda else BATCHED
    found = sitting.ratio_of("fires", CELLS, after, names)
    add = partial(sitting.verdict, "fires")
    claim, remark = "batched fires are 10x as fast as a loop over", "the same cells burn"
    add(f"{claim} cells", times_text(found), judge(found, 10.0, 2.0), remark)
    grid = sitting.ratio_of("fires", GRID, after, names)
    add(f"{claim} grids in NumPy", times_text(grid), judge(grid, 10.0, 2.0), remark)


def _fires_case(sitting: Sitting, size: int, rows: int) -> None:
    """Loops over the fires of one env take what those of each other take; the same fires burn the same cells."""
    land = Landscape.fractal(1, size, base=0.4, bare=0.05)
    ground, device = Ground.of(land), sitting.device
    level = thresholds(land.bond_probabilities(8)).to(device)
    burnable = land.burnable.to(device)
    free = burnable.expand(rows, -1, -1).contiguous()
    seeds = torch.arange(rows, device=device)
    ours = partial(burn, seeds, free, burnable, level, fires=FIRES)
    loop, checked = BreakEnvLoop(ground, np.zeros((12, size, size), np.float32), FIRES), range(min(rows, 2))

    def masks(of_seed: Callable[[Ground, int, int], np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(of_seed(ground, seed, FIRES)) for seed in checked]

    def batched_masks() -> list[Tensor]:
        words = ours()[: len(checked)].unsqueeze(1).cpu()
        return list((words >> torch.arange(FIRES).view(-1, 1, 1)) & 1)

    variants = [
        Variant(CELLS, partial(loop.burned, ground.burnable), partial(masks, loops.masks_by_cell), scale=float(rows)),
        Variant(
            GRID, partial(loop.burned_by_grid, ground.burnable), partial(masks, loops.masks_by_grid), scale=float(rows)
        ),
        Variant(BATCHED, ours, batched_masks),
    ]
    graph = sitting.graph(ours) if sitting.cuda else None
    if graph is not None:
        variants.append(Variant(GRAPH, graph, compared=False, note="the same function, recorded"))
    for row in sitting.compare("fires", f"{size} x {size}, {rows} x {FIRES}", variants).values():
        row["fires_per_second"] = rows * FIRES / row["us"] * 1e6
    if graph is not None:
        graph.release()


# -- percolation ------------------------------------------------------------------------------------------------------


def percolation(sitting: Sitting) -> None:
    """What fires from the centre of uniform ground burn, against results of other programs."""
    rows = sitting.pick(2, 12)
    good = []
    for (neighbours, p), want in CENTRE.items():
        found, error = _from_centre(p, neighbours, rows, sitting.device)
        # the reference is of 1,000 fires of the same spread
        limit = 4 * error * math.hypot(1.0, math.sqrt(rows * 64 / 1000)) + 0.003
        good.append(abs(found - want) <= limit)
        note = f"{found:.3f}, elsewhere {want:.3f}"
        entries = {"off_by": abs(found - want), "tolerance": limit, "ok": good[-1]}
        sitting.add("percolation", f"{neighbours} neighbours, p={p}", BATCHED, note=note, burned=found, **entries)
    text = f"{sum(good)} of {len(good)} burned fractions within four standard errors"
    word = CONFIRMED if all(good) else NOT_REPRODUCED
    remark = "thresholds 1/2 with 4 neighbours (Kesten 1980) and about .25 with 8"
    sitting.verdict("percolation", "fires are bond percolation", text, word, remark)


def _from_centre(p: float, neighbours: int, rows: int, device: torch.device, size: int = 50) -> tuple[float, float]:
    """Mean burned fraction of ``64 rows`` fires, and its standard error."""
    land = Landscape.uniform(p, size)
    numbers = fire_numbers(torch.arange(rows, device=device), 64, size * size)[..., :-1]
    bonds = open_bonds(numbers, thresholds(land.bond_probabilities(neighbours)).to(device), neighbours)
    start = torch.zeros(rows, size, size, dtype=torch.int64, device=device)
    start[:, size // 2, size // 2] = -1
    free = land.burnable.to(device).expand(rows, size, size)
    words = spread(start, bonds, free, neighbours, 4 * size)
    share = burned_cells(words, 64).double().flatten() / size**2
    return float(share.mean()), float(share.std()) / math.sqrt(share.numel())


# -- placements -------------------------------------------------------------------------------------------------------


def placements(sitting: Sitting) -> None:
    """What placements are worth that need no learning, against results of other programs; DomiRank's."""
    grounds = sitting.pick([(8, 0.40)], list(PLACED))
    columns, shown = [], {}
    for neighbours, p in grounds:
        found = _placed(sitting, neighbours, p)
        columns.append(found["random 20"] / found["column 20"])
        shown[f"{neighbours} neighbours, p={p}"] = found["random 20"] / found["domirank 20"]
    text = f"{times_text(columns)} as much burns with as many random breaks"
    sitting.verdict("placements", "breaks in a line hold fires, random ones do not", text, judge(columns, 1.5, 1.1))
    text = ", ".join(f"{value:.2f}x at {name}" for name, value in shown.items())
    better = [value > 1.0 for value in shown.values()]
    word = CONFIRMED if all(better) else PARTLY if any(better) else NOT_REPRODUCED
    remark = "random over DomiRank, on uniform ground, where only the grid's edge tells cells apart"
    sitting.verdict("placements", "DomiRank's demonstrations place better than chance", text, word, remark)


def _placed(sitting: Sitting, neighbours: int, p: float) -> dict[str, float]:
    """Burned fraction by placement; those that a reference is known of are compared with it."""
    land, device = Landscape.uniform(p), sitting.device
    one, count = land.burnable.to(device), sitting.pick(4, 16)
    many = one.expand(count, -1, -1)
    draw = torch.Generator(device).manual_seed(0)
    kinds = {
        "none": torch.zeros_like(one),
        "random 20": random_breaks(many, 20, generator=draw),
        "column 20": column_breaks(one, 20),
        "random 39": random_breaks(many, 39, generator=draw),
        "cross 39": cross_breaks(one, 39),
        "domirank 20": domirank_breaks(one, 20, neighbours=neighbours),
    }
    level, found = thresholds(land.bond_probabilities(neighbours)).to(device), {}
    for name, breaks in kinds.items():
        fires_each = sitting.pick(512, 1024) // (1 if len(breaks) == 1 else 8)
        outcome = assess(breaks, one, level, fires=fires_each, neighbours=neighbours)
        found[name] = float(outcome.burned.mean())
        spread_ = float(outcome.burned.std()) / math.sqrt(len(breaks)) if len(breaks) > 1 else 0.0
        entries: dict[str, Any] = {"note": f"{found[name]:.3f}"}
        if name in KINDS:
            want = PLACED[neighbours, p][KINDS.index(name)]
            limit = 4 * math.hypot(0.015 / 2, float(outcome.error.mean()), spread_)
            off_by = abs(found[name] - want)
            entries |= {"off_by": off_by, "tolerance": limit, "ok": off_by <= limit}
            entries["note"] += f", elsewhere {want:.3f}"
        sitting.add("placements", f"{neighbours} neighbours, p={p}", name, burned=found[name], **entries)
    return found


# -- the env ----------------------------------------------------------------------------------------------------------


def environment(sitting: Sitting) -> None:
    """Steps of the original's env, one after the other, and of batched envs; all breaks at once."""
    sizes = sitting.pick((1, 16), (1, 16, 256), (1, 64, 1024, 8192))
    for rows in sizes:
        _environment_case(sitting, rows)
    after = GRAPH if sitting.cuda else BATCHED
    curve = {rows: sitting.ratio_of("environment", LOOP, after, [f"N={rows}"]) for rows in sizes}
    text = ", ".join(f"{rows:,}: {values[0]:,.3g}x" for rows, values in curve.items() if values)
    sitting.verdict("environment", "batched envs step faster than one by one", text, judge(curve[sizes[-1]], 10.0, 2.0))
    _credit(sitting)


def _credit(sitting: Sitting) -> None:
    """What a column of breaks saves, and the one of them that the original stores as the action, the last cell."""
    land, device = Landscape.uniform(0.4), sitting.device
    one = land.burnable.to(device)
    column = column_breaks(one, 20)
    last = torch.zeros_like(column)
    last.view(1, -1)[0, int(column.flatten().nonzero().max())] = True
    kinds = torch.cat([torch.zeros_like(column), column, last])
    outcome = assess(kinds, one, thresholds(land.bond_probabilities(8)).to(device), fires=sitting.pick(512, 4096))
    none, whole, stored = outcome.burned.tolist()
    text = f"20 breaks save {none - whole:.3f} of the cells, the one that is stored {none - stored:.3f}"
    sitting.add(
        "environment", "a column of 20", "the stored action", note=text, saved=none - whole, credited=none - stored
    )
    sitting.verdict(
        "environment",
        "the reward is that of the action that is learnt from",
        text,
        judge((none - stored) / (none - whole), 0.9, 0.5),
        "its episodes have one step and end in the state that they began in: nothing is left to discount by .95",
    )


def _original(size: int) -> tuple[Ground, tuple[list[bool], np.ndarray]]:
    """Ground, and 5% of its cells as a mask, with 12 planes of a state."""
    land = Landscape.fractal(1, size, base=0.4)
    random.seed(0)
    chosen = set(random.sample(range(size * size), size * size // 20))
    return Ground.of(land), ([cell in chosen for cell in range(size * size)], np.zeros((12, size, size), np.float32))


def _environment_case(sitting: Sitting, rows: int, size: int = 20) -> None:
    ground, (mask, planes) = _original(size)
    land, device = Landscape.fractal(1, size, base=0.4), sitting.device
    # the original places whatever the mask says, here at most the budget: 5%
    env = FuelBreaks(rows, landscape=land, budget=size * size // 20, mode="one_shot", fires=FIRES, device=device)
    mask = [stop and can for stop, can in zip(mask, ground.burnable, strict=True)]
    td = env.reset().set("action", torch.tensor(mask, device=device).expand(rows, -1).contiguous())
    loop, checked = BreakEnvLoop(ground, planes, FIRES), min(rows, 2)

    def seeded() -> Tensor:
        torch.manual_seed(7)
        return torch.randint(1 << 62, (rows,), device=device)

    def step() -> Tensor:
        return env.step_and_maybe_reset(td.copy())[0]["next", "reward"]

    def ours() -> Tensor:
        torch.manual_seed(7)
        return step()[:checked, 0]

    def theirs() -> Tensor:
        return torch.tensor([loop.step(mask, seed)[1] for seed in seeded()[:checked].tolist()])

    variants = [Variant(LOOP, partial(loop.step, mask), theirs, scale=float(rows)), Variant(BATCHED, step, ours)]
    graph = sitting.graph(step) if sitting.cuda else None
    if graph is not None:
        variants.append(Variant(GRAPH, graph, compared=False, note="the same function, recorded"))
    for row in sitting.compare("environment", f"N={rows}", variants).values():
        row["steps_per_second"] = rows / row["us"] * 1e6
    if graph is not None:
        graph.release()


def simulations(sitting: Sitting) -> None:
    """A step of the original's env with the simulations of its former configuration, and of its optimised one."""
    ground, (mask, planes) = _original(sitting.pick(10, 20))

    def steps(count: int) -> None:
        """As many simulations in all, for what burns differs from one to the next."""
        loop = BreakEnvLoop(ground, planes, count)
        for _ in range(FORMER // count):
            loop.step(mask)

    variants = [
        Variant(f"{count} simulations", partial(steps, count), compared=False, scale=1 / (FORMER // count))
        for count in (FORMER, OPTIMISED_FIRES)
    ]
    sitting.compare("simulations", "a step", variants)
    found = sitting.ratio_of("simulations", *(variant.name for variant in variants))
    sitting.verdict(
        "simulations",
        "the optimised configuration changes cleanup alone",
        f"a step with {OPTIMISED_FIRES} simulations instead of {FORMER} takes 1/{found[0]:.0f} of the time",
        NOT_REPRODUCED if found[0] > 1.1 else CONFIRMED,
        "2.2 to 2.3x were claimed for it; it has 4 landscapes instead of 10, too",
    )


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {
    "fires": fires,
    "percolation": percolation,
    "placements": placements,
    "environment": environment,
    "simulations": simulations,
    "images": images,
}
"""Experiments by name."""
