"""What a trader earns on prices that it has not learnt from, beside the best trading and trivial rules."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["unseen_prices"]

PRICE_SEEDS = tuple(range(30_000, 30_010))
"""Each names a set of price paths, which is judged by itself; trainers draw theirs from the seeds of their runs."""
PATHS = 128
"""Price paths of a set."""
ENOUGH = 0.8
REGIMES = ("rising", "falling", "reverting", "calm", "turbulent")


def unseen_prices(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """Log growth of the equity in a bar, costs paid, and its share of that of the best trading on the same prices.

    Of ``trained``: ``growth``, ``of_best``, the least and greatest share of a price seed, on how many of the ten the
    share is at least .8 (``prices_at_80``), and on how many more was earned than by holding and by doing nothing
    (``prices_won``), ``exposure``, ``turnover``, and the share of the steps of each option. ``best`` sees the hidden
    regime; ``hold`` buys and holds; doing nothing earns 0. Of each regime: what was earned in its bars, as a
    share of the growth of the best trading, and the part of it that each option earned.
    """
    from torchrl_perf.systems.options_market.evaluation import evaluate, figures_of
    from torchrl_perf.systems.options_market.networks import make_options_market_env

    config = trainer.config
    own = {} if config.options == "none" else {"options": trainer.options}
    recordings = []
    for seed in PRICE_SEEDS:
        env = make_options_market_env(config, trainer.device, num_envs=PATHS, seed=seed, **own)
        figures, recording = evaluate(trainer.policy, env, seed=seed)
        recordings.append(recording)
    recording = _joined(recordings)
    figures = figures_of(recording, list(figures.options))
    best, held = _others(config, str(trainer.device))
    earned = torch.stack([_growth(one) for one in recordings])
    shares = earned / best
    row = {
        "growth": float(earned.mean()),
        "of_best": float(earned.mean() / best.mean()),
        "least_of_best": float(shares.min()),
        "most_of_best": float(shares.max()),
        "prices_at_80": float((shares >= ENOUGH).sum()),
        "prices_won": float((earned > held.clamp_min(0.0)).sum()),
        "exposure": figures.exposure,
        "turnover": figures.turnover,
        **figures.options,
    }
    found = {
        "trained": row,
        "best": {"growth": float(best.mean()), "of_best": 1.0},
        "hold": {"growth": float(held.mean()), "of_best": float(held.mean() / best.mean())},
    }
    if figures.options and recording.regime is not None:
        names = list(figures.options)
        steps = float(recording.steps.double().mean())
        gains = recording.gains(len(REGIMES), len(names)) / steps / best.mean()
        for regime, parts in zip(REGIMES, gains, strict=True):
            found[regime] = {"of_best": float(parts.sum()), **dict(zip(names, parts.tolist(), strict=True))}
    return found


def _growth(recording: Any) -> Tensor:
    """Log growth in a bar, float64 ``[]``, of a set of paths."""
    return recording.equity[:, -1].clamp_min(1e-6).log().sum() / recording.steps.sum()


def _joined(recordings: Sequence[Any]) -> Any:
    """The recordings of several sets as one, with shorter ones padded as ended episodes are."""
    longest = max(one.option.shape[1] for one in recordings)
    parts = {
        name: torch.cat([_padded(getattr(one, name), longest - one.option.shape[1], fill) for one in recordings])
        for name, fill in {"equity": None, "price": None, "size": None, "cost": 0, "option": -1, "regime": -1}.items()
        if getattr(recordings[0], name) is not None
    }
    return dataclasses.replace(recordings[0], **parts, steps=torch.cat([one.steps for one in recordings]))


def _padded(value: Tensor, count: int, fill: int | None) -> Tensor:
    """``[N, T] -> [N, T + count]`` with ``fill``, or the last value."""
    more = value[:, -1:] if fill is None else torch.full_like(value[:, -1:], fill)
    return torch.cat((value, more.expand(-1, count)), 1)


@cache
def _best_of(config: Any, device: str) -> tuple[Tensor, Tensor]:
    from torchrl_perf.systems.options_market.evaluation import evaluate
    from torchrl_perf.systems.options_market.networks import make_market
    from torchrl_perf.systems.options_market.optimum import InformedTrader, best_trading

    best, growth, held = None, [], []
    for seed in PRICE_SEEDS:
        market = make_market(config, device, num_envs=PATHS, seed=seed)
        settings = market.settings
        best = best or best_trading(settings.regime, cost=settings.cost, max_weight=settings.max_weight)
        figures, recording = evaluate(InformedTrader(market, best), market, seed=seed)
        growth.append(_growth(recording))
        held.append(figures.buy_and_hold / figures.steps)
    return torch.stack(growth), torch.tensor(held, dtype=torch.float64)


def _others(config: Any, device: str) -> tuple[Tensor, Tensor]:
    """Growth ``[S]`` of the best trading, and of holding, for each price seed; the same for all seeds of a study."""
    # what only learning reads is not a part of the market
    market = ("market", "sentiment_correlation", "commission", "slippage", "max_weight", "dead_band", "window")
    own = {name: getattr(config, name) for name in (*market, "bars_per_week", "max_episode_steps", "ruin", "reward")}
    plain = type(config)(env="OptionMarketPlain")
    return _best_of(dataclasses.replace(plain, **own), device)
