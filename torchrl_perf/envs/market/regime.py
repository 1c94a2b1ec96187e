"""An endless price: normal log returns whose mean and volatility a hidden Markov chain switches.

Dimension key: ``N`` envs, ``K`` regimes, ``W`` bars of the window, ``H`` bars of a history.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_perf.envs.market.indicators import (
    LOOKBACK,
    WARM_BARS,
    indicator_row,
    series_averages,
    series_paths,
    update_averages,
    update_path,
)
from torchrl_perf.envs.market.settings import MarketSettings, RegimeSettings

__all__ = ["RegimeMarket", "next_regime", "stationary"]

START_PRICE = 100.0
"""Price at the beginning of each episode."""
State = dict[str, Tensor]


def stationary(transition: tuple[tuple[float, ...], ...]) -> Tensor:
    """The chain's long-run shares of its states, float64 ``[K]``; equal ones where it has no unique answer."""
    matrix = torch.tensor(transition, dtype=torch.float64)
    count = len(transition)
    # powers of (P + I) / 2, which has the same fixed points and no cycles
    lazy = (matrix + torch.eye(count, dtype=torch.float64)) / 2
    for _ in range(60):
        lazy = lazy @ lazy
        lazy = lazy / lazy.sum(-1, keepdim=True)
    return lazy.mean(0)


def next_regime(regime: Tensor, cumulative: Tensor, uniform: Tensor) -> Tensor:
    """Draw the states that follow ``regime`` int64 [*] by ``uniform`` [*] in [0, 1); ``cumulative`` is [K, K - 1]."""
    return (uniform.unsqueeze(-1) >= cumulative[regime]).sum(-1)


class RegimeMarket(nn.Module):
    """The synthetic market of an :class:`OptionMarket`: one price for each env, which outlives its episodes.

    The process is stationary and independent of the trader, so after an episode the next one begins at the next bar of
    the same market: as good as a newly drawn market with warm indicators, at no cost. Only the price's level goes back
    to 100. A reset of all rows draws new markets from the chain's long-run distribution.

    **State**: ``path`` [N, 24], ``averages`` [N, 5] (see ``indicators``), ``window`` [N, W, 23], the rows of the last W
    bars, ``regime`` int64 [N], the state of the *next* return, ``noise`` [N], the sentiment's AR(1), ``clock`` int64
    [N]; where a state reverts, ``gap`` [N], the log return since the present state began.

    Args:
        num_envs: N.
        settings: with the regimes.
        dtype: float type.
        device: where everything lives.
    """

    entries: tuple[str, ...] = ("path", "averages", "window", "regime", "noise", "clock")
    """Names of the state."""
    mean: Tensor
    sigma: Tensor
    cumulative: Tensor
    shares: Tensor
    score: Tensor
    reversion: Tensor

    def __init__(self, num_envs: int, settings: MarketSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        regime = settings.regime
        self.num_envs, self.regime = num_envs, regime
        self.window_bars, self.bars_per_week = settings.window, settings.bars_per_week
        self.dtype, self.device = dtype, device
        shares = stationary(regime.transition)
        tables = {
            "mean": torch.tensor(regime.mean, dtype=torch.float64),
            "sigma": torch.tensor(regime.sigma, dtype=torch.float64),
            "cumulative": torch.tensor(regime.transition, dtype=torch.float64).cumsum(-1)[:, :-1],
            "shares": shares.cumsum(0)[:-1],
            "score": _standard_scores(regime, shares),
            "reversion": torch.tensor(regime.reversion or (0.0,) * len(regime.mean), dtype=torch.float64),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.to(device, dtype), persistent=False)
        self.reverts = any(regime.reversion)
        if self.reverts:
            self.entries = (*RegimeMarket.entries, "gap")

    def draw(self) -> tuple[State, Tensor]:
        """A market of each env with a history, and its price: new tensors."""
        rows, bars = self.num_envs, WARM_BARS + self.window_bars
        options = {"dtype": self.dtype, "device": self.device}
        uniform, normal = torch.rand(rows, bars + 1, **options), torch.randn(rows, bars + 1, **options)
        weeks = torch.rand(rows, **options) * self.bars_per_week
        regimes = [(uniform[:, :1] >= self.shares).sum(-1)]
        for bar in range(1, bars + 1):
            regimes.append(next_regime(regimes[-1], self.cumulative, uniform[:, bar]))
        returns, gap = self._past_returns(torch.stack(regimes, -1), normal[:, :bars])
        path, averages, window, clock = self._history(returns, weeks.to(torch.int64))
        state = {"path": path, "averages": averages, "window": window, "clock": clock}
        state |= {"regime": regimes[-1], "noise": normal[:, bars]}
        state |= {"gap": gap} if self.reverts else {}
        return state, torch.full((rows,), START_PRICE, **options)

    def redraw(self) -> tuple[State, Tensor]:
        """No entries, since the market goes on, and the price with which an episode begins."""
        return {}, torch.full((self.num_envs,), START_PRICE, dtype=self.dtype, device=self.device)

    def advance(self, state: State, price: Tensor) -> tuple[State, Tensor]:
        """The market and the price ``[N]`` one bar later; draws random numbers."""
        options = {"dtype": self.dtype, "device": self.device}
        return self.step(state, price, torch.randn(2, self.num_envs, **options), torch.rand(self.num_envs, **options))

    def step(self, state: State, price: Tensor, normal: Tensor, uniform: Tensor) -> tuple[State, Tensor]:
        """:meth:`advance` with its random numbers, ``normal`` [2, N] and ``uniform`` [N]: pure."""
        regime, decay = state["regime"], self.regime.sentiment_decay
        log_return = self._log_return(regime, state.get("gap"), normal[0])
        path = update_path(state["path"], log_return)
        averages = update_averages(state["averages"], log_return)
        clock = (state["clock"] + 1) % self.bars_per_week
        row = indicator_row(path, averages, clock, self.bars_per_week)
        next_state = next_regime(regime, self.cumulative, uniform)
        following = {
            "path": path,
            "averages": averages,
            "window": torch.cat((state["window"][:, 1:], row.unsqueeze(1)), 1),
            "regime": next_state,
            "noise": decay * state["noise"] + (1.0 - decay * decay) ** 0.5 * normal[1],
            "clock": clock,
        }
        if self.reverts:
            following["gap"] = _gap_after(state["gap"], log_return, regime, next_state)
        return following, price * log_return.exp()

    def window(self, state: State) -> Tensor:
        """The rows of the last W bars, ``[N, W, 23]``."""
        return state["window"]

    def signal(self, state: State) -> Tensor:
        """The sentiment's score ``[N]``: standard normal noise, correlated with the next return's regime."""
        known = self.regime.sentiment_correlation
        if known == 0.0:
            return state["noise"]
        return known * self.score[state["regime"]] + (1.0 - known * known) ** 0.5 * state["noise"]

    def _log_return(self, regime: Tensor, gap: Tensor | None, normal: Tensor) -> Tensor:
        """The next return ``[N]`` of states ``regime``, ``gap`` away from where they began."""
        mean = self.mean[regime]
        if self.reverts and gap is not None:
            mean = mean - self.reversion[regime] * gap
        return mean + self.sigma[regime] * normal

    def _past_returns(self, regimes: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        """Log returns ``[N, H]`` of the states ``[N, H + 1]``, and the gap ``[N]`` after them."""
        gap = torch.zeros_like(normal[:, 0])
        if not self.reverts:
            past = regimes[:, :-1]
            return self.mean[past] + self.sigma[past] * normal, gap
        returns = []
        for bar in range(normal.shape[-1]):
            returns.append(self._log_return(regimes[:, bar], gap, normal[:, bar]))
            gap = _gap_after(gap, returns[-1], regimes[:, bar], regimes[:, bar + 1])
        return torch.stack(returns, -1), gap

    def _history(self, returns: Tensor, clock: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Path, averages, window and clock after log returns ``[N, H]``, of which the first bars are not shown."""
        padded = torch.cat((torch.zeros_like(returns[:, :1]), returns), -1)
        shown = self.window_bars
        averages = series_averages(padded)[:, -shown:]
        paths = series_paths(padded.cumsum(-1)[:, -(LOOKBACK - 1 + shown) :])
        clocks = (clock.unsqueeze(-1) + torch.arange(shown, device=clock.device)) % self.bars_per_week
        window = indicator_row(paths, averages, clocks, self.bars_per_week)
        return paths[:, -1], averages[:, -1], window, clocks[:, -1]


def _gap_after(gap: Tensor, log_return: Tensor, regime: Tensor, following: Tensor) -> Tensor:
    """The log return since the state ``following`` [N] began, which is the bar before's if it lasts."""
    return torch.where(following == regime, gap + log_return, 0.0)


def _standard_scores(regime: RegimeSettings, shares: Tensor) -> Tensor:
    """The given scores, or the states' means in units of their long-run deviation, ``[K]``; 0 where all are equal."""
    if regime.score:
        return torch.tensor(regime.score, dtype=torch.float64)
    mean = torch.tensor(regime.mean, dtype=torch.float64)
    centred = mean - (shares * mean).sum()
    deviation = (shares * centred.square()).sum().sqrt()
    return centred / deviation.clamp_min(torch.finfo(torch.float64).tiny)
