"""Betweenness of cells: against networkx, by hand, and where to place by it."""

import networkx
import pytest
import torch

from torchrl_perf.envs.fuel_breaks import betweenness, betweenness_breaks, fuel_graph


@pytest.mark.parametrize("neighbours", [4, 8])
def test_it_is_that_of_networkx(neighbours):
    fuel = torch.rand(3, 5, 6, generator=torch.Generator().manual_seed(0)) < 0.7
    found = betweenness(fuel, neighbours=neighbours)
    for row, graph in enumerate(fuel_graph(fuel, neighbours)):
        expected = networkx.betweenness_centrality(networkx.from_numpy_array(graph.numpy()), normalized=False)
        torch.testing.assert_close(found[row].flatten(), torch.tensor(list(expected.values()), dtype=torch.float64))
    assert (found[~fuel] == 0).all()


def test_a_line_by_hand():
    # of five cells in a row the middle one lies between 2 x 2 pairs, its neighbours between 1 x 3
    assert betweenness(torch.ones(1, 1, 5, dtype=torch.bool)).flatten().tolist() == [0.0, 3.0, 4.0, 3.0, 0.0]
    assert not betweenness(torch.zeros(1, 2, 2, dtype=torch.bool)).any()


def test_placements():
    line = torch.ones(1, 1, 9, dtype=torch.bool)
    assert betweenness_breaks(line, 3).flatten().nonzero().flatten().tolist() == [3, 4, 5]
    # after the middle one, the middles of the halves that are left; equal ones in the order of the grid
    assert betweenness_breaks(line, 3, anew=True).flatten().nonzero().flatten().tolist() == [1, 4, 6]
    fuel = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.8
    for anew in (False, True):
        found = betweenness_breaks(fuel, 5, anew=anew)
        assert (found.flatten(1).sum(1) == 5).all() and not (found & ~fuel).any()
