"""Technical indicators of a price, updated bar by bar or computed for a whole series.

A bar is its close. Everything is **relative to the present close p** and so independent of the price's level: a market
may run for ever in float32. Carried from bar to bar are

* ``path`` ``[*, 24]``, ``log(p_(t-23+i) / p_t)``: the last 24 closes, the present one last (0);
* ``averages`` ``[*, 5]``: ``EMA12 / p - 1``, ``EMA26 / p - 1``, the MACD's signal, an EMA9, over p, and Wilder's
  averages of gains and of losses over 14 bars, over p.

Sums over the last 5, 10 and 20 bars are recomputed from the path, 24 numbers, at each bar: running sums would
accumulate rounding errors.

Dimension key: ``S`` series, ``T`` bars, ``F`` = 23 columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_perf.functional.scan import linear_recurrence

__all__ = [
    "FEATURES",
    "LOOKBACK",
    "WARM_BARS",
    "indicator_row",
    "series_averages",
    "series_paths",
    "update_averages",
    "update_path",
]

FEATURES = (
    *("return_1", "return_5", "return_10", "return_20"),
    *("sma10_gap", "sma20_gap", "sma_divergence", "ema12_gap", "ema26_gap"),
    *("macd", "macd_signal", "macd_histogram", "rsi14", "atr14", "band_position", "band_width"),
    *("volatility_5", "volatility_20", "efficiency_20", "below_high_24", "above_low_24", "week_sin", "week_cos"),
)
"""The columns of a bar. In percent: log returns over 1 to 20 bars; ``p / average - 1``; ``SMA10 / SMA20 - 1``; the
MACD lines and the ATR over p; ``4 std / SMA20``; root mean squares of log returns; ``p / high - 1`` and ``p / low - 1``
of the 24 closes. In units of one: the RSI, 0 to 1; ``(p - SMA20) / (2 std)``, with the standard deviation of 20 closes;
``|return_20|`` over the sum of 20 absolute log returns; sine and cosine of the time of week."""
LOOKBACK = 24
"""Closes that a path holds."""
AVERAGES = ("ema12", "ema26", "signal", "gain", "loss")
"""The columns of the averages."""
WARM_BARS = 40
"""Bars before the first one that is shown, until the initial values of the averages have faded."""
PERCENT = 100.0

FAST, SLOW, SIGNAL = 2.0 / 13.0, 2.0 / 27.0, 2.0 / 10.0
WILDER = 14
PERIODS = (5, 10, 20)


def update_path(path: Tensor, log_return: Tensor) -> Tensor:
    """``path`` [*, 24] one bar of ``log_return`` [*] later."""
    passed = path[..., 1:] - log_return.unsqueeze(-1)
    return torch.cat((passed, torch.zeros_like(path[..., :1])), -1)


def update_averages(averages: Tensor, log_return: Tensor) -> Tensor:
    """``averages`` [*, 5] one bar of ``log_return`` [*] later: exponential averages, Wilder's with a weight of 1/14."""
    fast, slow, signal, gain, loss = averages.unbind(-1)
    shrink = torch.exp(-log_return)
    change = -torch.expm1(-log_return)  # (p' - p) / p'
    fast = (1.0 - FAST) * (fast * shrink - change)
    slow = (1.0 - SLOW) * (slow * shrink - change)
    signal = (1.0 - SIGNAL) * signal * shrink + SIGNAL * (fast - slow)
    gain = (gain * shrink * (WILDER - 1) + change.clamp_min(0.0)) / WILDER
    loss = (loss * shrink * (WILDER - 1) + (-change).clamp_min(0.0)) / WILDER
    return torch.stack((fast, slow, signal, gain, loss), -1)


def series_averages(log_returns: Tensor) -> Tensor:
    """The averages at each bar of whole series.

    Exponential averages begin at the first close, the signal at 0. Wilder's averages begin with the plain mean of the
    first 14 changes, as he defines them; before that, with the mean of the changes so far.

    Args:
        log_returns: ``[*, T]`` of each bar, 0 in the first one.

    Returns:
        ``[*, T, 5]``.
    """
    shrink, change = torch.exp(-log_returns), -torch.expm1(-log_returns)
    bars = torch.arange(log_returns.shape[-1], device=log_returns.device)
    wilder = 1.0 / bars.clamp(1, WILDER).to(log_returns.dtype)
    kept = torch.stack(((1.0 - FAST) * shrink, (1.0 - SLOW) * shrink, *2 * ((1.0 - wilder) * shrink,)), -1)
    moves = (change.clamp_min(0.0), (-change).clamp_min(0.0))
    new = torch.stack(((FAST - 1.0) * change, (SLOW - 1.0) * change, *(wilder * move for move in moves)), -1)
    fast, slow, gain, loss = linear_recurrence(kept, new).unbind(-1)
    macd = (SIGNAL * (fast - slow)).unsqueeze(-1)
    signal = linear_recurrence(((1.0 - SIGNAL) * shrink).unsqueeze(-1), macd).squeeze(-1)
    return torch.stack((fast, slow, signal, gain, loss), -1)


def series_paths(log_prices: Tensor) -> Tensor:
    """``log_prices`` [*, T] -> the paths of the bars from the 24th on, ``[*, T - 23, 24]``."""
    windows = log_prices.unfold(-1, LOOKBACK, 1)
    return windows - windows[..., -1:]


def indicator_row(path: Tensor, averages: Tensor, clock: Tensor, bars_per_week: int) -> Tensor:
    """The columns ``FEATURES`` of a bar.

    Args:
        path: ``[*, 24]``.
        averages: ``[*, 5]``.
        clock: ``[*]`` int64, bars since the beginning of some week.
        bars_per_week: period of the clock.

    Returns:
        ``[*, F]``; finite where the inputs are, constant prices included.
    """
    # Sums over all 24 places with weights of 0 and 1 are one pass, which a compiler fuses; slices would be one each.
    place = torch.arange(LOOKBACK, device=path.device)
    last5, last10, last20 = (place >= LOOKBACK - period for period in PERIODS)
    gap = torch.expm1(path)  # p_i / p - 1
    moves = path - path.roll(1, -1)
    squares = moves.square()
    mean10 = torch.where(last10, gap, 0.0).sum(-1) / 10
    mean20 = torch.where(last20, gap, 0.0).sum(-1) / 20
    spread = torch.where(last20, (gap - mean20.unsqueeze(-1)).square(), 0.0).sum(-1).div(20).sqrt()
    rough5 = torch.where(last5, squares, 0.0).sum(-1).div(5).sqrt()
    rough20 = torch.where(last20, squares, 0.0).sum(-1).div(20).sqrt()
    length = torch.where(last20, moves.abs(), 0.0).sum(-1)
    high, low = path.amax(-1), path.amin(-1)
    back = {lag: -path[..., LOOKBACK - 1 - lag] for lag in (1, 5, 10, 20)}

    fast, slow, signal, gain, loss = averages.unbind(-1)
    macd, true_range = fast - slow, gain + loss
    angle = clock.to(path.dtype) * (2.0 * math.pi / bars_per_week)
    in_percent = {
        **{f"return_{lag}": value for lag, value in back.items()},
        "sma10_gap": -mean10 / (1.0 + mean10),
        "sma20_gap": -mean20 / (1.0 + mean20),
        "sma_divergence": (mean10 - mean20) / (1.0 + mean20),
        "ema12_gap": -fast / (1.0 + fast),
        "ema26_gap": -slow / (1.0 + slow),
        "macd": macd,
        "macd_signal": signal,
        "macd_histogram": macd - signal,
        "atr14": true_range,
        "band_width": 4.0 * spread / (1.0 + mean20),
        "volatility_5": rough5,
        "volatility_20": rough20,
        "below_high_24": torch.expm1(-high),
        "above_low_24": torch.expm1(-low),
    }
    columns = {name: PERCENT * value for name, value in in_percent.items()} | {
        "rsi14": ratio(gain, true_range, 0.5),
        "band_position": ratio(-mean20, 2.0 * spread, 0.0),
        "efficiency_20": ratio(back[20].abs(), length, 0.0),
        "week_sin": angle.sin(),
        "week_cos": angle.cos(),
    }
    return torch.stack([columns[name] for name in FEATURES], -1)


def ratio(part: Tensor, whole: Tensor, otherwise: float) -> Tensor:
    """``part / whole`` where ``whole > 0``, else ``otherwise``."""
    some = whole > 0
    return torch.where(some, part / torch.where(some, whole, 1.0), otherwise)
