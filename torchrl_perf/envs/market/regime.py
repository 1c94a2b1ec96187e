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
    [N].

    Args:
        num_envs: N.
        settings: with the regimes.
        dtype: float type.
        device: where everything lives.
    """

    entries = ("path", "averages", "window", "regime", "noise", "clock")
    """Names of the state."""
    mean: Tensor
    sigma: Tensor
    cumulative: Tensor
    shares: Tensor
    score: Tensor

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
        }
        for name, table in tables.items():
            self.register_buffer(name, table.to(device, dtype), persistent=False)

    def draw(self) -> tuple[State, Tensor]:
        """A market of each env with a history, and its price: new tensors."""
        rows, bars = self.num_envs, WARM_BARS + self.window_bars
        options = {"dtype": self.dtype, "device": self.device}
        uniform, normal = torch.rand(rows, bars + 1, **options), torch.randn(rows, bars + 1, **options)
        weeks = torch.rand(rows, **options) * self.bars_per_week
        regimes = [(uniform[:, :1] >= self.shares).sum(-1)]
        for bar in range(1, bars + 1):
            regimes.append(next_regime(regimes[-1], self.cumulative, uniform[:, bar]))
        past = torch.stack(regimes[:-1], -1)
        returns = self.mean[past] + self.sigma[past] * normal[:, :bars]
        path, averages, window, clock = self._history(returns, weeks.to(torch.int64))
        state = {"path": path, "averages": averages, "window": window, "clock": clock}
        state |= {"regime": regimes[-1], "noise": normal[:, bars]}
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
        log_return = self.mean[regime] + self.sigma[regime] * normal[0]
        path = update_path(state["path"], log_return)
        averages = update_averages(state["averages"], log_return)
        clock = (state["clock"] + 1) % self.bars_per_week
        row = indicator_row(path, averages, clock, self.bars_per_week)
        following = {
            "path": path,
            "averages": averages,
            "window": torch.cat((state["window"][:, 1:], row.unsqueeze(1)), 1),
            "regime": next_regime(regime, self.cumulative, uniform),
            "noise": decay * state["noise"] + (1.0 - decay * decay) ** 0.5 * normal[1],
            "clock": clock,
        }
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

    def _history(self, returns: Tensor, clock: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Path, averages, window and clock after log returns ``[N, H]``, of which the first bars are not shown."""
        padded = torch.cat((torch.zeros_like(returns[:, :1]), returns), -1)
        shown = self.window_bars
        averages = series_averages(padded)[:, -shown:]
        paths = series_paths(padded.cumsum(-1)[:, -(LOOKBACK - 1 + shown) :])
        clocks = (clock.unsqueeze(-1) + torch.arange(shown, device=clock.device)) % self.bars_per_week
        window = indicator_row(paths, averages, clocks, self.bars_per_week)
        return paths[:, -1], averages[:, -1], window, clocks[:, -1]


def _standard_scores(regime: RegimeSettings, shares: Tensor) -> Tensor:
    """The states' means in units of their long-run deviation, ``[K]``; 0 where they are equal."""
    mean = torch.tensor(regime.mean, dtype=torch.float64)
    centred = mean - (shares * mean).sum()
    deviation = (shares * centred.square()).sum().sqrt()
    return centred / deviation.clamp_min(torch.finfo(torch.float64).tiny)
