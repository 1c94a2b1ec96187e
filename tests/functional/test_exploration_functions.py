"""Ornstein-Uhlenbeck steps, factor noise, bounded Gaussian noise: closed forms and moments."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrl_perf.functional.exploration import bounded_gaussian, factor_noise, ou_factors, ou_step


def test_a_step_by_hand():
    # theta dt = ln 2: half of the distance to the mean is left
    state, noise = torch.tensor([3.0, -1.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    got = ou_step(state, noise, theta=math.log(2), dt=1.0, mean=1.0)
    torch.testing.assert_close(got, torch.tensor([2.0, 0.0], dtype=torch.float64))
    decay, spread = ou_factors(math.log(2), 1.0)
    assert decay == pytest.approx(0.5)
    assert spread == pytest.approx(math.sqrt(0.75 / (2 * math.log(2))))
    assert float(ou_step(state[0], torch.tensor(2.0), theta=math.log(2), sigma=3.0, dt=1.0)) == pytest.approx(
        1.5 + 6 * spread
    )


def test_brownian_motion_at_theta_zero():
    assert ou_factors(0.0, 0.25) == (1.0, 0.5)
    decay, spread = ou_factors(1e-9, 0.25)
    assert (decay, spread) == pytest.approx((1.0, 0.5))


@given(theta=st.floats(1e-3, 5.0), dt=st.floats(1e-3, 5.0))
@settings(max_examples=30, deadline=None)
def test_stationary_variance_is_that_of_the_process(theta, dt):
    decay, spread = ou_factors(theta, dt)
    assert spread**2 / (1 - decay**2) == pytest.approx(1 / (2 * theta), rel=1e-6)


@given(theta=st.floats(0.0, 3.0), dt=st.floats(0.01, 2.0))
@example(theta=5e-324, dt=0.5)  # a half of it is 0
@settings(max_examples=30, deadline=None)
def test_two_half_steps_are_one_step(theta, dt):
    (half, half_spread), (decay, spread) = ou_factors(theta, dt / 2), ou_factors(theta, dt)
    assert half * half == pytest.approx(decay)
    assert math.sqrt((half * half_spread) ** 2 + half_spread**2) == pytest.approx(spread)


def test_factor_noise():
    torch.testing.assert_close(factor_noise(torch.tensor([4.0, -9.0, 0.0])), torch.tensor([2.0, -3.0, 0.0]))
    factors = factor_noise(torch.randn(200_000))
    assert float(factors.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(factors.var()) == pytest.approx(math.sqrt(2 / math.pi), rel=0.02)


def test_bounded_gaussian_by_hand():
    low, high = torch.tensor([-2.0, 0.0, -math.inf]), torch.tensor([2.0, 1.0, math.inf])
    action = torch.tensor([1.0, 0.5, 7.0])
    got = bounded_gaussian(action, torch.ones(3), torch.tensor(0.4), low, high)
    torch.testing.assert_close(got, torch.tensor([1.8, 0.7, 7.4]))
    got = bounded_gaussian(action, -10 * torch.ones(3), torch.tensor(1.0), low, high)
    torch.testing.assert_close(got, torch.tensor([-2.0, 0.0, -3.0]))
