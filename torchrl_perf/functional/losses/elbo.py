"""The evidence lower bound of a latent dynamical system, with predictions of several steps.

Dimension key: ``B`` windows, ``T`` steps of a window, ``S`` numbers of the latent state, ``D`` channels, ``H`` steps
ahead.
"""

import functools
import math
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_perf.functional.wide import computed_wide, widened

__all__ = [
    "BetaSchedule",
    "beta_at",
    "decayed_weights",
    "gaussian_kl",
    "gaussian_log_likelihood",
    "linked",
    "masked_latent",
    "poisson_log_likelihood",
    "temporal_mask",
]

BetaSchedule = Literal["constant", "linear", "cyclic"]
MAX_LOG_RATE = 14.0
"""Of Poisson counts: a million a bin, beyond which a wild guess would make the likelihood infinite."""


def decayed_weights(
    horizon: int,
    decay: float = 0.8,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weights of predictions of 1 to H steps, ``decay^k / sum_j decay^j``: they add up to 1.

    For H = 5 and 0.8 they are .2975, .2380, .1904, .1523, .1218. The tensor is made once for each set of arguments and
    shared: do not write to it.

    Args:
        horizon: H, at least 1.
        decay: weight of a step in relation to the one before it, positive.
        device: of the weights.
        dtype: of the weights.

    Returns:
        ``[H]``.

    Raises:
        ValueError: for numbers outside what is described.
    """
    if horizon < 1 or not 0.0 < decay < math.inf:
        raise ValueError(f"decayed_weights: expected horizon >= 1 and decay > 0, received {horizon} and {decay}.")
    # an empty tensor resolves "cuda" to the current device, so that the key names one
    return _decayed_weights(horizon, float(decay), torch.empty(0, device=device).device, dtype)


@functools.lru_cache(maxsize=64)
def _decayed_weights(horizon: int, decay: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # a tensor of inference mode could not be used in training later
        powers = decay ** torch.arange(horizon, dtype=torch.float64)
        return (powers / powers.sum()).to(device=device, dtype=dtype)


@computed_wide
def gaussian_kl(loc_q: Tensor, var_q: Tensor, loc_p: Tensor, var_p: Tensor) -> Tensor:
    """``KL(q || p)`` of diagonal Gaussians: ``1/2 sum_s [log(p/q) + ((m_q - m_p)^2 + q) / p - 1]``.

    Args:
        loc_q: mean, ``[*, S]``; all four broadcast.
        var_q: variance, positive.
        loc_p: mean.
        var_p: variance, positive.

    Returns:
        ``[*]``, at least 0, in nats.
    """
    ratio = var_q / var_p
    return 0.5 * ((loc_q - loc_p).square() / var_p + ratio - 1.0 - ratio.log()).sum(-1)


@computed_wide
def gaussian_log_likelihood(value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log density of independent normal channels.

    Args:
        value: ``[*, D]``; all three broadcast.
        mean: ``[*, D]``.
        variance: ``[*, D]``, positive.

    Returns:
        ``[*]``, in nats.
    """
    return -0.5 * ((value - mean).square() / variance + variance.log() + math.log(2.0 * math.pi)).sum(-1)


@computed_wide
def poisson_log_likelihood(count: Tensor, log_rate: Tensor) -> Tensor:
    """Log probability of independent counts.

    Args:
        count: ``[*, D]``, at least 0; both broadcast.
        log_rate: log of the expected counts, ``[*, D]``; capped at 14.

    Returns:
        ``[*]``, in nats.
    """
    score = log_rate.clamp(max=MAX_LOG_RATE)
    return (count * score - score.exp() - torch.lgamma(count + 1.0)).sum(-1)


def temporal_mask(
    *shape: int, rate: float, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A mask that keeps each step with the probability ``1 - rate``, filled in place: one allocation.

    Args:
        *shape: such as ``B, T, 1``.
        rate: share of the steps that are masked, in [0, 1].
        device: of the mask.
        dtype: of the mask.

    Returns:
        0 or 1, a new tensor: one that autograd still needs is never overwritten.

    Raises:
        ValueError: for a rate outside of [0, 1].
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate: expected a probability, received {rate}.")
    return torch.empty(shape, device=device, dtype=dtype).bernoulli_(1.0 - rate)


def masked_latent(keep: Tensor, posterior: Tensor, predicted: Tensor) -> Tensor:
    """``m z_posterior + (1 - m) z_predicted``: where a step is masked, the dynamics have to carry the information.

    Args:
        keep: m, 0 or 1, broadcasts to the others.
        posterior: sample that has seen the observation, ``[*, S]``.
        predicted: prediction from the step before, ``[*, S]``.

    Returns:
        ``[*, S]``; what is not kept does not reach it, NaN included, and neither does its gradient.
    """
    return torch.where(keep > 0, posterior, predicted)


def linked(is_init: Tensor, ahead: int) -> Tensor:
    """Whether steps belong to the same episode as those ``ahead`` of them.

    Args:
        is_init: bool ``[B, T]``, first steps of an episode.
        ahead: number of steps, from 0 to T.

    Returns:
        bool ``[B, T - ahead]``.
    """
    episode = is_init.to(torch.int64).cumsum(1)
    return episode[:, ahead:] == episode[:, : episode.shape[1] - ahead]


def beta_at(
    step: Tensor, kind: BetaSchedule = "constant", *, beta: float | Tensor = 1.0, warmup: int = 0, anneal: int = 1000
) -> Tensor:
    """Weight of the KL divergence after some updates, on the device.

    It is 0 for ``warmup`` updates. Then ``"constant"``: ``beta``; ``"linear"``: from 0 to ``beta`` in ``anneal``
    updates; ``"cyclic"`` (arXiv:1903.10145): in each period of ``anneal`` updates from 0 to ``beta`` in the first half,
    and ``beta`` in the second.

    Args:
        step: updates so far, 0-d or any shape.
        kind: one of the three.
        beta: the full weight.
        warmup: updates without it.
        anneal: updates of the ramp or the period, at least 1.

    Returns:
        float32, shaped as ``step``.

    Raises:
        ValueError: for an unknown kind, or numbers outside what is described.
    """
    if kind not in get_args(BetaSchedule) or warmup < 0 or anneal < 1:
        raise ValueError(
            f"beta_at: expected one of {get_args(BetaSchedule)}, warmup >= 0 and anneal >= 1, received {kind!r}, "
            f"{warmup} and {anneal}."
        )
    after = (step - warmup).to(torch.float32)
    beta = widened(beta) if isinstance(beta, Tensor) else beta
    if kind == "constant":
        share = torch.ones_like(after)
    elif kind == "linear":
        share = (after / anneal).clamp(0.0, 1.0)
    else:
        share = (2.0 * (after.clamp_min(0.0) % anneal) / anneal).clamp(max=1.0)
    return torch.where(after < 0, 0.0, share * beta)
