"""Distributional values: the projection of C51, the quantile regression of QR-DQN and IQN, as functions of tensors."""

import math

import torch
from torch import Tensor

from torchrl_perf.functional.wide import computed_wide


@computed_wide
def categorical_projection(next_probs: Tensor, reward: Tensor, discount: Tensor, support: Tensor) -> Tensor:
    """The distribution of ``reward + discount * z`` laid on the atoms of the support (C51, arXiv:1707.06887).

    Each shifted atom shares its probability among its two neighbours, in proportion to its nearness; beyond the ends
    all of it goes to the last atom. On a GPU and for a compiler that is the product with the matrix of elements
    ``max(0, 1 - |z'_j - z_i| / gap)``, which a compiler does not write out. The atoms need not be equally spaced.

    Args:
        next_probs: ``[*, M]`` float, the probabilities of the next state and action.
        reward: ``[*]`` float.
        discount: ``[*]`` float, gamma to the power of the steps, and 0 where the next state is terminal.
        support: ``[M]`` float, ascending.

    Returns:
        ``[*, M]``, each row with the sum of ``next_probs``. With one atom that is ``next_probs`` itself.

    Raises:
        ValueError: where the shapes do not belong together.
    """
    if support.ndim != 1 or next_probs.shape[-1:] != support.shape:
        raise ValueError(
            f"next_probs, support: expected [*, M] and [M], received {list(next_probs.shape)} and "
            f"{list(support.shape)}. Remedy: the atoms in the last dim."
        )
    for name, value in (("reward", reward), ("discount", discount)):
        if value.shape != next_probs.shape[:-1]:
            raise ValueError(
                f"{name}: expected one number for each row of next_probs, {list(next_probs.shape[:-1])}, received "
                f"{list(value.shape)}. Remedy: squeeze(-1) a trailing dim of 1; expand a discount that all rows share."
            )
    if support.shape[0] == 1:
        return next_probs
    shifted = reward.unsqueeze(-1) + discount.unsqueeze(-1) * support
    shifted = shifted.clamp(support[0], support[-1])
    # few kernels and no atomic sums on a GPU, few numbers on a CPU, where the matrix is written out
    dense = shifted.is_cuda or torch.compiler.is_compiling()
    return (_shared_densely if dense else _shared_by_index)(next_probs, shifted, support)


def _shared_densely(probs: Tensor, shifted: Tensor, support: Tensor) -> Tensor:
    """``[*, M]`` probabilities at ``shifted [*, M]`` laid on the atoms, as the product with a matrix."""
    slope = 1 / support.diff()
    # beyond an end atom there is nothing to share with, and no distance on that side: any slope will do
    to_left, to_right = torch.cat([slope[:1], slope]).unsqueeze(-1), torch.cat([slope, slope[-1:]]).unsqueeze(-1)
    distance = shifted.unsqueeze(-2) - support.unsqueeze(-1)  # [*, M, M]: atom i, shifted atom j
    share = (1 - torch.maximum(distance * -to_left, distance * to_right)).clamp_min(0)
    return (share * probs.unsqueeze(-2)).sum(-1)


def _shared_by_index(probs: Tensor, shifted: Tensor, support: Tensor) -> Tensor:
    """The same by the two neighbours of each shifted atom."""
    right = torch.searchsorted(support, shifted).clamp(1, support.shape[0] - 1)
    left = right - 1
    share = probs * ((shifted - support[left]) / support.diff()[left])
    return torch.zeros_like(probs).scatter_add(-1, left, probs - share).scatter_add(-1, right, share)


@computed_wide
def quantile_huber_loss(quantiles: Tensor, targets: Tensor, taus: Tensor, kappa: float = 1.0) -> Tensor:
    """Quantile regression of every predicted quantile on every target (QR-DQN, arXiv:1710.10044; IQN, 1806.06923).

    ``sum_i mean_j |tau_i - 1{d_ij < 0}| L_kappa(d_ij) / kappa`` with ``d_ij = target_j - quantile_i`` and the Huber
    loss ``L_kappa(d) = d^2 / 2`` up to ``kappa``, ``kappa (|d| - kappa / 2)`` beyond. At ``kappa = 0`` it is the
    pinball loss, whose minima are the quantiles themselves; those of a greater kappa lie nearer to the mean.

    Args:
        quantiles: ``[B, K]`` float (any number of batch dims).
        targets: ``[B, K']``, of any other number of samples or quantiles. The gradient is left in; detach them.
        taus: ``[K]`` or ``[B, K]``, the levels in [0, 1] of the predicted quantiles.
        kappa: where the Huber loss becomes linear, in the units of the values; 0 is the pinball loss.

    Returns:
        ``[B]``.

    Raises:
        ValueError: for a negative or infinite kappa, and shapes that do not belong together.
    """
    check_kappa(kappa)
    if quantiles.shape[:-1] != targets.shape[:-1]:
        raise ValueError(
            f"quantiles, targets: expected [B, K] and [B, K'] with the same B, received {list(quantiles.shape)} and "
            f"{list(targets.shape)}."
        )
    if taus.shape not in (quantiles.shape, quantiles.shape[-1:]):
        raise ValueError(
            f"taus: expected [K] or [B, K], that is {list(quantiles.shape[-1:])} or {list(quantiles.shape)}, received "
            f"{list(taus.shape)}. Remedy: the levels of the predicted quantiles, not of the targets."
        )
    error = targets.unsqueeze(-2) - quantiles.unsqueeze(-1)  # [B, K, K']
    level = taus.unsqueeze(-1)
    weight = torch.where(error < 0, 1 - level, level)
    distance = error.abs()
    if kappa > 0:
        near = distance.clamp_max(kappa)
        distance = near * (distance - near / 2) / kappa
    return (weight * distance).mean(-1).sum(-1)


def check_kappa(kappa: float) -> float:
    """Returns a kappa that is finite and not negative.

    Raises:
        ValueError: for another one.
    """
    if not 0.0 <= kappa < math.inf:
        raise ValueError(f"kappa: expected a finite number of at least 0, received {kappa}. Remedy: 1, the usual one.")
    return float(kappa)


def midpoints(count: int, device: torch.device | str | None = None) -> Tensor:
    """``(2 i + 1) / (2 K)``: ``[K]`` levels, the middles of K equal parts of [0, 1], as QR-DQN has them.

    Raises:
        ValueError: for a count below 1.
    """
    if count < 1:
        raise ValueError(f"count: expected at least one quantile, received {count}.")
    return (torch.arange(count, dtype=torch.float64, device=device).mul(2).add(1) / (2 * count)).to(torch.float32)


def return_bounds(reward_bounds: tuple[float, float], gamma: float, horizon: int | None = None) -> tuple[float, float]:
    """The least and the greatest discounted return of rewards within bounds, over 1 to ``horizon`` steps.

    Args:
        reward_bounds: least and greatest reward of a step.
        gamma: discount factor in [0, 1].
        horizon: longest episode in steps; None is without end, and infinite for ``gamma = 1``.

    Raises:
        ValueError: for bounds in the wrong order, a gamma outside of [0, 1], a horizon below 1.
    """
    low, high = reward_bounds
    if not low <= high:
        raise ValueError(f"reward_bounds: expected least and greatest reward, received {reward_bounds}.")
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma: expected a discount factor in [0, 1], received {gamma}.")
    if horizon is not None and horizon < 1:
        raise ValueError(f"horizon: expected at least one step, received {horizon}.")
    if gamma == 1.0:
        steps = math.inf if horizon is None else float(horizon)
    else:
        steps = (1.0 - (0.0 if horizon is None else gamma**horizon)) / (1.0 - gamma)
    # an episode may end after one step; 0 x infinity is 0 here
    return min(low, low * steps if low else 0.0), max(high, high * steps if high else 0.0)


def check_support(
    v_min: float, v_max: float, reward_bounds: tuple[float, float], gamma: float, horizon: int | None = None
) -> None:
    """Checks that a support can represent every return of rewards within bounds.

    Args:
        v_min: first atom.
        v_max: last atom.
        reward_bounds: least and greatest reward of a step.
        gamma: discount factor.
        horizon: longest episode in steps; None is without end.

    Raises:
        ValueError: where it cannot, with the support that could.
    """
    low, high = return_bounds(reward_bounds, gamma, horizon)
    slack = 1e-6 * (abs(low) + abs(high) + abs(v_min) + abs(v_max)) if math.isfinite(low + high) else 0.0
    if low < v_min - slack or high > v_max + slack:
        raise ValueError(
            f"support: expected atoms from at most {low:g} to at least {high:g}, the returns of rewards in "
            f"{reward_bounds} with gamma {gamma}, received [{v_min:g}, {v_max:g}]. Remedy: that v_min and v_max; or a "
            "shorter horizon, scaled rewards, or no reward_bounds where such returns do not occur."
        )
