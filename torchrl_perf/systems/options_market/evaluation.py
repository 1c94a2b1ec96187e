"""Evaluation of a trader on bars that it has not learnt from, compared with buying and holding, and doing nothing.

Dimension key: ``N`` envs, ``T`` steps or bars, ``O`` options.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.envs.market import OptionMarket, PriceSeries
from torchrl_perf.envs.market.market import LEAST_GROWTH
from torchrl_perf.envs.market.recorded import RecordedMarket
from torchrl_perf.runtime.seeds import own_draws, seeded
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.networks import make_options_market_env, market_of, recorded_prices
from torchrl_perf.systems.options_market.optimum import InformedTrader, best_trading
from torchrl_perf.systems.options_market.picture import EquityRecording, draw_equity, record_equity
from torchrl_perf.systems.options_market.trainer import OptionsMarketTrainer
from torchrl_perf.trainers.device import resolve_device

__all__ = [
    "MEANING",
    "Fold",
    "TradingFigures",
    "evaluate",
    "evaluate_informed",
    "figures_of",
    "kelly_fraction",
    "summary",
    "walk_forward",
]

Policy = Callable[[TensorDictBase], TensorDictBase]

MEANING = (
    "What this says: how the policy did on these bars, at these costs, filled at the close, without moving the price.",
    "What it does not say: what will come. On a synthetic market an edge is one that was put in. A past of real",
    "prices is one draw, seen by whoever chose rules and settings; an index cannot be bought, pays no dividends here,",
    "and holds companies that did well. Before reading anything into a number compare it, over several seeds, with",
    "buying and holding and with doing nothing. It is no advice to trade.",
)
"""A plain statement, line by line."""


@dataclass(frozen=True)
class TradingFigures:
    """Results of the first episodes of N envs, means over the envs; growth is in log equity.

    With recorded prices, envs that start together see the same prices, and differ only in the options that are drawn.
    """

    envs: int
    """N."""
    steps: float
    """Steps of an episode."""
    growth: float
    """Log growth of the equity, after costs; an open position counts at its price."""
    growth_error: float
    """Standard error of that mean over the envs; NaN for one."""
    buy_and_hold: float
    """The same of all the capital in the asset from the first step on, its purchase paid."""
    do_nothing: float
    """The same of the capital in cash: 0."""
    weight: float
    """Position after a step's trade, in units of the equity."""
    exposure: float
    """Its absolute value."""
    turnover: float
    """Notional traded in a step, in units of the equity."""
    costs: float
    """Costs of an episode, in units of the capital."""
    drawdown: float
    """Greatest fall of the equity from its peak, as a share of that."""
    options: dict[str, float]
    """Share of the steps that each option ran, by name."""

    def __str__(self) -> str:
        ran = ", ".join(f"{name} {share:.0%}" for name, share in self.options.items())
        return (
            f"log growth {self.growth:+.4f} (buy and hold {self.buy_and_hold:+.4f}, do nothing {self.do_nothing:+.4f}),"
            f" weight {self.weight:+.2f}, turnover {self.turnover:.4f} a step, costs {self.costs:.2%}, drawdown "
            f"{self.drawdown:.1%}; {ran}"
        )


@dataclass(frozen=True)
class Fold:
    """One window that was learnt from, and the next one.

    Attributes:
        trained_on: first and last date of the window.
        tested_on: those of the next one.
        before: figures on the window itself, which are too good; None where they were not asked for.
        after: figures on the next one.
        picture: equity and options on the next one; None without a folder.
    """

    trained_on: tuple[str, str]
    tested_on: tuple[str, str]
    before: TradingFigures | None
    after: TradingFigures
    picture: Path | None = None


def evaluate(
    policy: Policy, env: TransformedEnv | OptionMarket, *, seed: int = 0, max_steps: int | None = None
) -> tuple[TradingFigures, EquityRecording]:
    """Let a policy trade the first episode of each row of an env, without exploration, on separate random numbers.

    What the policy draws, such as the ends of options, is drawn apart from the market: for the same seed all policies
    meet the same prices.

    Args:
        policy: reads the observation and writes the action and "active_option", such as a trainer's.
        env: of :func:`make_options_market_env`, one of its own.
        seed: of the market and of when options end.
        max_steps: as for :func:`~torchrl_perf.systems.options_market.picture.record_equity`.

    Returns:
        Figures and the recording, for :func:`~torchrl_perf.systems.options_market.picture.draw_equity`.

    Raises:
        ValueError: for an env that is no market.
    """
    market = market_of(env)
    with seeded(seed, market.device), set_exploration_type(ExplorationType.DETERMINISTIC):
        recording = record_equity(env, own_draws(policy, seed, market.device), max_steps=max_steps)
    controller = getattr(policy, "controller", None)
    names = [] if controller is None else list(controller.options.names)
    return figures_of(recording, names), recording


def evaluate_informed(
    env: TransformedEnv | OptionMarket, *, seed: int = 0, max_steps: int | None = None
) -> TradingFigures:
    """Figures of the best trader of the env's market, who sees its regimes, on the same prices for the same seed.

    Args:
        env: as for :func:`evaluate`, of a synthetic price and actions that are positions.
        seed: of the market.
        max_steps: as for :func:`evaluate`.

    Raises:
        ValueError: for an env of another kind.
    """
    market = market_of(env)
    settings = market.settings
    best = best_trading(settings.regime, cost=settings.cost, max_weight=settings.max_weight)
    return evaluate(InformedTrader(market, best), env, seed=seed, max_steps=max_steps)[0]


def figures_of(recording: EquityRecording, names: list[str]) -> TradingFigures:
    """Figures of a recording.

    Args:
        recording: of episodes on the host.
        names: of the options, in the order of their indices; none where there are no options.
    """
    equity, size, price = recording.equity, recording.size, recording.price
    going = torch.arange(size.shape[1] - 1) < recording.steps.unsqueeze(-1)
    # the size after a bar's move is w (1 + r) / (1 + w r): solved for the weight w after the trade
    ratio = price[:, 1:] / price[:, :-1]
    weight = size[:, 1:] / (ratio - size[:, 1:] * (ratio - 1))
    traded = weight * (equity[:, :-1] - recording.cost) - size[:, :-1] * equity[:, :-1]
    growth = equity[:, -1].clamp_min(LEAST_GROWTH).log()
    fall = 1 - equity / equity.cummax(-1).values
    shares = recording.option_shares(len(names)).tolist() if names else []
    return TradingFigures(
        envs=len(equity),
        steps=float(recording.steps.double().mean()),
        growth=float(growth.mean()),
        growth_error=float(growth.std() / math.sqrt(len(growth))) if len(growth) > 1 else math.nan,
        buy_and_hold=float(recording.buy_and_hold[:, -1].log().mean()),
        do_nothing=0.0,
        weight=_mean(weight, going),
        exposure=_mean(weight.abs(), going),
        turnover=_mean(traded.abs() / equity[:, :-1], going),
        costs=float(recording.cost.sum(-1).mean()),
        drawdown=float(fall.amax(-1).mean()),
        options=dict(zip(names, shares, strict=True)),
    )


def walk_forward(
    config: OptionsMarketConfig,
    *,
    train_bars: int,
    test_bars: int,
    folds: int | None = None,
    series: PriceSeries | None = None,
    envs: int = 8,
    folder: str | Path | None = None,
    windows: bool = True,
) -> list[Fold]:
    """Learn on a window of prices and trade the next one, then move on by its length with a new trader; and so on.

    The trades of a test are at closes that no learning has seen: earlier bars are only used for the indicators. Costs
    are the config's.

    Args:
        config: settings of each of the runs; its market has to be "recorded" unless there is a ``series``.
        train_bars: of the window that is learnt from.
        test_bars: of the next one.
        folds: how many of them, the earliest; None is as many as there is room for.
        series: dates and closes; by default those that the config names.
        envs: repetitions of a test, which differ in when options end.
        folder: where a picture of each test goes; needs matplotlib. None for none.
        windows: whether the window that was learnt from is traded, too.

    Raises:
        ValueError: for a synthetic market, fewer bars than train_bars and test_bars, more folds than there is room for,
            and windows too short for the indicators or for ``max_episode_steps``.
        RuntimeError: for a run that diverged.
    """
    if series is None and config.market != "recorded":
        raise ValueError(
            f"market: expected 'recorded', prices with a past and a future, or series=, received {config.market!r}. "
            "Remedy: market='recorded', or evaluate() on a new env of a synthetic market."
        )
    series = recorded_prices(config) if series is None else series
    config = dataclasses.replace(config, market="recorded")
    room = (len(series.prices) - train_bars) // test_bars if min(train_bars, test_bars) > 0 else 0
    count = room if folds is None else folds
    if not 1 <= count <= room:
        raise ValueError(
            f"folds: expected from 1 to {room}, what {len(series.prices)} bars have room for with train_bars="
            f"{train_bars} and test_bars={test_bars}, received {folds}. Remedy: a longer series, or shorter windows."
        )
    places = [(number * test_bars, train_bars, test_bars) for number in range(count)]
    return [_fold(config, series, place, envs, folder, windows) for place in places]


def summary(folds: list[Fold]) -> str:
    """The log growth of all tests together, of the policy, of buying and holding, and of doing nothing."""
    names = ("growth", "buy_and_hold", "do_nothing")
    total = {name: sum(getattr(fold.after, name) for fold in folds) for name in names}
    better = sum(fold.after.growth > max(fold.after.buy_and_hold, 0.0) for fold in folds)
    return (
        f"{len(folds)} tests: log growth {total['growth']:+.4f}, buy and hold {total['buy_and_hold']:+.4f}, do nothing "
        f"{total['do_nothing']:+.4f}, costs {sum(fold.after.costs for fold in folds):.2%}; better than both in {better}"
    )


def kelly_fraction(drift: float, volatility: float, max_weight: float) -> float:
    """The weight of greatest expected log growth of a bar, within ``[-max_weight, max_weight]`` (Kelly, 1956).

    For short bars it tends to Merton's ``drift / volatility^2`` (1969). It is searched among 4001 weights, by the
    quantiles of the log return, normal with mean ``drift - volatility^2 / 2``, and growth is bounded as the env's is.

    Args:
        drift: of a bar.
        volatility: standard deviation of its log return.
        max_weight: greatest position in units of the equity.
    """
    quantiles = torch.special.ndtri((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000)
    change = (drift - volatility**2 / 2 + volatility * quantiles).expm1()
    weights = torch.linspace(-max_weight, max_weight, 4001, dtype=torch.float64)
    growth = [(1 + part.unsqueeze(-1) * change).clamp_min(LEAST_GROWTH).log().mean(-1) for part in weights.split(250)]
    return float(weights[torch.cat(growth).argmax()])


def _fold(
    config: OptionsMarketConfig,
    series: PriceSeries,
    place: tuple[int, int, int],
    envs: int,
    folder: str | Path | None,
    windows: bool,
) -> Fold:
    """Learn from ``place``'s window and trade the next one; place is first bar, bars to learn from, bars to trade."""
    start, middle, end = place[0], place[0] + place[1], sum(place)
    window = series.prices[start:middle]
    trainer = OptionsMarketTrainer(
        config, env=make_options_market_env(config, resolve_device(config.device), prices=window)
    )
    try:
        _learn(trainer)
        # the test's first trade is at the close of bar `middle`; what comes before is history of the indicators
        history = cast("RecordedMarket", market_of(trainer.env).market).first_bar
        options = {"num_envs": envs, "starts": "first", "max_episode_steps": None}
        found = []
        for first, last in ((start, middle), (max(middle - history, 0), end))[0 if windows else 1 :]:
            prices = series.prices[first:last]
            own = None if config.options == "none" else trainer.options
            env = make_options_market_env(config, trainer.device, options=own, prices=prices, **options)
            found.append(evaluate(trainer.policy, env, seed=config.seed))
    finally:
        trainer.close()
    before, (after, recording) = found[0][0] if windows else None, found[-1]
    dates = series.dates
    picture = None
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        picture = Path(folder) / f"walk_forward_{dates[middle]}.png"
        draw_equity(recording, picture, names=list(after.options), title=f"{dates[middle]} to {dates[end - 1]}")
    return Fold((dates[start], dates[middle - 1]), (dates[middle], dates[end - 1]), before, after, picture)


def _learn(trainer: OptionsMarketTrainer) -> None:
    """All iterations of a run."""
    for _ in range(trainer.config.iterations):
        trainer.step()
        trainer.iterations_done += 1
    verdict = trainer.guard.verdict(trainer.metrics.flush(trainer.config.iterations * trainer.config.batch_size))
    if verdict is not None:
        raise RuntimeError(f"walk_forward: expected finite numbers, received {verdict}. Remedy: smaller step sizes.")


def _mean(value: Tensor, going: Tensor) -> float:
    """Mean of ``[N, T]`` over the steps of the episodes."""
    return float(torch.where(going, value, 0.0).sum() / going.sum())
