"""Summaries of returns over episodes or seeds: interquartile means and bootstrap intervals (arXiv:2108.13264)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["bootstrap_interval", "interquartile_mean", "mean"]

RESAMPLES = 10_000
SEED = 0  # of the resampling: the same numbers give the same interval


def mean(values: Any) -> Any:
    """The mean over the last axis, ``[*, n] -> [*]``."""
    return np.asarray(values, dtype=np.float64).mean(-1)


def interquartile_mean(values: Any) -> Any:
    """The mean of the middle half, ``[*, n] -> [*]``; values that lie at its ends count in part.

    With n below 4 a single outlier cannot be told from the rest, and still counts less than the others. The mean of one
    value is that value.

    Args:
        values: finite numbers ``[*, n]``, n at least 1.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    count = ordered.shape[-1]
    # value i stands for the share (i, i + 1) / n of the distribution, of which (1/4, 3/4) counts
    ends = np.arange(count + 1) / count
    weights = np.clip(np.minimum(ends[1:], 0.75) - np.maximum(ends[:-1], 0.25), 0.0, None)
    return (ordered * weights).sum(-1) / weights.sum()


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    statistic: Callable[[Any], Any] = mean,
    *,
    level: float = 0.95,
) -> tuple[float, float]:
    """Between which numbers a statistic lies in ``level`` of the samples that are drawn from values with replacement.

    Args:
        values: finite numbers ``[n]``.
        statistic: from ``[*, n]`` to ``[*]``.
        level: share of the samples.

    Returns:
        Lower and upper end; NaN for fewer than two values, which say nothing of their spread.
    """
    values = np.asarray(values, dtype=np.float64)
    if len(values) < 2:
        return math.nan, math.nan
    chosen = np.random.default_rng(SEED).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(statistic(values[chosen]), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
