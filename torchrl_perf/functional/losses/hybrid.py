"""Entropy and divergence of normal and squashed normal actions, and sums over the parts of a hybrid action.

Dimension key: ``D`` components of one continuous action; ``*`` any batch, nodes of an action included.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.functional.masked import masked_expectation
from torchrl_perf.functional.wide import computed_wide

_HALF_LOG_TAU_E = 0.5 * (1 + math.log(2 * math.pi))
QUADRATURE_NODES = 33
"""Nodes of :func:`squash_log_jacobian_mean`, even steps from -6 to 6 standard deviations."""


@computed_wide
def normal_log_prob(x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """``sum_i log N(x_i; loc_i, scale_i)``.

    Args:
        x: ``[*, D]``.
        loc: ``[*, D]``.
        scale: ``[*, D]``, positive.

    Returns:
        ``[*]``.
    """
    return (-0.5 * ((x - loc) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)).sum(-1)


@computed_wide
def normal_entropy(scale: Tensor) -> Tensor:
    """``D/2 (1 + log 2 pi) + sum_i log scale_i``, closed form; negative for small scales.

    Args:
        scale: ``[*, D]``, positive.

    Returns:
        ``[*]`` nats.
    """
    return (scale.log() + _HALF_LOG_TAU_E).sum(-1)


@computed_wide
def normal_kl(loc_p: Tensor, scale_p: Tensor, loc_q: Tensor, scale_q: Tensor) -> Tensor:
    """``KL(p || q) = sum_i [log(s_q / s_p) + (s_p^2 + (m_p - m_q)^2) / (2 s_q^2) - 1/2]``, closed form.

    A divergence does not change under an invertible map of the variable: this is also that of two normals squashed
    into the same bounds.

    Args:
        loc_p: ``[*, D]``.
        scale_p: ``[*, D]``, positive.
        loc_q: ``[*, D]``.
        scale_q: ``[*, D]``, positive.

    Returns:
        ``[*]`` nats, at least 0.
    """
    ratio = scale_p / scale_q
    shift = (loc_p - loc_q) / scale_q
    return (0.5 * (ratio.square() + shift.square() - 1) - ratio.log()).sum(-1)


@computed_wide
def squash_log_jacobian_mean(loc: Tensor, scale: Tensor, nodes: int = QUADRATURE_NODES) -> Tensor:
    """``E[log(1 - tanh(x)^2)]`` for ``x ~ Normal(loc, scale)``, by quadrature: no noise, differentiable.

    There is no closed form. The integral over ``u = (x - loc) / scale`` is the trapezoid sum over ``nodes`` even steps
    in +-6, which converges exponentially for an integrand as smooth as this one. With 33 nodes the error is below 2e-6
    for scales up to 2, 1e-3 up to 4 and 0.02 up to 7.4, the largest scale of ``SquashedNormalHead``. One sample
    instead has a standard deviation of about the scale.

    Args:
        loc: ``[*]``.
        scale: ``[*]``, positive.
        nodes: number of nodes, at least 2. The intermediate is ``[*, nodes]``.

    Returns:
        ``[*]``, negative.
    """
    u = torch.linspace(-6.0, 6.0, nodes, dtype=loc.dtype, device=loc.device)
    weight = (-0.5 * u.square()).softmax(-1)
    x = loc.unsqueeze(-1) + scale.unsqueeze(-1) * u
    return (weight * (2 * (math.log(2) - x - F.softplus(-2 * x)))).sum(-1)


@computed_wide
def squashed_normal_entropy(loc: Tensor, scale: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Entropy of ``a = (high + low) / 2 + (high - low) / 2 tanh(x)``: the normal's, plus ``E[log |da/dx|]``.

    The first term is closed form, the second that of :func:`squash_log_jacobian_mean`. For ``x ~ Normal(0, 1)`` and
    ``a = sigmoid(x) / 2`` it is -0.886, the normal's own 1.419. (``sigmoid(x)`` is ``(1 + tanh(x / 2)) / 2``: half the
    loc and the scale.)

    Args:
        loc: ``[*, D]``.
        scale: ``[*, D]``, positive.
        low: bound, a number or broadcastable to ``[*, D]``.
        high: bound, likewise.

    Returns:
        ``[*]`` nats, at most ``sum_i log(high_i - low_i)``.
    """
    half = (high - low) / 2
    log_half = half.log() if isinstance(half, Tensor) else math.log(half)
    return normal_entropy(scale) + (squash_log_jacobian_mean(loc, scale) + log_half).sum(-1)


def present(values: Tensor, valid: Tensor | None) -> Tensor:
    """The values of the rows that exist, 0 in place of the others.

    Args:
        values: ``[*]``.
        valid: ``[*]`` bool, or None where all exist.

    Returns:
        ``[*]``; no gradient flows to rows that do not exist.
    """
    return values if valid is None else values.masked_fill(~valid, 0.0)


def sum_to(values: Tensor, batch_dims: int) -> Tensor:
    """Sums over all dims after the first ``batch_dims``: the nodes of an action, whose log-probabilities add.

    Args:
        values: ``[*batch, *nodes]``.
        batch_dims: number of leading dims to keep.

    Returns:
        ``[*batch]``.
    """
    return values if values.ndim == batch_dims else values.flatten(batch_dims).sum(-1)


@computed_wide
def expected_soft_value(value: Tensor, log_policy: Tensor, alpha: Tensor | float) -> Tensor:
    """``sum_d pi_d (Q_d - alpha log pi_d)``: the soft value of a discrete choice, without sampling (arXiv:1910.07207).

    Args:
        value: ``[*, D]``.
        log_policy: ``[*, D]``, ``-inf`` for choices that are not allowed, whose values are ignored.
        alpha: 0-d temperature.

    Returns:
        ``[*]``, differentiable in values and policy.
    """
    return masked_expectation(log_policy, value - alpha * log_policy)
