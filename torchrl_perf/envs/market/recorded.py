"""Given prices as a market: their indicators are computed once, and an env holds its place in them.

Dimension key: ``N`` envs, ``S`` series, ``T`` bars, ``W`` bars of the window.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_perf.envs.market.indicators import (
    FEATURES,
    LOOKBACK,
    WARM_BARS,
    indicator_row,
    series_averages,
    series_paths,
)
from torchrl_perf.envs.market.settings import MarketSettings

__all__ = ["RecordedMarket", "check_prices", "episode_bars"]

State = dict[str, Tensor]
SENTIMENT_LIMIT = 1e-6
"""Sentiments are kept this far from 0 and 1, whose scores are infinite."""


def check_prices(prices: Tensor) -> Tensor:
    """The prices as float64 ``[S, T]``.

    Raises:
        TypeError: for what is no tensor of floats.
        ValueError: for another shape, and prices that are not finite and positive.
    """
    if not isinstance(prices, Tensor) or not prices.is_floating_point():
        received = f"{prices.dtype} {list(prices.shape)}" if isinstance(prices, Tensor) else type(prices).__name__
        raise TypeError(
            f"prices: expected a float tensor [T] or [S, T], received {received}. Remedy: torch.as_tensor(..., "
            "dtype=torch.float64)."
        )
    if prices.ndim not in (1, 2) or 0 in prices.shape:
        raise ValueError(
            f"prices: expected closes [T] or [S, T] of S series, received {list(prices.shape)}. Remedy: one close for "
            "each bar, the series in the first dim."
        )
    sound = torch.isfinite(prices) & (prices > 0)
    wrong = int((~sound).sum())
    if wrong:
        series, bar = divmod(int((~sound).flatten().to(torch.uint8).argmax()), prices.shape[-1])
        close = float(prices.reshape(-1, prices.shape[-1])[series, bar])
        raise ValueError(
            f"prices: expected finite closes > 0, received {wrong} others, the first one {close} at series "
            f"{series}, bar {bar}. Remedy: drop or fill those bars; a spread, which may be negative, is no price."
        )
    return prices.detach().to(torch.float64).reshape(-1, prices.shape[-1])


def episode_bars(bars: int, window: int, max_episode_steps: int | None) -> tuple[int, int]:
    """First bar at which an episode may begin, and its greatest number of steps, in a series of ``bars``.

    Raises:
        ValueError: where there are not enough bars for the window and one step, or for the episode.
    """
    first = WARM_BARS + window - 1
    most = bars - 1 - first
    if most < 1:
        raise ValueError(
            f"prices: expected at least {first + 2} bars, {WARM_BARS} before the window of {window} and one after it, "
            f"received {bars}. Remedy: a longer series or a shorter window."
        )
    if max_episode_steps is not None and max_episode_steps > most:
        raise ValueError(
            f"max_episode_steps: expected at most {most}, which {bars} bars leave after {first} for the window of "
            f"{window} and its indicators, received {max_episode_steps}. Remedy: max_episode_steps={most}, None for as "
            "many as there are, or a longer series."
        )
    return first, most if max_episode_steps is None else max_episode_steps


class RecordedMarket(nn.Module):
    """The market of an :class:`OptionMarket` that follows given prices.

    The indicators of a bar depend on the prices alone, so those of all bars are computed at construction, in float64.
    Each episode draws a start that is early enough for all its steps, so that the end of the data ends no episode.

    **State**: ``bar`` int64 [N], the place in the flattened series.

    Args:
        num_envs: N.
        prices: closes ``[T]`` or ``[S, T]``, float.
        settings: window, starts, sentiment and bars per week; the first bar is the first of a week.
        max_episode_steps: of an episode; None is as many as the series has room for.
        dtype: float type.
        device: where everything lives.

    Raises:
        TypeError: for prices that are no float tensor.
        ValueError: for prices that are not finite and positive, too few of them, or sentiments that do not fit them.
    """

    entries = ("bar",)
    """Names of the state."""
    prices: Tensor
    rows: Tensor
    scores: Tensor
    offsets: Tensor
    places: Tensor

    def __init__(
        self,
        num_envs: int,
        prices: Tensor,
        settings: MarketSettings,
        max_episode_steps: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        closes = check_prices(prices).to(device)
        self.num_envs, self.settings = num_envs, settings
        self.dtype, self.device = dtype, device
        self.num_series, self.bars = closes.shape
        self.first_bar, self.episode_steps = episode_bars(self.bars, settings.window, max_episode_steps)
        self.num_starts = self.bars - self.first_bar - self.episode_steps
        tables = {
            "prices": closes.flatten(),
            "rows": torch.cat([_rows(series, settings.bars_per_week) for series in closes]),
            "scores": _scores(settings.sentiment, prices, closes),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.to(dtype), persistent=False)
        offsets = torch.arange(1 - settings.window, 1, device=device)
        self.register_buffer("offsets", offsets, persistent=False)
        places = torch.arange(num_envs, device=device) % self.num_series * self.bars + self.first_bar
        self.register_buffer("places", places, persistent=False)

    def draw(self) -> tuple[State, Tensor]:
        """A place for each env, and its price: new tensors."""
        bar = self.places.clone()
        if self.settings.starts == "random":
            uniform = torch.rand(2, self.num_envs, dtype=self.dtype, device=self.device)
            series = (uniform[0] * self.num_series).to(torch.int64).clamp_max(self.num_series - 1)
            start = (uniform[1] * self.num_starts).to(torch.int64).clamp_max(self.num_starts - 1)
            bar = series * self.bars + self.first_bar + start
        return {"bar": bar}, self.prices[bar]

    def redraw(self) -> tuple[State, Tensor]:
        """Another place, and its price."""
        return self.draw()

    def advance(self, state: State, price: Tensor) -> tuple[State, Tensor]:
        """The place and the price ``[N]`` one bar later; a series stops at its last bar."""
        bar = state["bar"]
        last = (bar + 1) % self.bars == 0
        following = torch.where(last, bar, bar + 1)
        return {"bar": following}, self.prices[following]

    def window(self, state: State) -> Tensor:
        """The rows of the last W bars, ``[N, W, 23]``."""
        return self.rows[state["bar"].unsqueeze(-1) + self.offsets]

    def signal(self, state: State) -> Tensor:
        """The sentiment's score ``[N]``."""
        return self.scores[state["bar"]]


def _rows(closes: Tensor, bars_per_week: int) -> Tensor:
    """Columns ``[T, 23]`` of one series ``[T]``; 0 for bars without a path, which no window shows."""
    logs = closes.log()
    returns = torch.cat((torch.zeros_like(logs[:1]), logs.diff()))
    averages = series_averages(returns)[LOOKBACK - 1 :]
    clock = torch.arange(len(closes), device=closes.device) % bars_per_week
    rows = indicator_row(series_paths(logs), averages, clock[LOOKBACK - 1 :], bars_per_week)
    return torch.cat((rows.new_zeros(LOOKBACK - 1, len(FEATURES)), rows))


def _scores(sentiment: Tensor | None, prices: Tensor, closes: Tensor) -> Tensor:
    """Scores ``[S T]`` of sentiments of the shape of the prices; 0 without them."""
    if sentiment is None:
        return torch.zeros_like(closes).flatten()
    sound = isinstance(sentiment, Tensor) and sentiment.is_floating_point() and sentiment.shape == prices.shape
    if not sound or not bool(((sentiment >= 0) & (sentiment <= 1)).all()):
        received = f"{sentiment.dtype} {list(sentiment.shape)}" if isinstance(sentiment, Tensor) else repr(sentiment)
        raise ValueError(
            f"sentiment: expected floats in [0, 1] of the shape of the prices, {list(prices.shape)}, received "
            f"{received}. Remedy: one sentiment for each close, .5 where there is none."
        )
    bounded = sentiment.detach().to(closes).clamp(SENTIMENT_LIMIT, 1.0 - SENTIMENT_LIMIT)
    return torch.special.ndtri(bounded).flatten()
