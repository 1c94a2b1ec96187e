"""Weighted sums of components, and components of one scale."""

import pytest
import torch

from torchrl_perf.functional.components import standardized_components, weighted_sum


def test_weighted_sum_by_hand():
    components = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    torch.testing.assert_close(weighted_sum(components, torch.tensor([1.0, 0.5, -1.0])), torch.tensor([[-1.0], [0.5]]))
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    torch.testing.assert_close(weighted_sum(components, rows), torch.tensor([[1.0], [12.0]]))


def test_a_weight_of_zero_leaves_a_column_out_whatever_it_holds():
    components = torch.tensor([[1.0, torch.nan], [2.0, torch.inf]])
    assert weighted_sum(components, torch.tensor([1.0, 0.0])).flatten().tolist() == [1.0, 2.0]
    assert weighted_sum(components, torch.tensor([1.0, 1.0])).isfinite().logical_not().all()


@pytest.mark.parametrize("shape", [(50,), (5, 10)])
def test_standardized_components(shape):
    components = torch.randn(*shape, 3) * torch.tensor([1.0, 100.0, 0.0]) + torch.tensor([0.0, 7.0, 3.0])
    rows = standardized_components(components).reshape(-1, 3)
    torch.testing.assert_close(rows.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4, rtol=0)


def test_one_row_is_zero():
    assert (standardized_components(torch.tensor([[3.0, -1.0]])) == 0).all()
