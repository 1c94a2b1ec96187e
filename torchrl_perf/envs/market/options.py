"""Six options of a trader, with rules for where each begins and ends, for all rows in one pass.

Dimension key: ``O`` = 6 options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_perf.envs.market.columns import Reading, reading
from torchrl_perf.envs.market.indicators import ratio
from torchrl_perf.modules.option_set import AGE_KEY, OPTION_KEY, OptionSet, Rule, TimeHazard

if TYPE_CHECKING:
    from torchrl_perf.envs.market.market import OptionMarket

__all__ = ["OPTION_NAMES", "OptionRules", "TradingInitiation", "TradingTermination", "option_set"]

OPTION_NAMES = ("open_long", "open_short", "close", "trend", "scalp", "wait")
"""The options in the order of their indices; "wait" is the fallback."""
MIN_DURATION = (5, 5, 3, 10, 5, 5)
"""Steps that each lasts at least."""
ACTION_SCALE = (0.8, 0.8, 1.0, 0.6, 1.0, 0.05)
"""Share of the action's bounds that each uses, in both directions."""
DIRECTED_RANGE = ((0.0, 0.8), (-0.8, 0.0), (-1.0, 0.0), (-0.6, 0.6), (0.0, 1.0), (-0.05, 0.05))
"""The same, in the option's own direction only."""


@dataclass(frozen=True)
class OptionRules:
    """Thresholds of the rules; sentiments and RSI in [0, 1], sizes in units of the equity.

    What makes a trend is measured in units of the present volatility, the root mean square of the last 20 log returns:
    the difference of the averages of a price without drift has a deviation of 1.3 of them, on every market. In parts of
    the price, see :meth:`of_price`, a threshold fits one volatility only.

    Raises:
        ValueError: for a value outside [0, 1], or a negative one of ``trending`` and ``moving``.
    """

    empty: float = 0.02
    """A position below this may be opened."""
    full: float = 0.9 * 0.15
    """A position of at least this has been opened."""
    closed: float = 0.01
    """A position below this has been closed."""
    bearish: float = 0.35
    """Least sentiment of a purchase."""
    bullish: float = 0.65
    """Sentiment at and above which nothing is sold short."""
    turned: float = 0.6
    """Sentiment above which opening a short position is given up."""
    extreme_high: float = 0.75
    """Sentiment above which waiting ends."""
    extreme_low: float = 0.3
    """Sentiment below which waiting ends."""
    certain: float = 0.75
    """Probability of the forecaster above which waiting ends."""
    oversold: float = 0.35
    """RSI below which ``scalp`` may begin."""
    overbought: float = 0.65
    """RSI above which ``open_short`` may begin."""
    trending: float = 1.5
    """|SMA10 - SMA20| / SMA20 above which there is a trend, in units of the volatility."""
    moving: float = 3.0
    """The same above which waiting ends."""
    in_price: bool = False
    """Whether ``trending`` and ``moving`` are parts of the price instead."""

    @classmethod
    def of_price(cls) -> OptionRules:
        """The rules with thresholds of 1.5 % and 3 % of the price: on hourly bars of two regimes no trend begins."""
        return cls(trending=0.015, moving=0.03, in_price=True)

    def __post_init__(self) -> None:
        """Checks every value."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("trending", "moving") and not self.in_price:
                if not 0.0 <= value < math.inf:
                    raise ValueError(
                        f"{field.name}: expected a number >= 0, received {value!r}. Remedy: multiples of the present "
                        "volatility, or in_price=True with a part of the price."
                    )
            elif not 0.0 <= value <= 1.0:
                raise ValueError(
                    f"{field.name}: expected a number in [0, 1], received {value!r}. Remedy: sentiments, RSI and "
                    "sizes as parts of one, not in percent."
                )

    def spread(self, now: Reading) -> Tensor:
        """``[*]``: the difference of the averages in the unit of the thresholds; 0 where nothing has moved."""
        return now.divergence if self.in_price else ratio(now.divergence, now.volatility, 0.0)


class TradingInitiation(nn.Module):
    """Where each option may begin.

    ``open_long``: no sizeable position and a sentiment that is not bearish. ``open_short``: no position, the price
    below SMA10, SMA10 below SMA20 or an overbought RSI, and a sentiment that is not bullish. ``close``: a position.
    ``trend``: SMA10 far from SMA20, and a sentiment that is not against it, bearish above or bullish below. ``scalp``:
    no position, an oversold RSI and a sentiment that is not bearish. ``wait``: always.

    Keys read: those of :func:`~torchrl_perf.envs.market.reading`.

    Args:
        rules: thresholds.
    """

    def __init__(self, rules: OptionRules | None = None) -> None:
        super().__init__()
        self.rules = rules or OptionRules()

    def forward(self, tensordict: TensorDictBase) -> Tensor:
        """TensorDict ``[*]`` -> bool ``[*, O]``."""
        rules, now = self.rules, reading(tensordict)
        size = now.size.abs()
        may_buy, may_short = now.sentiment >= rules.bearish, now.sentiment < rules.bullish
        weak = (now.above_sma10 < 0) | (now.divergence < 0) | (now.rsi > rules.overbought)
        # no torch.where of flags, which ONNX's runtime lacks
        rising = now.divergence > 0
        with_trend = (rising & may_buy) | (~rising & (now.sentiment <= rules.bullish))
        allowed = {
            "open_long": (size < rules.empty) & may_buy,
            "open_short": (size < rules.empty) & weak & may_short,
            "close": now.is_open,
            "trend": (rules.spread(now).abs() > rules.trending) & with_trend,
            "scalp": (size <= rules.closed) & (now.rsi < rules.oversold) & may_buy,
            "wait": torch.ones_like(now.is_open),
        }
        return torch.stack([allowed[name] for name in OPTION_NAMES], -1)


class TradingTermination(nn.Module):
    """With what probability each option ends.

    ``open_long``: 1 with a full position. ``open_short``: 1 with one, .8 with a sentiment that turned. ``close``: 1
    without a position, else .02. ``trend``: .85 where SMA10 is nearer to SMA20 than half of what makes a trend.
    ``scalp``: 1 without a position. ``wait``: 1 from 30 steps on; else .85 with an extreme sentiment; else .65 with a
    certain forecaster; else .75 with SMA10 very far from SMA20. Where none of these holds, by the time that the
    option has run, see :class:`~torchrl_perf.modules.TimeHazard`: at most .15 for ``trend`` and .5 for ``wait``.

    Keys read: "option_age" int64 ``[*]`` and those of :func:`~torchrl_perf.envs.market.reading`.

    Args:
        rules: thresholds.
    """

    LONGEST_WAIT = 30

    def __init__(self, rules: OptionRules | None = None) -> None:
        super().__init__()
        self.rules = rules or OptionRules()
        self.hazard = TimeHazard(
            len(OPTION_NAMES),
            hazard_max=(20.0, 20.0, 20.0, 50.0, 15.0, float(self.LONGEST_WAIT)),
            steepness=(0.4, 0.4, 0.0, 0.3, 0.6, 0.5),
            cap=(1.0, 1.0, 0.02, 0.15, 1.0, 0.5),
            hard_max=(True, True, False, False, True, True),
        )

    def forward(self, tensordict: TensorDictBase) -> Tensor:
        """TensorDict ``[*]`` -> probabilities ``[*, O]``."""
        rules, now = self.rules, reading(tensordict)
        by_time = dict(zip(OPTION_NAMES, self.hazard(tensordict).unbind(-1), strict=True))
        size, spread = now.size.abs(), rules.spread(now).abs()
        full, flat = size >= rules.full, size < rules.closed
        turned = torch.where(now.sentiment > rules.turned, 0.8, by_time["open_short"])
        extreme = (now.sentiment > rules.extreme_high) | (now.sentiment < rules.extreme_low)
        wait = torch.where(spread > rules.moving, 0.75, by_time["wait"])
        wait = torch.where(now.certainty > rules.certain, 0.65, wait)
        wait = torch.where(extreme, 0.85, wait)
        ends = {
            "open_long": torch.where(full, 1.0, by_time["open_long"]),
            "open_short": torch.where(full, 1.0, turned),
            "close": torch.where(flat, 1.0, by_time["close"]),
            "trend": torch.where(spread < 0.5 * rules.trending, 0.85, by_time["trend"]),
            "scalp": torch.where(size <= rules.closed, 1.0, by_time["scalp"]),
            "wait": torch.where(tensordict.get(AGE_KEY) >= self.LONGEST_WAIT, 1.0, wait),
        }
        return torch.stack([ends[name] for name in OPTION_NAMES], -1)


def option_set(
    env: OptionMarket,
    *,
    rules: OptionRules | None = None,
    initiation: Rule | None = None,
    termination: Rule | None = None,
    directed: bool = False,
) -> OptionSet:
    """The six options of a market, on the env's device.

    They are made for ``semantics="rules"``, where an action of 0 holds the position and nothing is sold short:
    ``open_short`` then sells the position. With ``"target"`` an action is a position, and the small actions of ``wait``
    nearly close it.

    Args:
        env: the market, or one of the same observation.
        rules: thresholds of the rules.
        initiation: td -> bool ``[*, O]`` in place of :class:`TradingInitiation`.
        termination: td -> float ``[*, O]`` in place of :class:`TradingTermination`.
        directed: whether each option acts in its own direction only (buys, sells or closes).

    Raises:
        ValueError: for a rule that returns another shape or dtype than these.
    """
    begin, end = initiation or TradingInitiation(rules), termination or TradingTermination(rules)
    probe = cast("TensorDictBase", env.observation_spec.zero()[:1].expand(2).clone())
    for key in (OPTION_KEY, AGE_KEY):
        probe.set(key, torch.zeros(2, dtype=torch.int64, device=env.device))
    for name, rule, kind in (("initiation", begin, "bool"), ("termination", end, "float")):
        if isinstance(rule, nn.Module):
            rule.to(env.device)
        _check_rule(name, rule, probe, kind)
    return OptionSet(
        OPTION_NAMES,
        initiation=begin,
        termination=end,
        min_duration=MIN_DURATION,
        fallback="wait",
        action_range=DIRECTED_RANGE if directed else ACTION_SCALE,
    )


@torch.no_grad()
def _check_rule(name: str, rule: Rule, probe: TensorDictBase, kind: str) -> None:
    """Raise ValueError unless a rule answers for two rows and all options."""
    result, shape = rule(probe.copy()), [2, len(OPTION_NAMES)]
    sound = isinstance(result, Tensor) and list(result.shape) == shape
    if sound and (result.dtype == torch.bool if kind == "bool" else result.is_floating_point()):
        return
    received = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    raise ValueError(
        f"{name}: expected a function of a TensorDict [B] that returns {kind} [B, {shape[1]}], one column for each of "
        f"{list(OPTION_NAMES)}, received {received} for B = 2. Remedy: torch.stack([...], -1) of one answer for each."
    )
