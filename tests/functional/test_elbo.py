"""Weights, divergences, likelihoods, masks and schedules of the evidence lower bound."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Independent, Normal, Poisson, kl_divergence

from torchrl_perf.functional.losses.elbo import (
    beta_at,
    decayed_weights,
    gaussian_kl,
    gaussian_log_likelihood,
    linked,
    masked_latent,
    poisson_log_likelihood,
    temporal_mask,
)
from torchrl_perf.runtime import no_host_sync

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class TestWeights:
    def test_five_at_point_eight(self):
        expected = torch.tensor([0.2975, 0.2380, 0.1904, 0.1523, 0.1218])
        torch.testing.assert_close(decayed_weights(5, 0.8), expected, atol=5e-5, rtol=0)

    def test_one_step_has_all_the_weight(self):
        assert decayed_weights(1, 0.3).tolist() == [1.0]

    def test_each_set_of_arguments_has_its_own(self):
        first = decayed_weights(5, 0.8)
        assert decayed_weights(5, 0.8) is first
        assert decayed_weights(4, 0.8).shape == (4,)
        assert decayed_weights(5, 0.5)[0] > 0.5
        assert decayed_weights(5, 0.8, dtype=torch.float64).dtype == torch.float64
        assert decayed_weights(5, 0.8) is first

    def test_what_was_made_in_inference_mode_can_be_trained_with(self):
        with torch.inference_mode():
            weights = decayed_weights(7, 0.77)
        value = torch.ones(7, requires_grad=True)
        (weights * value).sum().backward()
        assert torch.equal(value.grad, weights)

    @given(horizon=st.integers(1, 30), decay=st.floats(0.05, 2.0))
    @settings(max_examples=20, deadline=None)
    def test_they_add_up_to_one_and_decay(self, horizon, decay):
        weights = decayed_weights(horizon, decay, dtype=torch.float64)
        assert weights.sum().item() == pytest.approx(1.0)
        ratio = weights[1:] / weights[:-1]
        torch.testing.assert_close(ratio, torch.full_like(ratio, decay))

    @pytest.mark.parametrize(("horizon", "decay"), [(0, 0.8), (5, 0.0), (5, math.inf), (5, math.nan)])
    def test_numbers_out_of_range(self, horizon, decay):
        with pytest.raises(ValueError, match="horizon >= 1 and decay > 0"):
            decayed_weights(horizon, decay)


@given(seed=st.integers(0, 999), size=st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_divergence_is_that_of_the_distributions(seed, size):
    generator = torch.Generator().manual_seed(seed)
    loc_q, loc_p = torch.randn(2, 7, size, generator=generator, dtype=torch.float64)
    var_q, var_p = torch.rand(2, 7, size, generator=generator, dtype=torch.float64) + 1e-2
    expected = kl_divergence(Independent(Normal(loc_q, var_q.sqrt()), 1), Independent(Normal(loc_p, var_p.sqrt()), 1))
    found = gaussian_kl(loc_q, var_q, loc_p, var_p)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert (found >= 0).all()
    assert gaussian_kl(loc_q, var_q, loc_q, var_q).abs().max() < 1e-12


def test_divergence_by_hand():
    one, zero = torch.ones(1), torch.zeros(1)
    # of variance 1 at 1 from variance 1 at 0: a half; of variance 4 from 1: (4 - 1 - log 4) / 2
    assert gaussian_kl(one, one, zero, one).item() == pytest.approx(0.5)
    assert gaussian_kl(zero, 4 * one, zero, one).item() == pytest.approx((3 - math.log(4)) / 2)


def test_likelihoods_are_those_of_the_distributions():
    torch.manual_seed(0)
    value, mean, variance = torch.randn(5, 3), torch.randn(4, 5, 3), torch.rand(3) + 0.1
    expected = Normal(mean, variance.sqrt()).log_prob(value).sum(-1)
    torch.testing.assert_close(gaussian_log_likelihood(value, mean, variance), expected)
    count = torch.randint(0, 6, (5, 3)).float()
    expected = Poisson(mean.exp()).log_prob(count).sum(-1)
    torch.testing.assert_close(poisson_log_likelihood(count, mean), expected)
    assert poisson_log_likelihood(count, torch.full((5, 3), 1e4)).isfinite().all()


class TestMask:
    def test_share_and_extremes(self):
        torch.manual_seed(0)
        mask = temporal_mask(200, 50, 1, rate=0.3)
        assert mask.shape == (200, 50, 1) and set(mask.unique().tolist()) == {0.0, 1.0}
        assert mask.mean().item() == pytest.approx(0.7, abs=0.02)  # 4 standard deviations
        assert temporal_mask(9, rate=0.0).eq(1).all() and temporal_mask(9, rate=1.0).eq(0).all()
        with pytest.raises(ValueError, match="probability"):
            temporal_mask(3, rate=1.5)

    def test_what_is_not_kept_reaches_neither_value_nor_gradient(self):
        keep = torch.tensor([[1.0], [0.0]])
        posterior = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan]], requires_grad=True)
        predicted = torch.tensor([[torch.inf, 5.0], [7.0, 8.0]], requires_grad=True)
        mixed = masked_latent(keep, posterior, predicted)
        assert mixed.tolist() == [[1.0, 2.0], [7.0, 8.0]]
        mixed.sum().backward()
        assert posterior.grad.tolist() == [[1.0, 1.0], [0.0, 0.0]]
        assert predicted.grad.tolist() == [[0.0, 0.0], [1.0, 1.0]]

    def test_links_end_with_an_episode(self):
        is_init = torch.tensor([[True, False, True, False, False]])
        assert linked(is_init, 0).tolist() == [[True] * 5]
        assert linked(is_init, 1).tolist() == [[True, False, True, True]]
        assert linked(is_init, 2).tolist() == [[False, False, True]]
        assert linked(is_init, 5).shape == (1, 0)


class TestBeta:
    def values(self, kind, steps, **options):
        return [round(beta_at(torch.tensor(float(step)), kind, **options).item(), 6) for step in steps]

    def test_constant_after_a_warm_up(self):
        assert self.values("constant", (0, 4, 5, 100), beta=2.0, warmup=5) == [0.0, 0.0, 2.0, 2.0]

    def test_linear(self):
        steps = (0, 5, 10, 15, 25, 100)
        assert self.values("linear", steps, beta=2.0, warmup=5, anneal=20) == [0.0, 0.0, 0.5, 1.0, 2.0, 2.0]

    def test_cyclic_rises_in_the_first_half_of_each_period(self):
        steps = (0, 5, 10, 19, 20, 25, 30)
        assert self.values("cyclic", steps, anneal=20) == [0.0, 0.5, 1.0, 1.0, 0.0, 0.5, 1.0]

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("kind", ["constant", "linear", "cyclic"])
    def test_it_stays_on_the_device(self, kind, device):
        step = torch.arange(5.0, device=device)
        weight = torch.tensor(0.5, device=device)
        with no_host_sync(device):
            assert beta_at(step, kind, beta=weight, anneal=2).shape == (5,)

    def test_refusals(self):
        with pytest.raises(ValueError, match="'square'"):
            beta_at(torch.zeros(()), "square")
        with pytest.raises(ValueError, match="anneal >= 1"):
            beta_at(torch.zeros(()), "linear", anneal=0)
