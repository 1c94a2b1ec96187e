"""Landscapes from a seed and from rasters, DomiRank against a dense inverse, and placements without learning."""

import math

import numpy as np
import pytest
import torch

from torchrl_perf.envs import FuelBreaks, Landscape
from torchrl_perf.envs.fuel_breaks import (
    DENSITY,
    PLANES,
    VEGETATION,
    assess,
    column_breaks,
    cross_breaks,
    domirank,
    domirank_breaks,
    first_cells,
    fuel_graph,
    random_breaks,
)
from torchrl_perf.envs.fuel_breaks.fire import thresholds

RASTERS = ("elevation", "vegetation", "density", "wind_east", "wind_north", "burnable")


# -- fractal ---------------------------------------------------------------------------------------------------------


def test_a_seed_is_a_landscape():
    one, same, other = (Landscape.fractal(seed, 12, count=2) for seed in (4, 4, 5))
    for name in RASTERS:
        assert torch.equal(getattr(one, name), getattr(same, name)), name
    assert not torch.equal(one.elevation, other.elevation)
    assert not torch.equal(one.elevation[0], one.elevation[1])
    more = Landscape.fractal(4, 12, count=3)
    assert torch.equal(more.elevation[:2], one.elevation)


def test_fractal_looks_as_asked_for():
    land = Landscape.fractal(0, (30, 40), count=3, relief=80.0, bare=0.1, wind=(3.0, -4.0), base=0.5)
    assert (len(land), land.size) == (3, (30, 40))
    assert (land.elevation.amin((1, 2)) == 0).all()
    assert (land.elevation.amax((1, 2)) == 80).all()
    assert (~land.burnable).sum((1, 2)).tolist() == [120] * 3
    for name, table in (("vegetation", VEGETATION), ("density", DENSITY)):
        raster = getattr(land, name)
        for number in table.values():  # each a third of the cells
            assert ((raster == number).sum((1, 2)) == 400).all(), (name, number)
    assert (land.wind_east == 3.0).all() and (land.wind_north == -4.0).all()
    # neighbours are alike: noise is smooth
    steps = land.elevation.diff(dim=2).abs().mean() / land.elevation.std()
    assert steps < 0.3
    assert (Landscape.fractal(0, 1).elevation == 0).all()


def test_bad_fractal():
    with pytest.raises(ValueError, match=r"count >= 1 and bare in \[0, 1\), received 0"):
        Landscape.fractal(0, count=0)
    with pytest.raises(ValueError, match=r"received 1 and 1\.0"):
        Landscape.fractal(0, bare=1.0)
    for size in (0, (3, -1), (1, 2, 3), 2.5, True):
        with pytest.raises((ValueError, TypeError)):
            Landscape.fractal(0, size)


# -- fire ------------------------------------------------------------------------------------------------------------


def test_wind_and_slope_by_hand():
    land = Landscape.from_arrays(np.array([[0.0, 30.0], [0.0, 0.0]]), wind=(5.0, 0.0), base=0.2)
    p = land.bond_probabilities(8)[0]
    with_wind, across = math.exp(0.045 * 5), math.exp(0.045 * 5 - 0.131 * 5)
    up = math.exp(0.078 * 45.0)
    assert p[0, 1, 0].item() == pytest.approx(0.2 * with_wind)  # east on flat ground
    assert p[4, 1, 0].item() == pytest.approx(0.2 * math.exp(0.045 * 5 - 0.131 * 10))  # west, against it
    assert p[1, 0, 0].item() == p[5, 0, 0].item() == pytest.approx(0.2 * across)
    assert p[0, 0, 0].item() == 1.0  # uphill with the wind: 0.2 * 1.25 * 33 is more than 1
    assert p[1, 0, 1].item() == pytest.approx(0.2 * across / up)  # south, downhill
    diagonal = math.degrees(math.atan(1 / math.sqrt(2)))
    wind = math.exp(0.045 * 5 + 0.131 * 5 * (math.cos(math.pi / 4) - 1))
    assert p[7, 0, 1].item() == pytest.approx(min(1.0, 0.2 * wind * math.exp(0.078 * diagonal)))  # north-east, uphill
    assert p[0, 0, 1] == p[0, 1, 1] == p[1, 1, 0] == p[2, 1, 1] == 0  # over the edge


def test_fire_runs_with_the_wind_and_uphill():
    none = torch.zeros(1, 9, 21, dtype=torch.bool)
    for land in (
        Landscape.from_arrays(torch.zeros(9, 21), wind=(8.0, 0.0), base=0.35),
        Landscape.from_arrays(torch.arange(21.0).expand(9, 21) * 4.0, base=0.25),
    ):
        level = thresholds(land.bond_probabilities(8))
        found = assess(none, land.burnable, level, fires=2048)
        assert found.burned[0] > 0.1
        share = found.probability[0].mean(0)
        assert share[11:].mean() > 1.5 * share[:10].mean()


def test_a_bond_both_ways_alike_is_kept_once():
    flat, hilly = Landscape.uniform(0.4, 5), Landscape.fractal(0, 5)
    assert thresholds(flat.bond_probabilities(8)).shape == (1, 4, 5, 5)
    assert thresholds(flat.bond_probabilities(4)).shape == (1, 2, 5, 5)
    assert thresholds(hilly.bond_probabilities(8)).shape == (1, 8, 5, 5)
    assert thresholds(flat.bond_probabilities(8)).max() == round(0.4 * 65536)
    assert thresholds(Landscape.uniform(1.0, 5).bond_probabilities(8)).max() == 65536


# -- rasters ---------------------------------------------------------------------------------------------------------


def test_rasters_of_every_kind():
    elevation = np.arange(12, dtype=np.int16).reshape(3, 4)
    land = Landscape.from_arrays(
        elevation,
        vegetation=torch.full((3, 4), 0.4),
        density=np.full((1, 3, 4), -0.4, dtype=np.float32),
        wind=(1.0, np.zeros((3, 4))),
        burnable=elevation > 2,
        cell_size=10.0,
        extra={"canopy": elevation / 12.0, "height": 2.0},
    )
    assert (len(land), land.size) == (1, (3, 4))
    assert land.elevation[0].tolist() == elevation.tolist()
    assert land.burnable.sum() == 9
    assert (land.density == np.float32(-0.4)).all()
    assert (land.wind_east == 1).all()
    planes = land.planes()
    assert planes.shape == (1, len(PLANES) + 2, 3, 4)
    assert planes[0, 0, 2, 3].item() == pytest.approx((11 - 7.0) / 100)
    assert planes[0, 5, 0, 0] == 0
    assert planes[0, 5, 2, 3].item() == pytest.approx(0.58 * 1.4 * (1 + np.float32(-0.4)))
    assert (planes[0, 7] == 2).all()


def test_bands_are_landscapes():
    land = Landscape.from_arrays(np.random.rand(3, 5, 4), vegetation=np.full((5, 4), 0.4), density=np.zeros((3, 5, 4)))
    assert len(land) == 3
    assert (land.vegetation == 0.4).all() and land.vegetation.shape == (3, 5, 4)


def test_no_data_does_not_burn():
    elevation = np.array([[1.0, np.nan], [3.0, 5.0]])
    vegetation = np.ma.masked_equal(np.array([[0.0, 0.0], [-9999.0, 0.0]]), -9999.0)
    land = Landscape.from_arrays(elevation, vegetation, nodata=float("nan"))
    assert land.burnable[0].tolist() == [[True, False], [False, True]]
    assert land.elevation[0].tolist() == [[1.0, 3.0], [3.0, 5.0]]
    land = Landscape.from_arrays(np.array([[1.0, -32768.0]]), nodata=-32768.0)
    assert land.burnable[0].tolist() == [[True, False]]
    assert not Landscape.from_arrays(np.array([[7.0, 7.0]]), nodata=7.0).burnable.any()


def test_bad_rasters():
    with pytest.raises(ValueError, match=r"received elevation \[1, 3, 4\], vegetation \[1, 4, 3\]. Remedy: resample"):
        Landscape.from_arrays(np.zeros((3, 4)), np.zeros((4, 3)))
    with pytest.raises(ValueError, match=r"elevation \[2, 3, 4\], density \[3, 3, 4\]"):
        Landscape.from_arrays(np.zeros((2, 3, 4)), density=np.zeros((3, 3, 4)))
    with pytest.raises(ValueError, match=r"elevation \[1, 3, 4\], burnable \[1, 3, 5\]"):
        Landscape.from_arrays(np.zeros((3, 4)), burnable=np.ones((3, 5)))
    with pytest.raises(ValueError, match=r"elevation \[1, 3, 4\], canopy \[1, 2, 2\]"):
        Landscape.from_arrays(np.zeros((3, 4)), extra={"canopy": np.ones((2, 2))})
    with pytest.raises(ValueError, match=r"elevation: expected finite numbers, received 1 of 4 .* nodata"):
        Landscape.from_arrays(np.array([[0.0, np.nan], [0.0, 0.0]]))
    with pytest.raises(ValueError, match="wind_north: expected finite numbers, received 4 of 4"):
        Landscape.from_arrays(np.zeros((2, 2)), wind=(0.0, np.inf))
    with pytest.raises(ValueError, match=r"vegetation: expected numbers from -1 on.*received -3.0"):
        Landscape.from_arrays(np.zeros((2, 2)), -3.0)
    with pytest.raises(ValueError, match="elevation: expected a raster of numbers, received str"):
        Landscape.from_arrays("dem.tif")
    with pytest.raises(ValueError, match=r"elevation: expected \[H, W\], \[L, H, W\] or one number, received \[3\]"):
        Landscape.from_arrays(np.zeros(3))
    with pytest.raises(ValueError, match=r"base: expected a probability in \[0, 1\], received 1.5"):
        Landscape.uniform(1.5)
    with pytest.raises(ValueError, match="cell_size: expected metres above 0, received 0"):
        Landscape.from_arrays(np.zeros((2, 2)), cell_size=0)
    with pytest.raises(ValueError, match=r"burnable: expected \[L, H, W\] with at least one cell"):
        Landscape.from_arrays(np.zeros((0, 2)))
    flat = Landscape.uniform(0.4, 3)
    with pytest.raises(ValueError, match=r"expected one shape \[L, H, W\].* received elevation \[1, 2, 2\]"):
        Landscape(torch.zeros(1, 2, 2), *[flat.density] * 4, flat.burnable)


def test_rasters_in_the_env():
    land = Landscape.from_arrays(np.arange(30.0).reshape(5, 6), extra={"canopy": np.ones((5, 6))})
    env = FuelBreaks(2, landscape=land, budget=3)
    assert env.plane_names == (*PLANES, "canopy", "breaks", "remaining")
    assert env.reset()["observation"].shape == (2, 9, 5, 6)


# -- DomiRank --------------------------------------------------------------------------------------------------------


def test_graph_of_fuel():
    burnable = torch.ones(2, 2, 3, dtype=torch.bool)
    burnable[1, 0, 1] = False
    graph = fuel_graph(burnable, 8)
    assert torch.equal(graph, graph.mT)
    assert graph[0].sum(-1).tolist() == [3, 5, 3, 3, 5, 3]
    assert graph[1].sum(-1).tolist() == [2, 0, 2, 2, 4, 2]
    assert fuel_graph(burnable, 4)[0].sum(-1).tolist() == [2, 3, 2, 2, 3, 2]


@pytest.mark.parametrize("neighbours", [4, 8])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_domirank_is_the_dense_inverse(neighbours, share):
    burnable = torch.rand(2, 5, 6) < 0.8
    got = domirank(burnable, neighbours=neighbours, share=share)
    for row in range(2):
        cells = [(r, c) for r in range(5) for c in range(6)]
        graph = np.zeros((30, 30))
        for i, a in enumerate(cells):
            for j, b in enumerate(cells):
                gap = (abs(a[0] - b[0]), abs(a[1] - b[1]))
                touch = max(gap) == 1 and (neighbours == 8 or sum(gap) == 1)
                graph[i, j] = touch and bool(burnable[(row, *a)]) and bool(burnable[(row, *b)])
        sigma = -share / np.linalg.eigvalsh(graph)[0]
        expected = sigma * np.linalg.inv(sigma * graph + np.eye(30)) @ graph @ np.ones(30)
        np.testing.assert_allclose(got[row].flatten().numpy(), expected, atol=1e-9)
    assert not got[~burnable].any()


def test_domirank_near_nothing_is_the_degree():
    burnable = torch.rand(1, 6, 6) < 0.8
    degree = fuel_graph(burnable).sum(-1).view(1, 6, 6)
    rank = domirank(burnable, share=1e-6)
    torch.testing.assert_close(rank / rank.max(), degree / degree.max(), rtol=1e-4, atol=1e-4)


def test_domirank_beats_random_under_eight_neighbours():
    env = FuelBreaks(1)
    burnable = env.burnable()
    random = env.assess(random_breaks(burnable.expand(20, -1, -1), env.budget), fires=320)
    rank = env.assess(domirank_breaks(burnable, env.budget), fires=6400)
    assert float(rank.burned) < float(random.burned.mean()) - 0.02
    column = env.assess(column_breaks(burnable, env.budget), fires=640)
    assert float(column.burned) < 0.45


def test_bad_domirank():
    with pytest.raises(ValueError, match=r"share: expected sigma as a share in \(0, 1\).*received 1.0"):
        domirank(torch.ones(1, 3, 3, dtype=torch.bool), share=1.0)
    assert not domirank(torch.zeros(1, 3, 3, dtype=torch.bool)).any()


# -- placements ------------------------------------------------------------------------------------------------------


def test_first_cells():
    score = torch.tensor([[3.0, 1.0, 2.0], [2.0, 5.0, 2.0]])
    allowed = torch.tensor([[[1, 1, 1], [1, 0, 1]], [[0, 0, 1], [0, 0, 0]]], dtype=torch.bool)
    assert first_cells(score, allowed, 3).int().tolist() == [[[1, 0, 1], [1, 0, 0]], [[0, 0, 1], [0, 0, 0]]]
    assert not first_cells(score, allowed, 0).any()
    assert torch.equal(first_cells(score, allowed, 9), allowed)


@pytest.mark.parametrize("place", [random_breaks, column_breaks, cross_breaks, domirank_breaks])
def test_placements_keep_to_budget_and_fuel(place, device):
    burnable = (torch.rand(4, 6, 7) < 0.7).to(device)
    for budget in (0, 1, 9, 42):
        breaks = place(burnable, budget)
        assert breaks.dtype == torch.bool and breaks.shape == burnable.shape
        assert not (breaks & ~burnable).any()
        assert torch.equal(breaks.sum((1, 2)), burnable.sum((1, 2)).clamp_max(budget))


def test_column_and_cross():
    burnable = torch.ones(1, 5, 4, dtype=torch.bool)
    assert column_breaks(burnable, 5)[0].int().tolist() == [[0, 0, 1, 0]] * 5
    assert column_breaks(burnable, 7)[0].int().tolist() == [[0, 1, 1, 0]] * 2 + [[0, 0, 1, 0]] * 3
    cross = cross_breaks(burnable, 8)[0].int().tolist()
    assert cross == [[0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 1, 0]]
    assert cross_breaks(burnable, 1)[0].nonzero().tolist() == [[2, 2]]


def test_random_breaks_are_uniform():
    burnable = torch.ones(4000, 2, 3, dtype=torch.bool)
    share = random_breaks(burnable, 2, generator=torch.Generator().manual_seed(0)).double().mean(0)
    assert (share - 1 / 3).abs().max() < 4 * math.sqrt(2 / 9 / 4000)
