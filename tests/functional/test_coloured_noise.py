"""Coloured noise: spectrum, variance and correlation against theory, a float64 loop, the matrix form."""

import cmath
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional import coloured_noise
from torchrl_perf.functional.coloured_noise import coloured_filter, coloured_gains
from torchrl_perf.runtime import no_host_sync

F64 = torch.float64


def by_hand(white, exponent):
    """Discrete Fourier sums of one sequence, in Python numbers."""
    n = len(white)
    frequency = [min(k, n - k) for k in range(n)]
    gain = [(max(k, 1) / n) ** (-exponent / 2) for k in frequency]
    scale = math.sqrt(sum(g * g for g in gain) / n)
    turn = [[cmath.exp(2j * math.pi * k * t / n) for t in range(n)] for k in range(n)]
    spectrum = [sum(w * turn[k][t].conjugate() for t, w in enumerate(white)) * gain[k] / scale for k in range(n)]
    return [sum(spectrum[k] * turn[k][t] for k in range(n)).real / n for t in range(n)]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=9), st.floats(-2, 4))
def test_equals_a_loop(white, exponent):
    ours = coloured_noise(torch.tensor(white, dtype=F64), exponent)
    torch.testing.assert_close(ours, torch.tensor(by_hand(white, exponent), dtype=F64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 9, 10])
def test_exponent_zero_is_the_input(steps, device):
    white = torch.randn(3, steps, dtype=F64, device=device)
    torch.testing.assert_close(coloured_noise(white, 0.0), white)
    torch.testing.assert_close(coloured_filter(steps, 0.0, dtype=F64), torch.eye(steps, dtype=F64))


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 64])
@pytest.mark.parametrize("exponent", [-1.0, 0.5, 1.0, 2.0, 4.0])
def test_each_number_has_the_variance_of_the_white_noise(steps, exponent):
    matrix = coloured_filter(steps, exponent, dtype=F64)
    torch.testing.assert_close(matrix, matrix.T)
    covariance = matrix @ matrix.T
    torch.testing.assert_close(covariance.diagonal(), torch.ones(steps, dtype=F64))
    assert (covariance.abs() <= 1 + 1e-9).all()


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_spectrum_of_many_sequences(exponent, device):
    """The periodogram falls as f^-exponent: the slope of its logarithm, and its level at each frequency."""
    steps, n = 64, 4000
    noise = coloured_noise(torch.randn(n, steps, device=device), exponent)
    power = torch.fft.rfft(noise.double()).abs().square().mean(0)[1:-1] / steps
    frequency = torch.arange(1, steps // 2, dtype=F64, device=device) / steps
    x = frequency.log() - frequency.log().mean()
    slope = (x * power.log()).sum() / x.square().sum()
    assert slope.item() == pytest.approx(-exponent, abs=0.03)
    level = coloured_gains(steps, exponent, dtype=F64, device=device)[1:-1].square()
    torch.testing.assert_close(power, level, rtol=5 / math.sqrt(n), atol=0.0)
    assert noise.std().item() == pytest.approx(1.0, rel=0.05)


def test_neighbours_are_alike_as_the_exponent_grows():
    correlation = [(m @ m)[0, 1].item() for m in (coloured_filter(10, b, dtype=F64) for b in (-1.0, 0.0, 1.0, 2.0))]
    assert correlation == sorted(correlation) and correlation[0] < 0 < correlation[2]


def test_any_dim_and_the_matrix(device):
    white = torch.randn(4, 10, 3, device=device)
    ours = coloured_noise(white, 1.0, dim=1)
    torch.testing.assert_close(ours[2, :, 1], coloured_noise(white[2, :, 1], 1.0))
    matrix = coloured_filter(10, 1.0, device=device)
    torch.testing.assert_close((white.transpose(1, 2) @ matrix).transpose(1, 2), ours, rtol=1e-4, atol=1e-5)
    assert ours.dtype == white.dtype and ours.device.type == device.type


def test_no_host_wait():
    white = torch.randn(2, 8)
    with no_host_sync("cpu"):
        coloured_noise(white, 1.0)


def test_no_steps():
    with pytest.raises(ValueError, match="steps: expected at least 1, received 0"):
        coloured_gains(0, 1.0)
