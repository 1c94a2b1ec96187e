"""Figures over the rows that count equal those of a batch from which the others are gone."""

import pytest
import torch

from torchrl_perf.functional.rows.valid import explained_variance, finite_where_absent, reduced, valid_mean


@pytest.fixture
def valid(device):
    return torch.tensor([[True, False, True], [True, True, False]], device=device)


def test_explained_variance_has_a_number_for_each_column(valid):
    target, value = torch.randn(2, 3, 4).to(valid.device), torch.randn(2, 3, 4).to(valid.device)
    target[~valid] = torch.nan
    got = explained_variance(target, value, valid)
    rest = (target - value)[valid].var(0, correction=0)
    torch.testing.assert_close(got, 1.0 - rest / target[valid].var(0, correction=0))
    torch.testing.assert_close(got, explained_variance(target[valid], value[valid], None))


def test_explained_variance_of_no_row_is_that_of_a_constant(device):
    none = torch.zeros(5, dtype=torch.bool, device=device)
    got = explained_variance(torch.full((5, 2), torch.nan, device=device), torch.ones(5, 2, device=device), none)
    assert got.tolist() == [1.0, 1.0]  # nothing is left to explain


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_weights_count_with_the_rows(valid, reduction):
    values, weights = torch.rand(2, 3).to(valid.device), torch.rand(2, 3).to(valid.device)
    got = reduced(values, valid, reduction, weights)
    product = values * weights
    expected = {
        "none": torch.where(valid, product, 0.0),
        "sum": product[valid].sum(),
        "mean": product[valid].sum() / weights[valid].sum(),
    }
    torch.testing.assert_close(got, expected[reduction])


def test_absent_rows_are_finite_and_the_others_untouched(valid):
    values = torch.full((2, 3, 2), torch.nan, device=valid.device)
    got = finite_where_absent(values, valid, 7.0)
    assert torch.equal(got[~valid], torch.full((2, 2), 7.0, device=valid.device))
    assert got[valid].isnan().all()


def test_the_mean_of_no_row_is_zero(device):
    none = torch.zeros(3, dtype=torch.bool, device=device)
    assert valid_mean(torch.full((3,), torch.nan, device=device), none).item() == 0.0
