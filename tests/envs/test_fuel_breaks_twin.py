"""Fires against one fire at a time in plain Python numbers, written from the description of the model alone."""

import math

import pytest
import torch

from torchrl_perf.envs.fuel_breaks import Landscape, random_breaks
from torchrl_perf.envs.fuel_breaks.fire import burn, edges, ignition_probability, thresholds
from torchrl_perf.envs.fuel_breaks.words import fire_numbers

ALL = (1 << 64) - 1
NEIGHBOURS = {4: [(0, 1), (1, 0), (0, -1), (-1, 0)]}
NEIGHBOURS[8] = NEIGHBOURS[4] + [(1, 1), (1, -1), (-1, -1), (-1, 1)]


def mixed(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ALL
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ALL
    return z ^ (z >> 31)


def twin_number(seed, place):
    return mixed((mixed(seed & ALL) + (place + 1) * 0x9E3779B97F4A7C15) & ALL)


def twin_probability(land, index, source, target):
    """p of one bond from the formula, in Python floats."""
    step = (target[0] - source[0], target[1] - source[1])
    length = math.hypot(*step)

    def at(name, cell):
        return float(getattr(land, name)[(index, *cell)])

    slope = math.degrees(math.atan((at("elevation", target) - at("elevation", source)) / (land.cell_size * length)))
    east, north = at("wind_east", target), at("wind_north", target)
    speed = math.hypot(east, north)
    angle = math.atan2(north, east) - math.atan2(-step[0], step[1])
    wind = math.exp(0.045 * speed) * math.exp(0.131 * speed * (math.cos(angle) - 1.0))
    still = land.base * (1 + at("vegetation", target)) * (1 + at("density", target))
    return min(1.0, max(0.0, still * wind * math.exp(0.078 * slope)))


def twin_fire(land, index, free, seed, fire, neighbours):
    """Burned cells of one fire, step by step: a set of (row, column)."""
    height, width = land.size
    cells = [(r, c) for r in range(height) for c in range(width)]
    base = fire * (len(cells) + 1)
    owners = edges(neighbours)
    burnable = [cell for cell in cells if land.burnable[(index, *cell)]]
    alive = [cell for cell in cells if free[cell]]
    if not alive:
        return set()
    last = twin_number(seed, base + len(cells))
    first, spare = last & 0xFFFFFFFF, last >> 32
    start = burnable[(first * len(burnable)) >> 32]
    if not free[start]:
        start = alive[(spare * len(alive)) >> 32]
    fuel, burning, burned = set(alive) - {start}, [start], {start}
    while burning:
        lit = set()
        for cell in burning:
            for step in NEIGHBOURS[neighbours]:
                other = (cell[0] + step[0], cell[1] + step[1])
                if other not in fuel:
                    continue
                owner, way = (cell, step) if step in owners else (other, (-step[0], -step[1]))
                word = twin_number(seed, base + owner[0] * width + owner[1])
                u = (word >> (16 * owners.index(way))) & 0xFFFF
                if u < round(twin_probability(land, index, cell, other) * 65536):
                    lit.add(other)
        burning, burned, fuel = sorted(lit), burned | lit, fuel - lit
    return burned


WORLDS = {
    "uniform": lambda: Landscape.uniform(0.4, (7, 5)),
    "fractal": lambda: Landscape.fractal(1, (6, 7), count=3, wind=(3.0, -5.0), bare=0.15, base=0.3),
    "row": lambda: Landscape.uniform(0.8, (1, 6)),
    "column": lambda: Landscape.uniform(0.8, (6, 1)),
    "cell": lambda: Landscape.uniform(0.8, 1),
}


@pytest.mark.parametrize("neighbours", [4, 8])
@pytest.mark.parametrize("name", list(WORLDS))
def test_equals_the_twin(name, neighbours, device):
    land = WORLDS[name]()
    fires, rows = 5, 2 * len(land)
    number = torch.arange(rows) % len(land)
    burnable = land.burnable[number]
    free = burnable & ~random_breaks(burnable, 3 if burnable[0].numel() > 6 else 1)
    free[0] = burnable[0]
    seed = torch.tensor([(-1) ** n * (n * 7919 + 2**62) for n in range(rows)])
    level = thresholds(land.bond_probabilities(neighbours))[number]
    parts = [part.to(device) for part in (seed, free, burnable, level)]
    words = burn(*parts, fires=fires, neighbours=neighbours).cpu()
    for row in range(rows):
        for fire in range(fires):
            got = {(r, c) for r, c in ((words[row] >> fire) & 1).nonzero().tolist()}
            assert got == twin_fire(land, int(number[row]), free[row], int(seed[row]), fire, neighbours), (row, fire)


def test_bond_probabilities_equal_the_formula():
    land = Landscape.fractal(5, (5, 4), count=2, wind=(-4.0, 2.0), bare=0.1, relief=25.0, base=0.3)
    got = land.bond_probabilities(8)
    seen = 0
    for index in range(2):
        for number, step in enumerate(edges(8)):
            for r in range(5):
                for c in range(4):
                    other = (r + step[0], c + step[1])
                    inside = other[0] < 5 and 0 <= other[1] < 4
                    if not inside or not (land.burnable[index, r, c] and land.burnable[(index, *other)]):
                        assert got[index, number, r, c] == got[index, number + 4, r, c] == 0.0
                        continue
                    forth, back = (twin_probability(land, index, *pair) for pair in (((r, c), other), (other, (r, c))))
                    assert got[index, number, r, c].item() == pytest.approx(forth, rel=1e-12)
                    assert got[index, number + 4, r, c].item() == pytest.approx(back, rel=1e-12)
                    seen += 1
    assert seen > 60


def test_ignition_probability_is_the_product_of_bonds():
    land = Landscape.fractal(2, (4, 5), wind=(2.0, 1.0), bare=0.1, base=0.4)
    probability = land.bond_probabilities(8)[0]
    burning = torch.rand(4, 5) < 0.4
    got = ignition_probability(burning, probability, 8)
    for r in range(4):
        for c in range(5):
            spared = 1.0
            for step in NEIGHBOURS[8]:
                other = (r + step[0], c + step[1])
                if 0 <= other[0] < 4 and 0 <= other[1] < 5 and burning[other]:
                    both = land.burnable[0, r, c] and land.burnable[(0, *other)]
                    spared *= 1.0 - (twin_probability(land, 0, other, (r, c)) if both else 0.0)
            assert got[r, c].item() == pytest.approx(1.0 - spared, abs=1e-12)


def test_numbers_are_splitmix():
    got = fire_numbers(torch.tensor([0, -5, 2**62]), 2, 3)
    for row, seed in enumerate((0, -5, 2**62)):
        assert [n & ALL for n in got[row].flatten().tolist()] == [twin_number(seed, place) for place in range(8)]
