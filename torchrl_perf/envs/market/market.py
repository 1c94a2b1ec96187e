"""Trading one asset on bars of its price, alone or with options that last.

Dimension key: ``N`` envs, ``S`` series, ``T`` bars, ``W`` bars of the window.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import TensorSpec

from torchrl_perf.envs.drawing import BLUE, INK, PALE, RED, Line
from torchrl_perf.envs.market.columns import PARTS, flatten, market_parts
from torchrl_perf.envs.market.indicators import FEATURES
from torchrl_perf.envs.market.portfolio import Fill, Portfolio, execute, marked, rule_trade, target_trade
from torchrl_perf.envs.market.recorded import RecordedMarket
from torchrl_perf.envs.market.regime import RegimeMarket
from torchrl_perf.envs.market.settings import REWARDS, SEMANTICS, MarketSettings, RewardMode, Semantics, require
from torchrl_perf.envs.structured_env import EnvSpecs, StructuredEnv, Transition

__all__ = ["OptionMarket"]

LEAST_GROWTH = 1e-3
"""Least ``E' / E`` whose logarithm is rewarded: with leverage the equity may become negative."""


class OptionMarket(StructuredEnv):
    """Trade one asset: each step trades at the close of a bar, and is rewarded by the change up to the next close.

    **Prices.** Without ``prices`` each env has its own endless regime-switching price: an episode begins where the last
    one ended, with the level set back to 100, see :class:`RegimeMarket`. With ``prices`` it follows one of S series
    from a random start, see :class:`RecordedMarket`. Trades do not move the price.

    **Action**, ``"action"`` float [N, 1] in [-1, 1]. Semantics ``"target"``: the position is brought to ``action *
    max_weight`` of the equity. ``"rules"``: below .001 nothing; positive, buy for ``.45 a`` of the equity, at most .35
    without a position; negative, sell that share of the position; no sale before two steps, no purchase after more
    than 14 in 20 bars, no short position. A trade costs ``(commission + slippage) |notional|``. Actions are clipped;
    NaN counts as 0.

    **Accounting.** In units of the capital: ``E' - E = shares' (p' - p) - cost |traded|``, see ``portfolio``.

    **Reward**, ``"reward"`` [N, 1] under "next". ``"log_wealth"``: ``log(E' / E)``, at least log(.001).
    ``"realised_pnl"``: the profit that trades realised, less their costs, gains counted twice, times ``pnl_scale`` and
    clipped to ``pnl_clip``; minus ``hold_penalty`` without a trade. A position open at the end has realised nothing.

    **Ends.** Terminated with an equity of at most ``ruin``; truncated after ``max_episode_steps``.

    **Keys**, at the root and under "next": ``"observation"`` [N, 23 W + 26], or with ``observation="dict"``
    ``"technical"`` [N, W, 23], ``"sentiment"`` [N, 3], ``"position"`` [N, 5], ``"portfolio"`` [N, 8] and ``"regime"``
    [N, 10], which it is made of in this order (columns in ``columns.PARTS``, names by ``column_names``), or
    ``"both"``; ``"equity"`` and ``"price"`` [N, 1]; the flags of :class:`StructuredEnv`. Under "next" also
    ``"traded"`` [N, 1], the notional, negative for sales, and ``"cost"`` [N, 1].

    **State**: that of the market, ``price``, the entries of :class:`Portfolio` and ``steps`` [N], as buffers
    ``state_...``.

    **What a result means.** With the default regimes the observation does not tell the sign of the next return beyond
    the regimes' small means: a policy can only learn how much to hold and how to save costs. With
    ``RegimeSettings(sentiment_correlation=...)`` there is an edge, because it was put in. Past prices were known when
    the rules were chosen.

    Args:
        num_envs: N, at least 1.
        prices: closes ``[T]`` or ``[S, T]``, float, finite and positive; synthetic ones by default.
        semantics: ``"target"`` or ``"rules"``.
        reward: ``"log_wealth"`` or ``"realised_pnl"``.
        max_episode_steps: time limit; None means none, and with ``prices`` as many as there are.
        device: where everything lives.
        dtype: float type of state, observation, reward and action.
        seed: passed to ``set_seed``.
        **settings: those of :class:`MarketSettings`, such as ``regime=RegimeSettings(...)``, ``commission=0.001``,
            ``slippage=0.00055``, ``max_weight=1.0``, ``window=24``, ``observation="dict"``, ``starts="first"``.

    Raises:
        ValueError: for settings outside what is described, prices that are not finite and positive, and fewer of them
            than window and episode need.
        TypeError: for a setting that does not exist, prices that are no float tensor, or another dtype than a float.
        RuntimeError: CUDA asked for where there is none.
    """

    scene_half_width = 1.5

    settings: MarketSettings
    market: RegimeMarket | RecordedMarket

    def __init__(
        self,
        num_envs: int,
        *,
        prices: Tensor | None = None,
        semantics: Semantics = "target",
        reward: RewardMode = "log_wealth",
        max_episode_steps: int | None = 672,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        chosen = MarketSettings.of(settings)
        require(semantics in SEMANTICS, "semantics", f"one of {SEMANTICS}", semantics)
        require(reward in REWARDS, "reward", f"one of {REWARDS}", reward)
        if prices is None and chosen.sentiment is not None:
            raise ValueError(
                "sentiment: expected None without prices, received a tensor. Remedy: prices of the same shape, or "
                "RegimeSettings(sentiment_correlation=...) for a synthetic one that knows something."
            )
        super().__init__(num_envs, device=device, dtype=dtype, max_episode_steps=max_episode_steps)
        self.settings, self.semantics, self.reward_mode = chosen, semantics, reward
        if prices is None:
            self.market = RegimeMarket(num_envs, chosen, dtype, self.device)
        else:
            self.market = RecordedMarket(num_envs, prices, chosen, max_episode_steps, dtype, self.device)
            self.max_episode_steps = self.market.episode_steps
        self.begin(seed)

    # -- what the base asks for --------------------------------------------------------------------------------------

    def make_specs(self) -> EnvSpecs:
        """Return the keys of the class docstring."""
        form, window = self.settings.observation, self.settings.window
        sizes: dict[str, tuple[int, ...]] = {name: (len(columns),) for name, columns in PARTS.items()}
        sizes["technical"] = (window, *sizes["technical"])
        observation: dict[NestedKey, TensorSpec] = {}
        if form != "dict":
            width = sum(len(columns) for columns in PARTS.values()) + (window - 1) * len(PARTS["technical"])
            observation["observation"] = self.unbounded(width)
        if form != "flat":
            observation |= {name: self.unbounded(*size) for name, size in sizes.items()}
        return EnvSpecs(
            observation=observation | {"equity": self.unbounded(1), "price": self.unbounded(1)},
            action={"action": self.box(-1.0, 1.0, 1)},
            reward={"reward": self.unbounded(1)},
            info={"traded": self.unbounded(1), "cost": self.unbounded(1)},
        )

    def draw_state(self) -> dict[str, Tensor]:
        """Return fresh markets, each with its history, and the capital in cash."""
        return self._begun(*self.market.draw())

    def redraw_state(self, ended: Tensor) -> dict[str, Tensor]:
        """Return the capital in cash at the price, and a new place in given prices; a synthetic market goes on."""
        return self._begun(*self.market.redraw())

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return the price over the last bars, the position as a bar above or below 0, and the equity as a mark."""
        window = self.market.window(self._market(state))
        path = window[..., FEATURES.index("return_1")].float().cumsum(-1)
        low, high = path.amin(-1, keepdim=True), path.amax(-1, keepdim=True)
        level = 1.0 * ((path - low) / (high - low).clamp_min(1e-6) - 0.5)
        bars = torch.linspace(-1.3, 0.6, path.shape[-1], device=path.device).expand_as(level)
        places = torch.stack((bars, level), -1)
        portfolio, price = _portfolio(state), state["price"]
        equity = portfolio.cash + portfolio.shares * price
        size = (portfolio.shares * price / equity).float().clamp(-1.5, 1.5) * 0.5
        zero, right = torch.zeros_like(size), torch.ones_like(size)
        worth = ((equity.float() - 1.0) * 5).clamp(-0.9, 0.9)

        def between(*ends: tuple[Tensor, Tensor]) -> list[Tensor]:
            return [torch.stack(end, -1) for end in ends]

        return [
            Line(*between((-1.35 * right, zero), (1.35 * right, zero)), 0.003, PALE),
            Line(places[:, :-1], places[:, 1:], 0.008, INK),
            Line(*between((0.85 * right, zero), (0.85 * right, size)), 0.06, BLUE),
            Line(*between((1.15 * right, worth), (1.25 * right, worth)), 0.03, RED),
        ]

    def advance(self, state: dict[str, Tensor], action: Tensor | dict[NestedKey, Tensor]) -> Transition:
        """Trade at the close, and go to the next one."""
        assert isinstance(action, Tensor)
        chosen = action.squeeze(-1).nan_to_num(nan=0.0).clamp(-1.0, 1.0)
        before, price, settings = _portfolio(state), state["price"], self.settings
        equity = before.cash + before.shares * price
        if self.semantics == "target":
            traded = target_trade(before, price, settings.max_weight * chosen, settings)
        else:
            traded = rule_trade(before, price, chosen, settings)
        after, fill = execute(before, price, traded, settings.cost)
        market, next_price = self.market.advance(self._market(state), price)
        after, next_equity = marked(after, next_price)
        entries: dict[NestedKey, Tensor] = {
            "reward": self._reward(fill, equity, next_equity).unsqueeze(-1),
            "traded": fill.traded.unsqueeze(-1),
            "cost": fill.fee.unsqueeze(-1),
        }
        next_state = {**market, **after._asdict(), "price": next_price, "steps": state["steps"] + 1}
        return Transition(next_state, entries, next_equity <= settings.ruin)

    def observe(self, state: dict[str, Tensor]) -> dict[NestedKey, Tensor]:
        """Return the observation in the form of the settings, "equity" and "price"."""
        market, portfolio, price = self._market(state), _portfolio(state), state["price"]
        window, score = self.market.window(market), self.market.signal(market)
        elapsed = state["steps"].to(self.dtype) / (self.max_episode_steps or torch.inf)
        parts = market_parts(window, score, portfolio, price, elapsed)
        seen: dict[NestedKey, Tensor] = {
            "equity": (portfolio.cash + portfolio.shares * price).unsqueeze(-1),
            "price": price.unsqueeze(-1),
        }
        if self.settings.observation != "dict":
            seen["observation"] = flatten(parts)
        if self.settings.observation != "flat":
            seen |= parts
        return seen

    # -- parts -------------------------------------------------------------------------------------------------------

    def _begun(self, market: dict[str, Tensor], price: Tensor) -> dict[str, Tensor]:
        """The state of an episode's beginning in a market."""
        portfolio = Portfolio.fresh(self.num_envs, self.dtype, self.device)
        steps = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        return {**market, **portfolio._asdict(), "price": price, "steps": steps}

    def _market(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: state[name] for name in self.market.entries}

    def _reward(self, fill: Fill, equity: Tensor, next_equity: Tensor) -> Tensor:
        """``[N]``, see the class."""
        if self.reward_mode == "log_wealth":
            return (next_equity / equity).clamp_min(LEAST_GROWTH).log()
        settings = self.settings
        worth = torch.where(fill.profit > 0, settings.winner_factor, 1.0) * fill.profit * settings.pnl_scale
        idle = (fill.traded == 0).to(worth.dtype)
        return worth.clamp(-settings.pnl_clip, settings.pnl_clip) - settings.hold_penalty * idle


def _portfolio(state: dict[str, Tensor]) -> Portfolio:
    """The part of a state that is the portfolio."""
    return Portfolio(*(state[name] for name in Portfolio._fields))
