"""How informative an experiment is about a model: rewards for choosing inputs, all to be maximised.

Dimension key: ``T`` steps of a trajectory, ``S`` predicted numbers, ``F`` parameters, ``E`` numbers of an embedding,
``K`` members of an ensemble. Leading dims ``*`` are experiments, such as envs and candidates of a planner.

A measurement ``y ~ N(m(theta), variance)`` has the Fisher information ``J^T J / variance`` about theta, with
``J = dm / dtheta`` its sensitivity; that of independent measurements adds up (Fedorov, "Theory of Optimal
Experiments", 1972; Pukelsheim, "Optimal Design of Experiments", 1993).
"""

import torch
from torch import Tensor

from torchrl_perf.functional.wide import computed_wide, outside_autocast, wide_dtype

__all__ = [
    "a_optimality",
    "d_optimality",
    "discount_weights",
    "discounted_return",
    "embedding_information_gain",
    "ensemble_disagreement",
    "fisher_diagonal",
    "fisher_matrix",
    "information_gain",
]


def discount_weights(
    steps: int, discount: float, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``discount^t`` for t = 0 to T - 1: ``[T]``."""
    return (discount ** torch.arange(steps, device=device, dtype=wide_dtype(dtype))).to(dtype)


@computed_wide
def discounted_return(reward: Tensor, discount: float = 1.0) -> Tensor:
    """``sum_t discount^t r_t`` of rewards ``[*, T]``: ``[*]``."""
    if discount == 1.0:
        return reward.sum(-1)
    return (reward * discount_weights(reward.shape[-1], discount, device=reward.device, dtype=reward.dtype)).sum(-1)


@computed_wide
def fisher_diagonal(sensitivity: Tensor, variance: Tensor | float = 1.0, *, discount: float = 1.0) -> Tensor:
    """Diagonal of the Fisher information that trajectories hold about the parameters of a model.

    ``I_f = sum_t discount^t sum_s J_tsf^2 / variance_ts``. Predictions that are linear in their parameters, such as
    those by radial basis functions, have their features as sensitivities.

    Args:
        sensitivity: J, ``[*, T, S, F]``.
        variance: of the predictions, a number or a tensor that broadcasts to ``[*, T, S]``.
        discount: weight of a step in relation to the one before it.

    Returns:
        ``[*, F]``, at least 0.
    """
    _check_sensitivity(sensitivity)
    weighted = sensitivity.square() * _weights(sensitivity, variance, discount).unsqueeze(-1)
    return weighted.sum((-3, -2))


@computed_wide
@outside_autocast
def fisher_matrix(sensitivity: Tensor, variance: Tensor | float = 1.0, *, discount: float = 1.0) -> Tensor:
    """The Fisher information whose diagonal :func:`fisher_diagonal` returns.

    Args:
        sensitivity: J, ``[*, T, S, F]``.
        variance: of the predictions, a number or a tensor that broadcasts to ``[*, T, S]``.
        discount: weight of a step in relation to the one before it.

    Returns:
        ``[*, F, F]``, symmetric and positive semidefinite.
    """
    _check_sensitivity(sensitivity)
    scaled = sensitivity * _weights(sensitivity, variance, discount).sqrt().unsqueeze(-1)
    rows = scaled.flatten(-3, -2)
    return rows.mT @ rows


@computed_wide
def a_optimality(information: Tensor, prior: Tensor | float = 1.0) -> Tensor:
    """Minus the sum of the parameters' variances after the experiment: ``-sum_f 1 / (prior_f + I_f)``.

    Args:
        information: I, diagonal of the Fisher information, ``[*, F]``.
        prior: information before the experiment, broadcasts to ``[*, F]``. With 0 it is the textbook's ``-sum 1 / I``,
            which is minus infinity if the experiment tells nothing about some parameter.

    Returns:
        ``[*]``, negative.
    """
    return -(information + prior).reciprocal().sum(-1)


@computed_wide
def d_optimality(information: Tensor, prior: Tensor | float = 1.0) -> Tensor:
    """Twice the entropy that the parameters lose by the experiment: ``sum_f log(1 + I_f / prior_f)``.

    Args:
        information: I, diagonal of the Fisher information, ``[*, F]``.
        prior: information before the experiment, positive, broadcasts to ``[*, F]``.

    Returns:
        ``[*]``, at least 0, in nats.
    """
    return torch.log1p(information / prior).sum(-1)


@computed_wide
@outside_autocast
def embedding_information_gain(covariance: Tensor, information: Tensor) -> Tensor:
    """``logdet(I + P J)``: twice the entropy that a Gaussian belief about an embedding loses by an experiment.

    With ``P = L L^T`` it is ``logdet(I + L^T J L)``, of a symmetric matrix, by two Cholesky factors without an error
    check on the host.

    Args:
        covariance: P, of the belief, ``[*, E, E]``, symmetric and positive definite.
        information: J, Fisher information about the embedding, ``[*, E, E]``, symmetric and positive semidefinite, such
            as that of :func:`fisher_matrix`; the leading dims of the two broadcast.

    Returns:
        ``[*]``, at least 0, in nats; NaN where P is not positive definite.

    Raises:
        ValueError: for matrices that are not square, or not of one size.
    """
    size = covariance.shape[-1]
    if covariance.shape[-2:] != (size, size) or information.shape[-2:] != (size, size):
        raise ValueError(
            "embedding_information_gain: expected covariance [*, E, E] and information [*, E, E], received "
            f"{list(covariance.shape)} and {list(information.shape)}. Remedy: the same [*, E, E] for both."
        )
    factor, broken = torch.linalg.cholesky_ex(covariance)
    inner = factor.mT @ information @ factor + torch.eye(size, dtype=factor.dtype, device=factor.device)
    root, singular = torch.linalg.cholesky_ex(inner)
    gain = 2.0 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where((broken == 0) & (singular == 0), gain, torch.nan)


@computed_wide
@outside_autocast
def information_gain(
    covariance: Tensor, sensitivity: Tensor, variance: Tensor | float = 1.0, *, discount: float = 1.0
) -> Tensor:
    """Twice the entropy that a Gaussian belief about parameters loses by trajectories: ``logdet(I + J P J^T / v)``.

    By Sylvester's identity it is :func:`embedding_information_gain` of their :func:`fisher_matrix`, but with a matrix
    of T S rows in place of F. On CUDA it is eliminated row by row, elementwise over the experiments: no solver, no host
    wait.

    Args:
        covariance: P, of the belief, ``[F, F]``, symmetric and positive definite.
        sensitivity: J, ``[*, T, S, F]``.
        variance: v, of the predictions, a number or a tensor that broadcasts to ``[*, T, S]``.
        discount: weight of a step in relation to the one before it.

    Returns:
        ``[*]``, at least 0, in nats; NaN where P is not positive definite.
    """
    _check_sensitivity(sensitivity)
    rows = (sensitivity * _weights(sensitivity, variance, discount).sqrt().unsqueeze(-1)).flatten(-3, -2)
    left = rows @ covariance @ rows.mT + torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
    if left.device.type == "cpu":  # where a factorisation holds nothing up, and is several times as fast
        factor, broken = torch.linalg.cholesky_ex(left)
        return torch.where(broken == 0, 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1), torch.nan)
    return _eliminated(left)


def _eliminated(left: Tensor) -> Tensor:
    """Log determinants ``[*]`` of positive definite matrices ``[*, R, R]``, row by row; NaN for any others."""
    gain = torch.zeros_like(left[..., 0, 0])
    for _ in range(left.shape[-1]):
        pivot = left[..., 0, 0]
        gain = gain + pivot.log()
        column = left[..., 1:, :1]
        left = left[..., 1:, 1:] - column * column.mT / pivot[..., None, None]
    return gain


@computed_wide
def ensemble_disagreement(prediction: Tensor) -> Tensor:
    """Variance of a prediction over the members of an ensemble, summed over its S numbers (arXiv:1906.04161).

    Args:
        prediction: ``[K, *, S]``, members first.

    Returns:
        ``[*]``, at least 0; 0 for one member.
    """
    return prediction.var(0, correction=0).sum(-1)


def _weights(sensitivity: Tensor, variance: Tensor | float, discount: float) -> Tensor:
    """``discount^t / variance_ts``, broadcasts to ``[*, T, S]``."""
    steps, device, dtype = sensitivity.shape[-3], sensitivity.device, sensitivity.dtype
    return discount_weights(steps, discount, device=device, dtype=dtype).unsqueeze(-1) / variance


def _check_sensitivity(sensitivity: Tensor) -> None:
    if sensitivity.ndim < 3:
        raise ValueError(
            f"sensitivity: expected [*, T, S, F] (steps, predicted numbers, parameters), received "
            f"{list(sensitivity.shape)}. Remedy: unsqueeze the dim that is 1."
        )
