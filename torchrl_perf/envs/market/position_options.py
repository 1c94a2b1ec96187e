"""The six options of a trader as ways to hold a position, for actions that are positions.

Dimension key: ``O`` = 6 options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_perf.envs.market.columns import Reading, reading
from torchrl_perf.envs.market.indicators import ratio
from torchrl_perf.envs.market.options import OPTION_NAMES
from torchrl_perf.modules.option_set import AGE_KEY, OptionSet, TimeHazard

if TYPE_CHECKING:
    from torchrl_perf.envs.market.market import OptionMarket

__all__ = ["PositionRules", "position_option_set"]

SHORTEST = (2, 2, 1, 10, 1, 2)
"""Steps that each option lasts at least, in the order of ``OPTION_NAMES``."""
LONGEST = (20.0, 20.0, 2.0, 50.0, 30.0, 30.0)
"""Steps after which each ends."""
RANGES = ((0.0, 1.0), (-1.0, 0.0), (-0.05, 0.05), (-1.0, 1.0), (-1.0, 1.0), (-0.05, 0.05))
"""The positions that each may take, in units of the greatest one."""


@dataclass(frozen=True)
class PositionRules:
    """Thresholds of the rules: sentiments in [0, 1], ways of the price in units of its present volatility.

    The volatility is the root mean square of the last 20 log returns, so that the thresholds mean the same on calm and
    on wild markets.

    Raises:
        ValueError: for a sentiment outside [0, 1] or a negative way.
    """

    bearish: float = 0.35
    """Sentiment below which no long position begins or goes on."""
    bullish: float = 0.65
    """Sentiment above which no short position begins or goes on."""
    trending: float = 1.5
    """|SMA10 / SMA20 - 1| above which ``trend`` may begin."""
    stretched: float = 0.5
    """|p / SMA20 - 1| above which ``scalp`` may begin."""
    one_sided: float = 0.25
    """Distance of the sentiment from one half above which ``scalp`` ends."""

    def __post_init__(self) -> None:
        """Checks every value."""
        for field in fields(self):
            value = getattr(self, field.name)
            most = 1.0 if field.name in ("bearish", "bullish", "one_sided") else math.inf
            if not (0.0 <= value <= most and math.isfinite(value)):
                raise ValueError(
                    f"{field.name}: expected a number from 0 to {most:g}, received {value!r}. Remedy: sentiments as "
                    "parts of one, ways of the price in units of its volatility."
                )


class PositionInitiation(nn.Module):
    """Where each option may begin.

    ``open_long``: a sentiment that is not bearish. ``open_short``: one that is not bullish. ``close``: a position.
    ``trend``: SMA10 far from SMA20, and a sentiment that is not against it. ``scalp``: the price far from SMA20, and a
    sentiment between bearish and bullish. ``wait``: always.

    Keys read: those of :func:`~torchrl_perf.envs.market.reading`.

    Args:
        rules: thresholds.
    """

    def __init__(self, rules: PositionRules) -> None:
        super().__init__()
        self.rules = rules

    def forward(self, tensordict: TensorDictBase) -> Tensor:
        """TensorDict ``[*]`` -> bool ``[*, O]``."""
        rules, now = self.rules, reading(tensordict)
        may_buy, may_sell = now.sentiment >= rules.bearish, now.sentiment <= rules.bullish
        spread, stretch = _spread(now), _stretch(now)
        with_trend = ((spread > 0) & may_buy) | ((spread < 0) & may_sell)
        allowed = {
            "open_long": may_buy,
            "open_short": may_sell,
            "close": now.is_open,
            "trend": (spread.abs() > rules.trending) & with_trend,
            "scalp": (stretch.abs() > rules.stretched) & may_buy & may_sell,
            "wait": torch.ones_like(may_buy),
        }
        return torch.stack([allowed[name] for name in OPTION_NAMES], -1)


class PositionTermination(nn.Module):
    """With what probability each option ends.

    ``open_long`` and ``open_short``: 1 with a sentiment that has turned bearish, or bullish. ``close``: 1 without a
    position. ``trend``: .85 where SMA10 is nearer to SMA20 than half of what makes a trend. ``scalp``: 1 with a
    sentiment that takes a side. Where none of these holds, by the time that the option has run, see
    :class:`~torchrl_perf.modules.TimeHazard`.

    ``scalp`` goes on over the average to the other side, as the price does: if it ended there, the position would be
    closed in the middle of each swing and opened again, and both are paid for.

    Keys read: "option_age" int64 ``[*]`` and those of :func:`~torchrl_perf.envs.market.reading`.

    Args:
        rules: thresholds.
    """

    def __init__(self, rules: PositionRules) -> None:
        super().__init__()
        self.rules = rules
        self.hazard = TimeHazard(len(OPTION_NAMES), hazard_max=LONGEST, steepness=(0.4, 0.4, 0.4, 0.3, 0.6, 0.5))
        self.age_key = AGE_KEY

    def forward(self, tensordict: TensorDictBase) -> Tensor:
        """TensorDict ``[*]`` -> probabilities ``[*, O]``."""
        rules, now = self.rules, reading(tensordict)
        ends = dict(zip(OPTION_NAMES, self.hazard(tensordict).unbind(-1), strict=True))
        ends["open_long"] = torch.where(now.sentiment < rules.bearish, 1.0, ends["open_long"])
        ends["open_short"] = torch.where(now.sentiment > rules.bullish, 1.0, ends["open_short"])
        ends["close"] = torch.where(now.is_open, ends["close"], 1.0)
        ends["trend"] = torch.where(_spread(now).abs() < 0.5 * rules.trending, 0.85, ends["trend"])
        ends["scalp"] = torch.where((now.sentiment - 0.5).abs() > rules.one_sided, 1.0, ends["scalp"])
        return torch.stack([ends[name] for name in OPTION_NAMES], -1)


def position_option_set(env: OptionMarket, rules: PositionRules | None = None) -> OptionSet:
    """Six options for a market of ``semantics="target"``, on the env's device, under the names of ``OPTION_NAMES``.

    ``open_long`` and ``open_short`` hold a position of one side and may go on with it; ``trend`` and ``scalp`` hold
    either side, while there is a trend, or while the price is far from its average; ``close`` and ``wait`` stay within
    5 % of nothing. Positions are parts of the greatest one. An option that ends by the time it has run may be chosen
    again where it may not begin: else a position within a swing would be closed for that alone, and paid for.

    Args:
        env: the market.
        rules: thresholds.

    Raises:
        ValueError: for a market whose actions are no positions.
    """
    if env.semantics != "target":
        raise ValueError(
            f"env: expected semantics='target', actions that are positions, received {env.semantics!r}. Remedy: "
            "option_set(env), or a market of semantics='target'."
        )
    chosen = rules or PositionRules()
    return OptionSet(
        OPTION_NAMES,
        initiation=PositionInitiation(chosen).to(env.device),
        termination=PositionTermination(chosen).to(env.device),
        min_duration=SHORTEST,
        fallback="wait",
        action_range=RANGES,
        continues=True,
    )


def _spread(now: Reading) -> Tensor:
    """``[*]``: SMA10 / SMA20 - 1 in units of the volatility; 0 where nothing has moved."""
    return ratio(now.divergence, now.volatility, 0.0)


def _stretch(now: Reading) -> Tensor:
    """``[*]``: p / SMA20 - 1 in units of the volatility; 0 where nothing has moved."""
    return ratio((1 + now.above_sma10) * (1 + now.divergence) - 1, now.volatility, 0.0)
