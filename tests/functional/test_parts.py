"""Reductions in two stages: values, gradients, and what is reduced at once."""

import pytest
import torch

from torchrl_perf.functional import parts
from torchrl_perf.functional.losses.sac import weighted_mean
from torchrl_perf.functional.parts import divisor, joined_in_parts, mean_of_all, moments_of_all, sum_of_all
from torchrl_perf.functional.rows.valid import reduced, valid_mean


@pytest.fixture(params=["at once", "in parts"])
def split(request, monkeypatch):
    """The second stands for a compiled call on CUDA."""
    if request.param == "in parts":
        monkeypatch.setattr(parts, "splits", lambda values: True)
    return request.param == "in parts"


def numbers(count, shape=None, seed=0):
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn * 3 + 100).view(shape or count)


@pytest.mark.parametrize(
    ("count", "size"),
    [
        (1, None),
        (8_192, None),
        (8_193, None),  # 3 * 2731
        (12_288, 128),
        (65_536, 128),
        (262_144, 128),
        (2**20, 128),
        (2**20 + 128, 128),
        (2**21, 256),
        (262_144 - 128, 128),
        (96_000, 128),
        (100_000, 32),
        (1_000_003, None),
        (2**24, 2_048),
    ],
)
def test_sizes_of_parts(count, size):
    assert divisor(count) == size


@pytest.mark.parametrize("shape", [(65_536, 1), (256, 256), (12_288,), (8_193,), (3,)])
def test_mean_and_its_gradient(shape, split):
    values = numbers(torch.Size(shape).numel(), shape).to(torch.float32).requires_grad_()
    mean = mean_of_all(values)
    (gradient,) = torch.autograd.grad(mean * 2.0, values)
    torch.testing.assert_close(mean, values.to(torch.float64).mean().to(torch.float32), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, torch.full_like(values, 2.0 / values.numel()))


@pytest.mark.parametrize("shape", [(65_536,), (96_000,), (8_193,), (3,)])
def test_sums_of_rows_that_count_and_that_have_weights(shape, split):
    values, weights = numbers(shape[0]), numbers(shape[0], seed=1)
    valid = torch.arange(shape[0]) % 3 != 1
    spoilt = torch.where(valid, values, torch.nan).unsqueeze(-1).requires_grad_()
    mean = valid_mean(spoilt, valid)
    torch.testing.assert_close(mean, values[valid].mean())
    (gradient,) = torch.autograd.grad(mean, spoilt)
    torch.testing.assert_close(gradient.squeeze(-1), valid.to(torch.float64) / valid.sum())
    torch.testing.assert_close(reduced(values, valid, "sum"), values[valid].sum())
    torch.testing.assert_close(weighted_mean(values, weights), (values @ weights) / weights.sum())
    torch.testing.assert_close(weighted_mean(values, None), values.mean())
    assert sum_of_all(valid) == valid.sum()
    assert valid_mean(spoilt, torch.zeros_like(valid)) == weighted_mean(values, torch.zeros_like(values)) == 0


@pytest.mark.parametrize("shape", [(65_536, 1), (100_000,), (8_193,), (2,)])
def test_moments(shape, split):
    values = numbers(torch.Size(shape).numel(), shape)
    std, mean, low, high = moments_of_all(values)
    torch.testing.assert_close((std, mean), torch.std_mean(values), rtol=1e-12, atol=0)
    assert (low, high) == (values.min(), values.max())


def test_moments_of_equal_and_of_bad_numbers(split):
    equal = torch.full((16_384, 1), 0.1)
    std, _, low, high = moments_of_all(equal)
    assert low == high
    assert std < 1e-6
    equal[5] = torch.nan
    assert all(moment.isnan() for moment in moments_of_all(equal))


def test_transposed_numbers(split):
    values = numbers(65_536, (256, 256))
    torch.testing.assert_close(mean_of_all(values.T), values.mean())


@pytest.mark.parametrize("counts", [(1,), (3, 5), (8_192,), (9_000, 1, 144_000), (8_000, 193)])
def test_joined_numbers(counts, split):
    pieces = [numbers(count, seed=count).to(torch.float32) for count in counts]
    rows = joined_in_parts(pieces)
    assert rows.shape[0] == 1 or (split and rows.shape[1] >= 128)
    assert torch.equal(rows.reshape(-1)[: sum(counts)], torch.cat(pieces))
    assert (rows.reshape(-1)[sum(counts) :] == 0).all()
    assert (len(rows) > 1) == (split and sum(counts) > 8_192)


def test_nothing_is_split_outside_of_the_compiler():
    assert parts.part_size(torch.zeros(65_536)) is None
