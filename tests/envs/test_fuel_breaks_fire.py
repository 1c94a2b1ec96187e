"""Fires: bonds against steps, known percolation results, words and random numbers, and the operator."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.envs.fuel_breaks import (
    Landscape,
    assess,
    column_breaks,
    cross_breaks,
    fire,
    random_breaks,
)
from torchrl_perf.envs.fuel_breaks.fire import (
    burn,
    ignition,
    ignition_probability,
    open_bonds,
    spread,
    thresholds,
)
from torchrl_perf.envs.fuel_breaks.words import (
    burn_probability,
    burned_cells,
    burned_fraction,
    fire_numbers,
    word_dtype,
)
from torchrl_perf.runtime import no_host_sync

# Share of 50 x 50 cells burned from the centre, by simulations with a random number per cell and step. At the threshold
# of 4 neighbours they gave .272 for few fires; 20,480 fires here gave .304, 4,000 of another simulation of bonds .305.
PERCOLATION = {
    (4, 0.4): 0.014, (4, 0.5): 0.305, (4, 0.55): 0.726, (4, 0.58): 0.849, (4, 0.7): 0.974,
    (8, 0.2): 0.020, (8, 0.25): 0.271, (8, 0.3): 0.784, (8, 0.4): 0.946, (8, 0.58): 0.998,
}  # fmt: skip
# share of 20 x 20 cells: no break, 20 random ones, a column, 39 random ones, a cross; 1,000 fires each, about +-.015
BREAKS = {
    (4, 0.58): (0.713, 0.525, 0.298, 0.318, 0.148),
    (4, 0.70): (0.944, 0.872, 0.440, 0.764, 0.209),
    (8, 0.30): (0.594, 0.445, 0.236, 0.316, 0.116),
    (8, 0.40): (0.914, 0.832, 0.424, 0.750, 0.188),
    (8, 0.58): (0.992, 0.938, 0.471, 0.886, 0.221),
}


# -- one step --------------------------------------------------------------------------------------------------------


def test_bonds_open_as_often_as_ignition_probability_says():
    """The centre of 3 x 3 is reached from its burning neighbours with 1 - prod (1 - p): bonds and steps agree."""
    land = Landscape.fractal(7, 3, wind=(3.0, 0.0), bare=0.0, base=0.15, relief=15.0)
    probability = land.bond_probabilities(8)
    burning = torch.tensor([[[1, 0, 1], [0, 0, 1], [1, 1, 0]]], dtype=torch.bool)
    expected = ignition_probability(burning[0], probability[0], 8)[1, 1].item()
    rows, fires = 1500, 16
    numbers = fire_numbers(torch.arange(rows), fires, 9)[..., :-1]
    bonds = open_bonds(numbers, thresholds(probability), 8)
    free = burning.clone()
    free[:, 1, 1] = True
    words = spread(burning.expand(rows, 3, 3).to(torch.int16).neg(), bonds, free.expand(rows, 3, 3), 8, 1)
    got = burn_probability(words, fires).mean(0)[1, 1].item()
    assert 0.2 < expected < 0.9
    assert abs(got - expected) < 4 * math.sqrt(expected * (1 - expected) / (rows * fires))


def stepwise(land, neighbours, fires):
    """Final shares of burned cells by the model of steps: a random number per cell and step."""
    probability = land.bond_probabilities(neighbours)[0]
    height, width = land.size
    fuel = torch.ones(fires, height, width, dtype=torch.bool)
    burning = torch.zeros_like(fuel)
    burning.view(fires, -1)[torch.arange(fires), torch.randint(height * width, (fires,))] = True
    for _ in range(3 * height * width):
        fuel = fuel & ~burning
        lit = fuel & (torch.rand(fuel.shape) < ignition_probability(burning, probability, neighbours))
        if not burning.any():
            break
        burning = lit
    return (~fuel).flatten(1).double().mean(1)


@pytest.mark.parametrize(("neighbours", "p", "wind"), [(8, 0.3, 0.0), (4, 0.55, 0.0), (8, 0.15, 6.0)])
def test_bonds_burn_as_much_as_steps(neighbours, p, wind):
    land = Landscape.from_arrays(torch.zeros(8, 8), wind=(wind, 0.0), base=p)
    steps = stepwise(land, neighbours, 3000)
    found = assess(
        torch.zeros(1, 8, 8, dtype=torch.bool),
        land.burnable,
        thresholds(land.bond_probabilities(neighbours)),
        fires=6400,
        neighbours=neighbours,
    )
    error = math.hypot(float(steps.std()) / math.sqrt(len(steps)), float(found.error))
    assert abs(float(steps.mean() - found.burned)) < 4 * error


# -- reference numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("neighbours", "p"), list(PERCOLATION))
def test_percolation(neighbours, p):
    """Lit at the centre; where the reference is of 1,000 fires, its error is that of so many."""
    size, rows, fires = 50, 12, 64
    land = Landscape.uniform(p, size)
    numbers = fire_numbers(torch.arange(rows), fires, size * size)[..., :-1]
    bonds = open_bonds(numbers, thresholds(land.bond_probabilities(neighbours)), neighbours)
    start = torch.zeros(rows, size, size, dtype=torch.int64)
    start[:, size // 2, size // 2] = -1
    words = spread(start, bonds, land.burnable.expand(rows, size, size), neighbours, 4 * size)
    share = burned_cells(words, fires).double().flatten() / size**2
    error = float(share.std()) * math.hypot(1 / math.sqrt(share.numel()), 1 / math.sqrt(1000))
    assert abs(float(share.mean()) - PERCOLATION[neighbours, p]) < 3 * error + 0.002


@pytest.mark.parametrize(("neighbours", "p"), list(BREAKS))
def test_breaks(neighbours, p):
    land = Landscape.uniform(p)
    rows = land.burnable.repeat(32, 1, 1)
    kinds = [
        torch.zeros_like(rows),
        random_breaks(rows, 20),
        column_breaks(rows, 20),
        random_breaks(rows, 39),
        cross_breaks(rows, 39),
    ]
    level = thresholds(land.bond_probabilities(neighbours))
    assert [int(kind[0].sum()) for kind in kinds] == [0, 20, 20, 39, 39]
    for kind, expected in zip(kinds, BREAKS[neighbours, p], strict=True):
        words = burn(torch.arange(32), rows & ~kind, land.burnable, level, fires=64, neighbours=neighbours)
        share = burned_cells(words, 64).double().flatten() / 400
        error = float(share.std()) / math.sqrt(len(share))
        assert abs(float(share.mean()) - expected) < 0.015 + 3 * error


def test_a_diagonal_leaks_under_eight_neighbours():
    land = Landscape.uniform(1.0, 9)
    diagonal = torch.eye(9, dtype=torch.bool).unsqueeze(0)
    for neighbours, expected in ((4, 36 / 81), (8, 72 / 81)):
        level = thresholds(land.bond_probabilities(neighbours))
        found = assess(diagonal, land.burnable, level, neighbours=neighbours, fires=64)
        assert float(found.burned) == pytest.approx(expected)
    full = column_breaks(land.burnable, 9)
    assert float(assess(full, land.burnable, level, fires=64).burned) == pytest.approx(36 / 81)


# -- numbers and words -----------------------------------------------------------------------------------------------


def test_bits_are_fair_and_independent():
    numbers = fire_numbers(torch.arange(64), 16, 99)
    bits = ((numbers.unsqueeze(-1) >> torch.arange(64)) & 1).double().flatten(0, 2)
    count = len(bits)
    assert ((bits.mean(0) - 0.5).abs() < 5 * 0.5 / math.sqrt(count)).all()
    centred = bits - 0.5
    pairs = centred.T @ centred / count / 0.25 - torch.eye(64)
    assert (pairs - torch.diag(pairs.diag())).abs().max() < 5 / math.sqrt(count)
    along = (centred[1:] * centred[:-1]).mean(0) / 0.25
    assert along.abs().max() < 5 / math.sqrt(count)


@pytest.mark.parametrize("fires", [1, 15, 16, 17, 32, 33, 63, 64])
def test_every_number_of_fires(fires, device):
    land = Landscape.uniform(0.5, (3, 4))
    seed, free = torch.arange(6, device=device), land.burnable.repeat(6, 1, 1).to(device)
    level = thresholds(land.bond_probabilities(8)).to(device)
    words = burn(seed, free, free, level, fires=fires)
    bits = {torch.int16: 16, torch.int32: 32, torch.int64: 64}[words.dtype]
    assert bits == next(size for size in (16, 32, 64) if fires <= size)
    cells = burned_cells(words, fires)
    assert cells.shape == (6, fires)
    assert ((cells >= 1) & (cells <= 12)).all()
    torch.testing.assert_close(burned_fraction(words, fires), cells.float().mean(1) / 12)
    torch.testing.assert_close(burn_probability(words, fires).mean((1, 2)), cells.float().mean(1) / 12)
    # the first fires are the same whatever their number
    fewer = burn(seed, free, free, level, fires=max(1, fires // 2))
    assert torch.equal(burned_cells(fewer, max(1, fires // 2)), cells[:, : max(1, fires // 2)])


def test_ignition_is_uniform_over_free_cells():
    burnable = torch.ones(1, 3, 4, dtype=torch.bool)
    burnable[0, 0, :2] = False
    free = burnable.clone()
    free[0, 2, 1:] = False  # 7 of 10 are free
    rows = 700
    numbers = fire_numbers(torch.arange(rows), 64, 12)[..., -1]
    words = ignition(numbers, burnable.expand(rows, 3, 4), free.expand(rows, 3, 4))
    assert (burned_cells(words, 64) == 1).all()
    share = burn_probability(words, 64, torch.float64).mean(0)
    assert (share[~free[0]] == 0).all()
    assert ((share[free[0]] - 1 / 7).abs() < 4 * math.sqrt(1 / 7 * 6 / 7 / (rows * 64))).all()
    # a fire whose cell is still free begins there
    before = ignition(numbers, burnable.expand(rows, 3, 4), burnable.expand(rows, 3, 4))
    assert torch.equal(
        before & free.expand(rows, 3, 4).long().neg() & words, before & free.expand(rows, 3, 4).long().neg()
    )


def test_nothing_free_nothing_burns():
    free = torch.zeros(2, 3, 3, dtype=torch.bool)
    free[1, 1, 1] = True
    level = thresholds(Landscape.uniform(1.0, 3).bond_probabilities(8))
    words = burn(torch.arange(2), free, torch.ones(1, 3, 3, dtype=torch.bool), level, fires=4)
    assert burned_cells(words, 4).tolist() == [[0] * 4, [1] * 4]


def test_spread_leaves_its_arguments_alone():
    level = thresholds(Landscape.uniform(0.9, 4).bond_probabilities(8))
    for rows in (1, 3):
        free = torch.ones(rows, 4, 4, dtype=torch.bool)
        numbers = fire_numbers(torch.arange(rows), 4, 16)
        start = ignition(numbers[..., -1], free, free)
        bonds = open_bonds(numbers[..., :-1], level, 8)
        parts = [part.clone() for part in (start, bonds, free)]
        words = spread(start, bonds, free, 8, 16)
        for part, before in zip((start, bonds, free), parts, strict=True):
            assert torch.equal(part, before)
        assert burned_fraction(words, 4).mean() > 0.9


def test_sweeps_cut_a_fire_off():
    level = thresholds(Landscape.uniform(1.0, (1, 12)).bond_probabilities(4))
    start = torch.zeros(1, 1, 12, dtype=torch.int16)
    start[0, 0, 0] = 1
    free = torch.ones(1, 1, 12, dtype=torch.bool)
    bonds = open_bonds(fire_numbers(torch.tensor([3]), 1, 12)[..., :-1], level, 4)
    lengths = [int(spread(start, bonds, free, 4, sweeps).sum()) for sweeps in range(13)]
    assert lengths == [*range(1, 13), 12]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 6), st.sampled_from([4, 8]), st.integers(-(2**63), 2**63 - 1),
    st.floats(0.0, 1.0), st.integers(0, 2**20),
)  # fmt: skip
def test_more_breaks_never_burn_more_cells(height, width, neighbours, seed, p, pick):
    """Of the fires whose first cell stays free: open bonds are the same, with fewer cells."""
    land = Landscape.uniform(p, (height, width))
    burnable = land.burnable
    few = (torch.arange(height * width) * 7919 + pick).remainder(5).eq(0).view(1, height, width)
    many = few | (torch.arange(height * width) * 104729 + pick).remainder(3).eq(0).view(1, height, width)
    level = thresholds(land.bond_probabilities(neighbours))
    seeds = torch.tensor([seed])
    words = [burn(seeds, burnable & ~kind, burnable, level, fires=64, neighbours=neighbours) for kind in (few, many)]
    begins = ignition(fire_numbers(seeds, 64, height * width)[..., -1], burnable, burnable)
    kept = burned_cells(begins & (burnable & ~many).long().neg(), 64) == 1
    cells = [burned_cells(word, 64) for word in words]
    assert (cells[1] <= cells[0])[kept].all()
    assert not (words[1] & many.long().neg()).any()
    assert all(int(count.max()) <= int((~kind).sum()) for count, kind in zip(cells, (few, many), strict=True))


# -- the operator ----------------------------------------------------------------------------------------------------


def arguments(device, rows=5, neighbours=8):
    land = Landscape.fractal(3, (6, 5), count=rows, wind=(2.0, 0.0), base=0.4)
    free = land.burnable & ~random_breaks(land.burnable, 4)
    level = thresholds(land.bond_probabilities(neighbours))
    return tuple(part.to(device) for part in (torch.arange(rows) * 31, free, land.burnable, level))


def test_a_row_by_itself(device):
    parts = arguments(device)
    words = burn(*parts, fires=20)
    for row in range(5):
        assert torch.equal(burn(*(part[row : row + 1] for part in parts), fires=20), words[row : row + 1])


def test_inactive_rows(device):
    parts = arguments(device)
    active = torch.tensor([False, True, False, True, True], device=device)
    assert torch.equal(burn(*parts, active=active)[active], burn(*parts)[active])
    assert burn(*parts, active=~active & active).shape == (5, 6, 5)


def test_operator_as_torch_wants_it():
    seed, free, burnable, level = arguments("cpu")
    torch.library.opcheck(
        torch.ops.torchrl_perf.burn.default,
        (seed, free, burnable, level, torch.ones(5, dtype=torch.bool), 4, 8, 24),
    )


def test_parts_wait_for_nothing(device):
    """What runs on CUDA: all rows, a fixed number of sweeps."""
    seed, free, burnable, level = arguments(device)
    with no_host_sync(device):
        numbers = fire_numbers(seed, 8, 30)
        start = ignition(numbers[..., -1], burnable, free)
        bonds = open_bonds(numbers[..., :-1], level, 8)
        words = spread(start, bonds, free, 8, 24)
        burned_fraction(words, 8)
        got = burn(seed, free, burnable, level, fires=8)
    assert torch.equal(got, words)


def test_the_end_of_a_fire_may_go_unnoticed(monkeypatch):
    """On CUDA all sweeps are made; on a CPU they end with the fire."""
    parts = arguments("cpu", 40)
    expected = burn(*parts, fires=30)
    monkeypatch.setattr(fire, "_CHECKED", 10**9)
    assert torch.equal(burn(*parts, fires=30), expected)
    assert torch.equal(burn(*parts, fires=30, sweeps=200), expected)


def test_variants_agree(variant):
    parts = arguments(variant.device)

    def burned(*parts):
        return burned_fraction(burn(*parts, fires=8), 8)

    assert torch.equal(variant(burned)(*parts), burned(*parts))


@pytest.mark.gpu
@pytest.mark.parametrize("neighbours", [4, 8])
def test_devices_agree_bit_for_bit(neighbours):
    parts = arguments("cpu", 200, neighbours)
    expected = burn(*parts, fires=40, neighbours=neighbours)
    got = burn(*(part.cuda() for part in parts), fires=40, neighbours=neighbours)
    assert torch.equal(got.cpu(), expected)


def test_bad_arguments():
    seed, free, burnable, level = arguments("cpu")
    with pytest.raises(ValueError, match="fires: expected 1 to 64, received 65"):
        burn(seed, free, burnable, level, fires=65)
    with pytest.raises(ValueError, match="fires: expected 1 to 64, received 0"):
        word_dtype(0)
    with pytest.raises(ValueError, match="neighbours: expected 4 or 8, received 6"):
        burn(seed, free, burnable, level, neighbours=6)
    with pytest.raises(ValueError, match=r"burnable: expected \[5, ...\] or \[1, ...\] and cells \[6, 5\]"):
        burn(seed, free, burnable[:, :4], level)
    with pytest.raises(ValueError, match=r"threshold: expected \[5, ...\]"):
        burn(seed, free, burnable, level[:2])
    with pytest.raises(ValueError, match=r"received 8 planes and seeds \[5\]. Remedy: make both for 4 neighbours"):
        burn(seed, free, burnable, level, neighbours=4)
    with pytest.raises(ValueError, match=r"seeds \[5\], received 8 planes and seeds \[4\]"):
        burn(seed[:4], free, burnable, level)
    with pytest.raises(ValueError, match="fires: expected at least 1, received 0"):
        assess(~free, burnable, level, fires=0)
