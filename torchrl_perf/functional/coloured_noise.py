"""Coloured noise: random sequences whose power spectrum is a power of the frequency."""

import torch
from torch import Tensor

from torchrl_perf.functional.wide import computed_wide

__all__ = ["coloured_filter", "coloured_gains", "coloured_noise"]


def coloured_gains(
    steps: int, exponent: float, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Factors of the frequencies ``k / steps`` that colour white noise: ``c f^(-exponent / 2)``.

    The frequency 0 counts as ``1 / steps``. The constant c is such that each number of the coloured sequence has the
    variance of the white one.

    Args:
        steps: T, length of the sequences.
        exponent: of the power spectrum ``f^-exponent``: 0 white, 1 pink, 2 red (Brownian), negative blue.
        device: of the result.
        dtype: of the result.

    Returns:
        ``[T // 2 + 1]``, in the order of ``torch.fft.rfft``.

    Raises:
        ValueError: for fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, received {steps}. Remedy: steps=1 or more.")
    rank = torch.arange(steps // 2 + 1, dtype=torch.float64)
    gains = (rank.clamp(min=1.0) / steps) ** (-exponent / 2.0)
    # In a real sequence each frequency between 0 and 1/2 also counts for its negative.
    twice = (rank > 0) & (2 * rank < steps)
    power = (gains.square() * (1.0 + twice.to(gains.dtype))).sum() / steps
    return (gains / power.sqrt()).to(device=device, dtype=dtype)


@computed_wide
def coloured_noise(white: Tensor, exponent: float, dim: int = -1) -> Tensor:
    """Colour white noise along a dim (Timmer and Koenig, 1995), as iCEM does for its plans (arXiv:2008.06389).

    The real transform of the white noise is scaled by :func:`coloured_gains` and transformed back. The result is
    periodic, Gaussian where the input is, has the input's variance in each number, and for the exponent 0 it is the
    input. A large exponent makes sequences that keep their direction.

    Args:
        white: float, independent numbers of one variance.
        exponent: of the power spectrum ``f^-exponent``.
        dim: time.

    Returns:
        Shape and dtype of ``white``.
    """
    steps = white.shape[dim]
    gains = coloured_gains(steps, exponent, device=white.device, dtype=white.dtype)
    spectrum = torch.fft.rfft(white.movedim(dim, -1)) * gains
    return torch.fft.irfft(spectrum, n=steps).movedim(-1, dim)


def coloured_filter(
    steps: int, exponent: float, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return :func:`coloured_noise` as a symmetric matrix ``[T, T]`` that multiplies white noise ``[*, T]``.

    For the short sequences of a planner one matrix product takes less time than two transforms, and a compiler can
    merge it.

    Args:
        steps: T.
        exponent: of the power spectrum.
        device: of the result.
        dtype: of the result.
    """
    unit = torch.eye(steps, dtype=torch.float64)
    return coloured_noise(unit, exponent).to(device=device, dtype=dtype)
