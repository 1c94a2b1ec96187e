"""The observation of a market and of a position: five entries, or one flat one of 578 columns.

Dimension key: ``N`` envs, ``W`` = 24 bars of the window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.envs.market.indicators import FEATURES, PERCENT, ratio
from torchrl_perf.envs.market.portfolio import Portfolio

__all__ = [
    "PARTS",
    "PORTFOLIO",
    "POSITION",
    "REGIME",
    "SENTIMENT",
    "Reading",
    "column_names",
    "flatten",
    "market_parts",
    "reading",
]

SENTIMENT = ("falls", "stays", "rises")
"""Probabilities of a forecaster that is the more confident the farther the sentiment is from .5; their sum is 1."""
POSITION = ("open", "entry", "unrealised", "duration", "size")
"""1 with a position; in percent ``entry price / p - 1`` and profit on the entry price; steps held / 24; size in units
of the equity, negative where short. All 0 without a position."""
PORTFOLIO = ("log_equity", "cash", "drawdown", "realised", "paid", "idle", "bought", "elapsed")
"""Log of the equity in units of the capital; cash / equity; ``equity / greatest equity - 1``; realised profits and
costs so far in units of the capital; steps since a trade / 24; share of purchases in the last 20 bars; share of the
episode that is over, 0 without a time limit."""
REGIME = (
    *("sentiment", "conviction", "sma_divergence", "volatility_20", "volatility_ratio"),
    *("efficiency_20", "oversold", "overbought", "uptrend", "downtrend"),
)
"""Sentiment in [0, 1] and ``|2 sentiment - 1|``; columns of the last bar; ``volatility_5 / volatility_20``; 1 where
RSI < 35, RSI > 65, p > SMA10 > SMA20 and p < SMA10 < SMA20. The hidden state of the chain is not among them."""
PARTS = {
    "technical": FEATURES,
    "sentiment": SENTIMENT,
    "position": POSITION,
    "portfolio": PORTFOLIO,
    "regime": REGIME,
}
"""The entries in the order of the flat observation, and the names of their columns; "technical" is [N, W, 23], the last
bar last."""
OVERSOLD, OVERBOUGHT = 0.35, 0.65
"""RSI, 0 to 1, below and above which the flags of "regime" are set."""
SHARPNESS = 3.0
"""The forecaster's logits are -3, 0 and 3 times the sentiment's score."""
DAY = 24.0


class Reading(NamedTuple):
    """The quantities that rules of trading read from an observation.

    Attributes:
        size: ``[*]`` position in units of the equity, negative where short.
        is_open: bool ``[*]``, whether there is one.
        sentiment: ``[*]`` in [0, 1].
        certainty: ``[*]``, greatest probability of the forecaster.
        rsi: ``[*]`` in [0, 1].
        above_sma10: ``[*]``, ``p / SMA10 - 1``.
        divergence: ``[*]``, ``SMA10 / SMA20 - 1``.
        volatility: ``[*]``, root mean square of the last 20 log returns.
    """

    size: Tensor
    is_open: Tensor
    sentiment: Tensor
    certainty: Tensor
    rsi: Tensor
    above_sma10: Tensor
    divergence: Tensor
    volatility: Tensor


def market_parts(
    window: Tensor, score: Tensor, portfolio: Portfolio, price: Tensor, elapsed: Tensor
) -> dict[NestedKey, Tensor]:
    """The five entries.

    Args:
        window: ``[N, W, 23]``.
        score: ``[N]``, standard normal; its distribution function is the sentiment.
        portfolio: entries ``[N]``.
        price: ``[N]``.
        elapsed: ``[N]``, share of the episode that is over.

    Returns:
        "technical" [N, W, 23], "sentiment" [N, 3], "position" [N, 5], "portfolio" [N, 8] and "regime" [N, 10].
    """
    logits = SHARPNESS * torch.stack((-score, torch.zeros_like(score), score), -1)
    return {
        "technical": window,
        "sentiment": logits.softmax(-1),
        "position": _position(portfolio, price),
        "portfolio": _portfolio(portfolio, price, elapsed),
        "regime": _regime(window[:, -1], torch.special.ndtr(score)),
    }


def flatten(parts: dict[NestedKey, Tensor]) -> Tensor:
    """The five entries side by side in the order of ``PARTS``, ``[N, 23 W + 26]``: one pass over the memory."""
    return torch.cat([parts[name].flatten(1) for name in PARTS], -1)


def column_names(window: int = 24) -> list[str]:
    """Names of the flat columns: ``technical/<bars ago>/<feature>``, then ``<entry>/<column>``."""
    bars = [f"technical/{window - 1 - bar}/{name}" for bar in range(window) for name in FEATURES]
    return bars + [f"{part}/{name}" for part, names in PARTS.items() if part != "technical" for name in names]


def reading(tensordict: TensorDictBase) -> Reading:
    """The :class:`Reading` of a TensorDict ``[*]`` with the five entries, or with the flat "observation".

    Raises:
        KeyError: with neither.
    """
    flat = tensordict.get("observation", None)
    last = tensordict.get("technical", None)
    if last is not None:
        row, sentiment = last[..., -1, :], tensordict.get("sentiment")
        position, regime = tensordict.get("position"), tensordict.get("regime")
    elif flat is not None:
        sizes = [len(FEATURES), *(len(names) for name, names in PARTS.items() if name != "technical")]
        row, sentiment, position, _, regime = flat[..., -sum(sizes) :].split(sizes, -1)
    else:
        keys = sorted(map(str, tensordict.keys(True, True)))
        raise KeyError(
            f"expected 'technical' and the other entries of a market, or 'observation', received {keys}. Remedy: the "
            "TensorDict of an OptionMarket, or of a replay that keeps its observation."
        )
    columns = ("rsi14", "sma10_gap", "sma_divergence", "volatility_20")
    features = {name: row[..., FEATURES.index(name)] for name in columns}
    return Reading(
        size=position[..., POSITION.index("size")],
        is_open=position[..., POSITION.index("open")] > 0,
        sentiment=regime[..., REGIME.index("sentiment")],
        certainty=sentiment.amax(-1),
        rsi=features["rsi14"],
        above_sma10=features["sma10_gap"] / PERCENT,
        divergence=features["sma_divergence"] / PERCENT,
        volatility=features["volatility_20"] / PERCENT,
    )


def _position(portfolio: Portfolio, price: Tensor) -> Tensor:
    """The columns ``POSITION``, ``[N, 5]``."""
    is_open = portfolio.shares != 0
    entry = torch.where(is_open, portfolio.entry, price)
    value = portfolio.shares * price
    columns = {
        "open": is_open.to(price.dtype),
        "entry": PERCENT * (entry / price - 1.0),
        "unrealised": PERCENT * portfolio.shares.sign() * (price / entry - 1.0),
        "duration": portfolio.held.to(price.dtype) / DAY,
        "size": value / (portfolio.cash + value),
    }
    return torch.stack([columns[name] for name in POSITION], -1)


def _portfolio(portfolio: Portfolio, price: Tensor, elapsed: Tensor) -> Tensor:
    """The columns ``PORTFOLIO``, ``[N, 8]``."""
    # A trader ruined in one step may have negative equity, in the last observation of an episode.
    equity = (portfolio.cash + portfolio.shares * price).clamp_min(1e-3)
    columns = {
        "log_equity": equity.log(),
        "cash": portfolio.cash / equity,
        "drawdown": equity / portfolio.peak - 1.0,
        "realised": portfolio.realised,
        "paid": portfolio.paid,
        "idle": portfolio.idle.to(price.dtype) / DAY,
        "bought": portfolio.bought_share(price.dtype),
        "elapsed": elapsed,
    }
    return torch.stack([columns[name] for name in PORTFOLIO], -1)


def _regime(row: Tensor, sentiment: Tensor) -> Tensor:
    """The columns ``REGIME``, ``[N, 10]``, of the row of the last bar [N, 23]."""
    feature = dict(zip(FEATURES, row.unbind(-1), strict=True))
    rsi, gap, divergence = feature["rsi14"], feature["sma10_gap"], feature["sma_divergence"]
    columns = {
        "sentiment": sentiment,
        "conviction": (2.0 * sentiment - 1.0).abs(),
        "sma_divergence": divergence,
        "volatility_20": feature["volatility_20"],
        "volatility_ratio": ratio(feature["volatility_5"], feature["volatility_20"], 0.0),
        "efficiency_20": feature["efficiency_20"],
        "oversold": rsi < OVERSOLD,
        "overbought": rsi > OVERBOUGHT,
        "uptrend": (gap > 0) & (divergence > 0),
        "downtrend": (gap < 0) & (divergence < 0),
    }
    return torch.stack([columns[name].to(row.dtype) for name in REGIME], -1)
