"""Closed forms of normals and squashed normals against torch's, fine quadrature and Monte-Carlo."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from torchrl_perf.functional.losses.hybrid import (
    expected_soft_value,
    normal_entropy,
    normal_kl,
    normal_log_prob,
    present,
    squash_log_jacobian_mean,
    squashed_normal_entropy,
    sum_to,
)

F64 = torch.float64


def test_normals_are_torchs():
    loc, other, x = torch.randn(3, 7, 4, dtype=F64)
    scale, other_scale = torch.rand(2, 7, 4, dtype=F64) + 0.1
    p, q = (Independent(Normal(m, s), 1) for m, s in ((loc, scale), (other, other_scale)))
    torch.testing.assert_close(normal_log_prob(x, loc, scale), p.log_prob(x))
    torch.testing.assert_close(normal_entropy(scale), p.entropy())
    torch.testing.assert_close(normal_kl(loc, scale, other, other_scale), kl_divergence(p, q))
    assert (normal_kl(loc, scale, loc, scale) == 0).all()


def test_reference_entropies():
    """Normal(0, 1): 1.4189; squashed into [0, .5] by sigmoid: -0.886."""
    assert normal_entropy(torch.ones(1)).item() == pytest.approx(1.4189, abs=1e-4)
    # sigmoid(x) is (1 + tanh(x / 2)) / 2
    entropy = squashed_normal_entropy(torch.zeros(1), torch.full((1,), 0.5), 0.0, 0.5)
    assert entropy.item() == pytest.approx(-0.8863, abs=1e-4)


@pytest.mark.parametrize(("scale", "tolerance"), [(0.01, 1e-6), (0.5, 1e-6), (2.0, 2e-6), (4.0, 1e-3), (7.39, 0.02)])
def test_quadrature_error_is_what_it_says(scale, tolerance):
    loc = torch.tensor([0.0, 0.3, 1.7, -3.0, 6.0], dtype=F64)
    u = torch.linspace(-9, 9, 20_001, dtype=F64)
    weight = (-u.square() / 2).softmax(-1)
    x = loc[:, None] + scale * u
    exact = (weight * 2 * (math.log(2) - x - torch.nn.functional.softplus(-2 * x))).sum(-1)
    got = squash_log_jacobian_mean(loc, torch.full_like(loc, scale))
    assert (got - exact).abs().max() < tolerance


def test_entropy_is_minus_the_mean_log_density():
    loc, scale = torch.tensor([0.4, -1.0], dtype=F64), torch.tensor([0.7, 1.5], dtype=F64)
    x = loc + scale * torch.randn(200_000, 2, dtype=F64)
    log_density = normal_log_prob(x, loc, scale) - (
        2 * (math.log(2) - x - torch.nn.functional.softplus(-2 * x)) + math.log(3.0)
    ).sum(-1)
    entropy = squashed_normal_entropy(loc, scale, -2.0, 4.0)
    assert -log_density.mean().item() == pytest.approx(entropy.item(), abs=0.02)
    assert entropy < 2 * math.log(6.0)


def test_gradients_are_the_finite_differences():
    loc = torch.randn(3, 2, dtype=F64, requires_grad=True)
    scale = (torch.rand(3, 2, dtype=F64) + 0.2).requires_grad_()
    assert torch.autograd.gradcheck(lambda m, s: squashed_normal_entropy(m, s, -1.0, 2.0), (loc, scale))


def test_nodes_add_up_and_missing_ones_count_nothing():
    values = torch.arange(12.0).view(2, 3, 2)
    assert sum_to(values, 1).tolist() == [15.0, 51.0]
    assert sum_to(values, 3) is values
    valid = torch.tensor([True, False])
    assert present(torch.tensor([2.0, math.nan]), valid).tolist() == [2.0, 0.0]
    assert present(values, None) is values


def test_expected_soft_value_by_hand():
    log_policy = torch.tensor([[0.25, 0.75, 0.0]]).log()
    value = torch.tensor([[4.0, 8.0, math.nan]])
    got = expected_soft_value(value, log_policy, 2.0)
    assert got.item() == pytest.approx(7.0 - 2.0 * (0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
