"""Exploration noise as pure functions: an Ornstein-Uhlenbeck step, and the factors of noisy layers."""

import math

import torch
from torch import Tensor

from torchrl_perf.functional.wide import computed_wide


def ou_factors(theta: float, dt: float) -> tuple[float, float]:
    """The two factors of one exact step of an Ornstein-Uhlenbeck process with sigma 1.

    Args:
        theta: rate of return to the mean, at least 0; 0 is Brownian motion.
        dt: length of a step, in the unit of ``1 / theta``.

    Returns:
        Decay ``exp(-theta dt)``, and the standard deviation ``sqrt((1 - exp(-2 theta dt)) / (2 theta))`` that a step
        adds.
    """
    exponent = 2.0 * theta * dt
    # below, the factor rounds to 1, and the quotient of the smallest numbers would be wrong
    shrunk = 1.0 if exponent < 1e-17 else -math.expm1(-exponent) / exponent
    return math.exp(-theta * dt), math.sqrt(dt * shrunk)


@computed_wide
def ou_step(
    state: Tensor, noise: Tensor, *, theta: float, sigma: float | Tensor = 1.0, mean: float | Tensor = 0.0, dt: float
) -> Tensor:
    """One step of ``dx = theta (mean - x) dt + sigma dW``, exact for any ``dt``.

    ``x' = mean + exp(-theta dt) (x - mean) + sigma sqrt((1 - exp(-2 theta dt)) / (2 theta)) noise``

    Euler's method, which TorchRL uses, has the stationary variance ``sigma^2 / (2 theta - theta^2 dt)`` instead of the
    process's own ``sigma^2 / (2 theta)``, and diverges for ``theta dt > 2``.

    Args:
        state: ``[*]`` float, x.
        noise: ``[*]`` float, standard normal.
        theta: rate of return to the mean, at least 0.
        sigma: a number or a tensor that broadcasts to ``[*]``.
        mean: likewise.
        dt: length of the step.

    Returns:
        ``[*]``, x'.
    """
    decay, spread = ou_factors(theta, dt)
    return mean + decay * (state - mean) + sigma * spread * noise


@computed_wide
def factor_noise(noise: Tensor) -> Tensor:
    """``sign(x) sqrt(|x|)``, whose outer products are the weight noise of a noisy layer (arXiv:1706.10295, eq. 10).

    Args:
        noise: any shape, standard normal.

    Returns:
        The same shape; mean 0 and, like ``|x|`` of a standard normal, variance ``sqrt(2 / pi)``.
    """
    return noise.sign() * noise.abs().sqrt()


@computed_wide
def bounded_gaussian(action: Tensor, noise: Tensor, sigma: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``clamp(a + sigma w noise, low, high)`` with ``w`` half the width of the bounds, or 1 where one is infinite.

    Args:
        action: ``[*, D]`` float.
        noise: ``[*, D]`` of mean 0.
        sigma: scale of the noise as a share of ``w``, broadcasts to ``[*, D]``.
        low: ``[D]``.
        high: ``[D]``.

    Returns:
        ``[*, D]`` within the bounds.
    """
    half = (high - low) / 2
    half = torch.where(half.isfinite(), half, 1.0)
    return (action + sigma * half * noise).clamp(low, high)
