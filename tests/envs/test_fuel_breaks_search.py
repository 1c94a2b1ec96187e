"""Search for placements against every placement of a small map; varied landscapes; fires of many placements."""

import itertools

import pytest
import torch

from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape, column_breaks, random_breaks, swap_search


def every_placement(cells, budget):
    """bool ``[P, side, side]``: all sets of ``budget`` cells."""
    chosen = torch.tensor(list(itertools.combinations(range(cells), budget)))
    side = int(cells**0.5)
    return torch.zeros(len(chosen), cells, dtype=torch.bool).scatter(1, chosen, True).view(-1, side, side)


def lit(env, breaks, groups, seed=7):
    """Burned shares of placements in the first landscape under the same fires."""
    number = torch.zeros(len(breaks), dtype=torch.int64)
    seeds = [torch.full_like(number, seed * 1000 + group) for group in range(groups)]
    return sum(env.light(breaks, landscape_id=number, seed=part, fires=64).double() for part in seeds) / groups


def test_the_best_of_all_placements_of_even_ground():
    env = FuelBreaks(1, landscape=Landscape.uniform(0.4, 4), budget=3, observation="compact")
    best = float(lit(env, every_placement(16, 3), 32).min())
    for seed in range(2):
        start = random_breaks(env.burnable(), 3, generator=torch.Generator().manual_seed(seed))
        found = env.search(start=start, rounds=60, proposals=24, fires=1024, seed=seed)
        assert int(found.sum()) == 3
        assert float(lit(env, found, 32)) == pytest.approx(best, abs=0.012)
        assert float(lit(env, start, 32)) > best + 0.02


def test_the_best_of_all_placements_of_a_hilly_map():
    ground = Landscape.varied(3, 4, count=2, barriers=0.0, bare=0.0, base=0.4)
    env = FuelBreaks(1, landscape=ground, budget=3, observation="compact")
    found = env.search(rounds=60, proposals=24, fires=1024, seed=1)
    everything = every_placement(16, 3)
    for number in range(2):
        rows = torch.full((len(everything),), number)
        seeds = [torch.full_like(rows, 5_000 + group) for group in range(32)]
        burned = sum(env.light(everything, landscape_id=rows, seed=part, fires=64).double() for part in seeds) / 32
        own = int((everything == found[number]).all((1, 2)).int().argmax())
        assert torch.equal(everything[own], found[number])
        assert float(burned[own]) <= float(burned.min()) + 0.01
        assert int((burned < burned[own]).sum()) < 6  # of 560


def test_a_search_improves_on_its_start_and_repeats():
    ground = Landscape.varied(0, 8, count=4, base=0.4)
    env = FuelBreaks(1, landscape=ground, budget=6, observation="compact")
    first = env.search(rounds=25, proposals=12, fires=128, seed=2)
    assert torch.equal(first, env.search(rounds=25, proposals=12, fires=128, seed=2))
    assert not torch.equal(first, env.search(rounds=25, proposals=12, fires=128, seed=3))
    assert (first.flatten(1).sum(1) == 6).all() and not (first & ~env.burnable()).any()
    number, column = torch.arange(4), column_breaks(env.burnable(), 6)
    before, after = (env.assess(breaks, landscape_id=number, fires=1024, seed=9).burned for breaks in (column, first))
    assert float(after.mean()) < 0.97 * float(before.mean())
    assert (after < before + 0.01).all()


def test_nothing_to_swap_and_refusals():
    env = FuelBreaks(1, landscape=Landscape.uniform(0.5, 2), budget=4, observation="compact")
    assert env.search(rounds=2).all()
    ground, threshold = env.burnable(), torch.zeros(1, 4, 2, 2, dtype=torch.int32)
    for name in ("rounds", "proposals", "fires"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, received 0"):
            swap_search(ground, threshold, 1, **{name: 0})
    with pytest.raises(ValueError, match=r"start: expected burnable cells of \[1, 2, 2\], received \[1, 3, 3\]"):
        swap_search(ground, threshold, 1, start=torch.zeros(1, 3, 3, dtype=torch.bool))


def test_fires_of_many_placements_are_those_of_an_assessment():
    env = FuelBreaks(1, landscape=Landscape.varied(0, 6, count=3), budget=4, neighbours=4)
    breaks, number = random_breaks(env.burnable(), 4), torch.arange(3)
    seed = torch.zeros(3, dtype=torch.int64)
    together = env.light(breaks, landscape_id=number, seed=seed, fires=64)
    torch.testing.assert_close(together.double(), env.assess(breaks, landscape_id=number, fires=64, seed=0).burned)
    assert env.light(breaks, landscape_id=number, seed=seed).shape == (3,)


class TestVaried:
    def test_the_same_for_a_seed(self):
        few, many = Landscape.varied(4, (7, 9), count=2), Landscape.varied(4, (7, 9), count=5)
        for name in ("elevation", "vegetation", "density", "wind_east", "wind_north", "burnable"):
            assert torch.equal(getattr(few, name), getattr(many, name)[:2]), name
        assert not torch.equal(Landscape.varied(5, (7, 9)).elevation, few.elevation[:1])

    def test_relief_and_wind_are_drawn_for_each(self):
        ground = Landscape.varied(0, 12, count=200, relief=(20.0, 120.0), wind=8.0)
        heights = ground.elevation.amax((1, 2))
        assert 20.0 <= float(heights.min()) < 30.0
        assert 110.0 < float(heights.max()) <= 120.0
        speed = torch.hypot(ground.wind_east, ground.wind_north)[:, 0, 0]
        assert float(speed.max()) <= 8.0
        assert float(speed.mean()) == pytest.approx(4.0, abs=0.5)
        for wind in (ground.wind_east, ground.wind_north):
            assert abs(float(wind.mean())) < 1.0
            assert torch.equal(wind.amin((1, 2)), wind.amax((1, 2)))

    def test_barriers(self):
        none, some = (Landscape.varied(0, 20, count=60, bare=0.0, barriers=chance) for chance in (0.0, 1.0))
        assert none.burnable.all()
        lines = (~some.burnable).flatten(1).sum(1)
        assert (lines >= 20).all() and (lines <= 40).all()  # two lines of 20 cells, with gaps
        half = Landscape.varied(0, 20, count=60, bare=0.0).burnable
        without = half.flatten(1).all(1).double().mean()
        assert 0.1 < float(without) < 0.4
        with pytest.raises(ValueError, match=r"barriers: expected a probability, received 2"):
            Landscape.varied(0, barriers=2.0)
        with pytest.raises(ValueError, match="expected count >= 1"):
            Landscape.varied(0, count=0)
