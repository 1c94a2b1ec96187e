"""Distortions of the quantile levels: policies that mind bad or good outcomes more than the mean (arXiv:1806.06923).

A risk-sensitive value is ``E[F^-1(beta(tau))]`` with tau uniform: the distortion ``beta`` moves the levels at which the
quantile function is read. Where the distribution is a histogram instead of a function, the same value is a mean with
the weights of :func:`distorted_mass`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_perf.functional.wide import computed_wide

Number = float | Tensor
RiskKind = Literal["cvar", "wang", "power"]


class Risk(NamedTuple):
    """A distortion and its parameter.

    Attributes:
        kind: ``"cvar"``, ``"wang"`` or ``"power"``.
        eta: a number, or a tensor that broadcasts to the batch ``[*]``, such as one for each row.
    """

    kind: RiskKind
    eta: Number


@computed_wide
def cvar(taus: Tensor, eta: Number) -> Tensor:
    """``eta tau``: the mean of the worst share ``eta`` in (0, 1] of the outcomes; 1 is the mean of all."""
    return eta * taus


@computed_wide
def wang(taus: Tensor, eta: Number) -> Tensor:
    """``Phi(Phi^-1(tau) + eta)``, with the normal distribution function: averse to risk below 0, seeking above."""
    return torch.special.ndtr(torch.special.ndtri(taus) + eta)


@computed_wide
def power(taus: Tensor, eta: Number) -> Tensor:
    """``tau^(1 / (1 + |eta|))`` from 0 on, ``1 - (1 - tau)^(1 / (1 + |eta|))`` below: averse below 0, seeking above."""
    root = 1 / (1 + abs(eta))
    if isinstance(eta, Tensor):
        return torch.where(eta >= 0, taus**root, 1 - (1 - taus) ** root)
    return taus**root if eta >= 0 else 1 - (1 - taus) ** root


def _inverse_cvar(levels: Tensor, eta: Number) -> Tensor:
    return (levels / eta).clamp_max(1)


def _inverse_wang(levels: Tensor, eta: Number) -> Tensor:
    return wang(levels, -eta)


def _inverse_power(levels: Tensor, eta: Number) -> Tensor:
    exponent = 1 + abs(eta)
    if isinstance(eta, Tensor):
        return torch.where(eta >= 0, levels**exponent, 1 - (1 - levels) ** exponent)
    return levels**exponent if eta >= 0 else 1 - (1 - levels) ** exponent


_DISTORTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "cvar": (cvar, _inverse_cvar),
    "wang": (wang, _inverse_wang),
    "power": (power, _inverse_power),
}


@computed_wide
def distort(taus: Tensor, eta: Number, kind: RiskKind = "cvar") -> Tensor:
    """Levels at which a risk-sensitive policy reads the quantile function.

    Args:
        taus: ``[*, K]`` in [0, 1].
        eta: parameter of the distortion, a number or a tensor that broadcasts to ``[*, K]``.
        kind: ``"cvar"``, ``"wang"`` or ``"power"``.

    Returns:
        ``[*, K]`` in [0, 1].

    Raises:
        ValueError: for an unknown kind, or a number ``eta`` out of range; that of a tensor is not looked at.
    """
    check_risk(Risk(kind, eta))
    return _DISTORTIONS[kind][0](taus, eta)


@computed_wide
def distorted_mass(cumulative: Tensor, eta: Number, kind: RiskKind = "cvar") -> Tensor:
    """Weights of the parts of a histogram in the risk-sensitive mean: ``beta^-1(c_i) - beta^-1(c_(i-1))``.

    Args:
        cumulative: ``[*, K]`` ascending, the probability of part i and all below it; the last is taken to be 1.
        eta: as for :func:`distort`.
        kind: as for :func:`distort`.

    Returns:
        ``[*, K]`` with sum 1: the mean is that of the parts' values with these weights.

    Raises:
        ValueError: as :func:`distort`.
    """
    check_risk(Risk(kind, eta))
    # a sum of rounded probabilities may leave [0, 1], where the inverses are defined, or fall short of 1
    inner = _DISTORTIONS[kind][1](cumulative[..., :-1].clamp(0, 1), eta)
    ends = inner.new_zeros(*inner.shape[:-1], 1)
    return torch.cat([ends, inner, ends + 1], -1).diff(dim=-1)


def check_risk(risk: Risk | None) -> Risk | None:
    """Returns a risk of a known kind whose number ``eta`` is in range.

    Raises:
        ValueError: for another one.
    """
    if risk is None:
        return None
    kind, eta = risk
    if kind not in _DISTORTIONS:
        raise ValueError(f"kind: expected one of {sorted(_DISTORTIONS)}, received {kind!r}.")
    if isinstance(eta, Tensor):
        return risk
    if kind == "cvar" and not 0.0 < eta <= 1.0:
        raise ValueError(f"eta: expected the share of outcomes in (0, 1] for cvar, received {eta}. Remedy: 1 for all.")
    if not abs(eta) < float("inf"):
        raise ValueError(f"eta: expected a finite number, received {eta}.")
    return risk
