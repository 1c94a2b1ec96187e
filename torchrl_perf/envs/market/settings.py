"""Settings of a market: regimes, costs, and the meaning of actions and rewards.

Dimension key: ``K`` regimes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import Tensor

__all__ = ["FIVE_REGIMES", "MarketSettings", "RegimeSettings"]

Semantics = Literal["target", "rules"]
RewardMode = Literal["log_wealth", "realised_pnl"]

SEMANTICS = ("target", "rules")
REWARDS = ("log_wealth", "realised_pnl")
OBSERVATIONS = ("flat", "dict", "both")
STARTS = ("random", "first")
MEMORY = 20
"""Bars over which purchases are counted."""
FIVE_REGIMES = ("rising", "falling", "reverting", "calm", "turbulent")
"""Names of the states of :meth:`RegimeSettings.five`."""


@dataclass(frozen=True)
class RegimeSettings:
    """A price whose log returns are normal, with mean and volatility of a hidden Markov chain of K states.

    The default has the facts that hourly returns of liquid assets have (Cont, Quantitative Finance 1, 2001): a kurtosis
    near 9.4, no linear correlation, and absolute returns whose correlation decays as .975^lag from .36.

    Raises:
        ValueError: for entries of other numbers than K, a transition whose rows are no probabilities, volatilities
            that are negative, decays and correlations outside their range.
    """

    transition: tuple[tuple[float, ...], ...] = ((0.995, 0.005), (0.02, 0.98))
    """K rows of K probabilities; one row, ``((1.0,),)``, gives geometric Brownian motion."""
    mean: tuple[float, ...] = (4e-5, -1e-4)
    """Mean of the log return of a bar in each state."""
    sigma: tuple[float, ...] = (0.0008, 0.003)
    """Its standard deviation in each state."""
    sentiment_decay: float = 0.9
    """Correlation of the sentiment's noise, an AR(1), from one bar to the next."""
    sentiment_correlation: float = 0.0
    """Correlation of the sentiment's score with the mean of the state that governs the next return. 0: no edge."""
    reversion: tuple[float, ...] = ()
    """For each state, the share of the way back to where the price was when the state began that the next return is
    expected to go; () is 0 for all of them."""
    score: tuple[float, ...] = ()
    """The sentiment's score in each state, before noise; () are the means in units of their long-run deviation."""

    @classmethod
    def five(cls, **changes: Any) -> RegimeSettings:
        """Hourly bars of five states, in each of which another way to trade pays; see :data:`FIVE_REGIMES`.

        A rising and a falling state last 5 and 4 days on average, a week of swings about a level ("reverting"), four
        days of calm, and two days of turbulence with losses. Drifts are .05 % a bar, a sixth to an eighth of the
        volatility, and costs of .155 % of a trade are paid back within a few bars; means of log returns that are
        ``-sigma^2 / 2`` are no drift.

        Args:
            **changes: replace entries.
        """
        settings: dict[str, Any] = {
            "transition": _lasting((120.0, 96.0, 120.0, 96.0, 48.0)),
            "mean": (6e-4, -6e-4, -8e-6, -3.2e-7, -2e-4),
            "sigma": (0.003, 0.004, 0.004, 0.0008, 0.01),
            "reversion": (0.0, 0.0, 0.2, 0.0, 0.0),
            "sentiment_correlation": 0.98,
            "score": (1.5, -1.7, 0.0, 0.3, -0.7),
        }
        return cls(**{**settings, **changes})

    def __post_init__(self) -> None:
        """Checks what the chain needs."""
        count = len(self.transition)
        square = count > 0 and all(len(row) == count for row in self.transition)
        if not square or len(self.mean) != count or len(self.sigma) != count:
            raise ValueError(
                f"transition, mean, sigma: expected K rows of K probabilities and K entries each, received "
                f"{self.transition}, {self.mean} and {self.sigma}. Remedy: one mean and one sigma for each row."
            )
        for name in ("reversion", "score"):
            entries = getattr(self, name)
            if entries and len(entries) != count:
                raise ValueError(
                    f"{name}: expected none or K = {count} entries, received {entries}. Remedy: one for each row."
                )
        require(all(map(math.isfinite, self.score)), "score", "finite numbers", self.score)
        require(all(0.0 <= share < 1.0 for share in self.reversion), "reversion", "numbers in [0, 1)", self.reversion)
        sound = all(min(row) >= 0.0 and abs(sum(row) - 1.0) < 1e-6 for row in self.transition)
        require(sound, "transition", "rows of probabilities that add up to 1", self.transition)
        require(all(map(math.isfinite, self.mean)), "mean", "finite numbers", self.mean)
        require(all(0.0 <= sigma < math.inf for sigma in self.sigma), "sigma", "numbers >= 0", self.sigma)
        require(0.0 <= self.sentiment_decay < 1.0, "sentiment_decay", "a number in [0, 1)", self.sentiment_decay)
        correlation = self.sentiment_correlation
        require(-1.0 <= correlation <= 1.0, "sentiment_correlation", "a number in [-1, 1]", correlation)
        if correlation and not self.score and max(self.mean) == min(self.mean):
            raise ValueError(
                f"sentiment_correlation: expected 0 where all states have the same mean, received {correlation} with "
                f"means {self.mean}. Remedy: states with different means, which the sentiment may tell apart."
            )


@dataclass(frozen=True)
class MarketSettings:
    """Costs, limits and forms of an :class:`OptionMarket`; its constructor takes them as keyword arguments.

    Raises:
        ValueError: for a value outside its range, naming what was expected, what was received and the remedy.
    """

    regime: RegimeSettings = field(default_factory=RegimeSettings)
    """The synthetic price; not read where prices are given."""
    commission: float = 0.001
    """Part of the traded notional."""
    slippage: float = 0.00055
    """Part of the traded notional: 5 basis points and half a one."""
    max_weight: float = 1.0
    """Greatest part of the equity that is invested, long or short; more than 1 is leverage."""
    dead_band: float = 0.0
    """No trade is made if the target weight is within this of the present one."""
    window: int = 24
    """W: bars of the technical observation."""
    bars_per_week: int = 168
    """Period of the time of week: 168 for hours around the clock, 5 for trading days."""
    observation: Literal["flat", "dict", "both"] = "flat"
    """Whether "observation" [N, 23 W + 26] is written, the five entries that it is made of, or both."""
    starts: Literal["random", "first"] = "random"
    """Where an episode begins in given prices: anywhere that leaves room for it, or at the first such bar, with series
    ``i % S`` for env i."""
    sentiment: Tensor | None = None
    """Sentiment in [0, 1] of the shape of the given prices; .5 by default."""
    ruin: float = 0.5
    """Equity, in units of the capital, at which an episode terminates."""
    buy_share: float = 0.45
    """"rules": part of the equity that an action of 1 buys for."""
    entry_cap: float = 0.35
    """"rules": greatest part of the equity that is bought for without a position."""
    min_hold: int = 2
    """"rules": steps that a position has been held before any of it is sold."""
    most_buys: float = 0.7
    """"rules": share of purchases in the last 20 bars above which nothing is bought."""
    pnl_scale: float = 9.5
    """"realised_pnl": reward of a realised profit of the size of the capital; .95 times 1e-4 for a capital of 1e5."""
    winner_factor: float = 2.0
    """"realised_pnl": factor of profits, as opposed to losses."""
    pnl_clip: float = 1.0
    """"realised_pnl": bound of the reward of a step."""
    hold_penalty: float = 1e-4
    """"realised_pnl": subtracted in a step without a trade."""

    def __post_init__(self) -> None:
        """Checks every value."""
        require(isinstance(self.regime, RegimeSettings), "regime", "a RegimeSettings", self.regime)
        for name in ("commission", "slippage", "dead_band", "hold_penalty"):
            value = getattr(self, name)
            require(0.0 <= value < 1.0, name, "a number in [0, 1)", value)
        for name in ("max_weight", "pnl_scale", "winner_factor", "pnl_clip"):
            value = getattr(self, name)
            require(0.0 < value < math.inf, name, "a number > 0", value)
        for name in ("ruin", "buy_share", "entry_cap", "most_buys"):
            value = getattr(self, name)
            require(0.0 < value <= 1.0, name, "a number in (0, 1]", value)
        require(self.ruin < 1.0, "ruin", "less than 1, the capital", self.ruin)
        for name, least in (("window", 1), ("bars_per_week", 1), ("min_hold", 0)):
            value = getattr(self, name)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value >= least,
                name,
                f"an int >= {least}",
                value,
            )
        require(self.observation in OBSERVATIONS, "observation", f"one of {OBSERVATIONS}", self.observation)
        require(self.starts in STARTS, "starts", f"one of {STARTS}", self.starts)
        if self.cost * self.max_weight >= 1.0:
            raise ValueError(
                f"commission, slippage: expected costs below 1 / max_weight, received {self.cost:.6g} with "
                f"max_weight={self.max_weight}: selling would cost more than it brings. Remedy: less of either."
            )

    @classmethod
    def of(cls, values: dict[str, Any]) -> MarketSettings:
        """The settings with these values.

        Raises:
            TypeError: for a name that is none of theirs.
        """
        names = [entry.name for entry in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise TypeError(
                f"OptionMarket: expected settings among {names}, received {unknown}. Remedy: take the others out."
            )
        return cls(**values)

    @property
    def cost(self) -> float:
        """Commission and slippage, the cost of a unit of traded notional."""
        return self.commission + self.slippage


def _lasting(durations: tuple[float, ...]) -> tuple[tuple[float, ...], ...]:
    """A transition whose states last so many bars on average, and are followed by each other one alike."""
    others = len(durations) - 1
    return tuple(
        tuple(1.0 - 1.0 / bars if here == there else 1.0 / (bars * others) for there in range(len(durations)))
        for here, bars in enumerate(durations)
    )


def require(sound: bool, name: str, expected: str, received: Any) -> None:
    """Raise ValueError unless ``sound``."""
    if not sound:
        raise ValueError(f"{name}: expected {expected}, received {received!r}. Remedy: a value within that range.")
