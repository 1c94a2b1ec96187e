"""Cash and shares: the trade of an action, its cost, and the portfolio after it.

All amounts are in units of the capital with which an episode begins. With the price ``p`` of the trade and ``p'`` of
the next bar, the equity ``E = cash + shares p`` obeys ``E' - E = shares' (p' - p) - cost |traded|`` exactly.

Dimension key: ``N`` envs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_perf.envs.market.settings import MEMORY, MarketSettings

__all__ = ["Fill", "Portfolio", "execute", "marked", "rule_trade", "target_trade"]

HOLD = 0.001
""""rules": actions smaller than this do nothing."""
DUST = 1e-5
""""rules": room for less than this share of the equity counts as none: in a full portfolio it is rounding."""


class Portfolio(NamedTuple):
    """Holdings of each env, and the history that the observation shows of them.

    Attributes:
        cash: ``[N]``.
        shares: ``[N]``, negative where short.
        entry: ``[N]``, mean price at which the position was opened; 0 without one.
        peak: ``[N]``, greatest equity so far.
        realised: ``[N]``, profits of closed positions, less all costs; without a position the equity is 1 plus this.
        paid: ``[N]``, costs so far.
        held: int32 ``[N]``, steps since the position was opened.
        idle: int32 ``[N]``, steps since the last trade.
        buys: int32 ``[N]``, one bit for each of the last 20 bars, set if the bar had a purchase.
    """

    cash: Tensor
    shares: Tensor
    entry: Tensor
    peak: Tensor
    realised: Tensor
    paid: Tensor
    held: Tensor
    idle: Tensor
    buys: Tensor

    @classmethod
    def fresh(cls, num_envs: int, dtype: torch.dtype, device: torch.device) -> Portfolio:
        """The capital in cash, in each of ``num_envs`` rows."""
        zero = torch.zeros(num_envs, dtype=dtype, device=device)
        none = torch.zeros(num_envs, dtype=torch.int32, device=device)
        one = torch.ones_like(zero)
        return cls(one, zero, zero, one, zero, zero, none, none, none)

    def bought_share(self, dtype: torch.dtype) -> Tensor:
        """``[N]``: the share of the last 20 bars with a purchase."""
        bits = self.buys  # population count: sums over groups of bits of growing width
        bits = bits - ((bits >> 1) & 0x55555)
        bits = (bits & 0x33333) + ((bits >> 2) & 0x33333)
        bits = (bits + (bits >> 4)) & 0x0F0F0F
        return ((bits + (bits >> 8) + (bits >> 16)) & 0x1F).to(dtype) / MEMORY


class Fill(NamedTuple):
    """What a trade did.

    Attributes:
        traded: ``[N]``, notional, positive for purchases.
        fee: ``[N]``, its cost.
        profit: ``[N]``, realised by it, less the fee.
    """

    traded: Tensor
    fee: Tensor
    profit: Tensor


def target_trade(portfolio: Portfolio, price: Tensor, weight: Tensor, settings: MarketSettings) -> Tensor:
    """The notional ``[N]`` that brings the position to ``weight`` [N] of the equity after costs.

    With ``v = shares p`` it is ``d = (w E - v) / (1 + c w)``, with ``1 - c w`` for sales: then
    ``v + d = w (E - c |d|)``.
    """
    value = portfolio.shares * price
    equity = portfolio.cash + value
    traded = _towards(equity, value, weight, settings.cost)
    return torch.where((weight - value / equity).abs() <= settings.dead_band, 0.0, traded)


def rule_trade(portfolio: Portfolio, price: Tensor, action: Tensor, settings: MarketSettings) -> Tensor:
    """The notional ``[N]`` that an ``action`` [N] in [-1, 1] stands for.

    An action below .001 in size does nothing. A positive one buys for ``a buy_share`` of the equity, at most
    ``entry_cap`` without a position and at most up to ``max_weight``; nothing if that is below 1e-5 of the equity, or
    if more than ``most_buys`` of the last 20 bars had a purchase. A negative one sells that share of the position, once
    it has been held for ``min_hold`` steps.
    """
    value = portfolio.shares * price
    equity = portfolio.cash + value
    share = settings.buy_share * action
    share = torch.where(portfolio.shares == 0, share.clamp_max(settings.entry_cap), share)
    room = _towards(equity, value, torch.full_like(value, settings.max_weight), settings.cost)
    room = torch.where(room > DUST * equity, room, 0.0)
    bought = torch.minimum(share * equity, room)
    may_buy = portfolio.bought_share(price.dtype) <= settings.most_buys + 1e-6
    may_sell = portfolio.held >= settings.min_hold
    traded = torch.where(action > 0, torch.where(may_buy, bought, 0.0), torch.where(may_sell, action * value, 0.0))
    return torch.where(action.abs() < HOLD, 0.0, traded)


def execute(portfolio: Portfolio, price: Tensor, traded: Tensor, cost: float) -> tuple[Portfolio, Fill]:
    """Trade for the notional ``traded`` [N] at ``price`` [N]; a position that is closed leaves exactly 0 shares.

    Returns:
        The portfolio with cash, shares, entry price, profits and costs after it, and what it did.
    """
    shares, value = portfolio.shares, portfolio.shares * price
    after = torch.where(traded == -value, 0.0, shares + traded / price)
    fee = cost * traded.abs()
    closed = torch.where(traded * value < 0, torch.minimum(traded.abs(), value.abs()), 0.0)
    profit = shares.sign() * closed * (1.0 - portfolio.entry / price) - fee
    grown = (traded * value > 0) & (after != 0)
    turned = (after != 0) & (shares.sign() != after.sign())
    mean = (shares * portfolio.entry + traded) / torch.where(after == 0, 1.0, after)
    entry = torch.where(turned, price, torch.where(grown, mean, portfolio.entry))
    is_open = after != 0
    held = torch.where(turned | ~is_open, 0, portfolio.held)
    idle = torch.where(traded == 0, portfolio.idle, 0)
    buys = ((portfolio.buys << 1) | (traded > 0).to(torch.int32)) & ((1 << MEMORY) - 1)
    following = portfolio._replace(
        cash=portfolio.cash - traded - fee,
        shares=after,
        entry=torch.where(is_open, entry, 0.0),
        realised=portfolio.realised + profit,
        paid=portfolio.paid + fee,
        held=held,
        idle=idle,
        buys=buys,
    )
    return following, Fill(traded, fee, profit)


def marked(portfolio: Portfolio, price: Tensor) -> tuple[Portfolio, Tensor]:
    """The portfolio a bar later at ``price`` [N], and its equity ``[N]``."""
    equity = portfolio.cash + portfolio.shares * price
    held = torch.where(portfolio.shares != 0, portfolio.held + 1, 0)
    peak = torch.maximum(portfolio.peak, equity)
    return portfolio._replace(peak=peak, held=held, idle=portfolio.idle + 1), equity


def _towards(equity: Tensor, value: Tensor, weight: Tensor, cost: float) -> Tensor:
    """The notional that brings ``value`` to ``weight`` of the equity after costs."""
    gap = weight * equity - value
    return gap / (1.0 + cost * weight * gap.sign())
