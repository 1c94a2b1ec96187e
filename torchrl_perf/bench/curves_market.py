"""What a trader earns on prices that it has not learnt from, beside the best trading and trivial rules."""

from functools import cache
from typing import Any

from torch import Tensor

__all__ = ["unseen_prices"]

PRICE_SEED = 30_000
"""Names the prices; trainers draw theirs from the seeds of their runs."""
SETS, PATHS = 10, 128
"""Sets of price paths, each judged by itself, and paths of a set."""
REGIMES = ("rising", "falling", "reverting", "calm", "turbulent")


def unseen_prices(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """Log growth of the equity in a bar, costs paid, and its share of that of the best trading on the same prices.

    Of ``trained``: ``growth``, ``of_best``, the least and greatest share of a set, ``exposure``, ``turnover``, and the
    share of the steps of each option. ``best`` sees the hidden regime; ``hold`` buys and holds; doing nothing earns 0.
    Of each regime: ``growth``, what was earned in its bars, as a share of the growth of the best trading, and the part
    of it that each option earned.
    """
    from torchrl_perf.systems.options_market.evaluation import evaluate
    from torchrl_perf.systems.options_market.networks import make_options_market_env

    config = trainer.config
    own = {} if config.options == "none" else {"options": trainer.options}
    env = make_options_market_env(config, trainer.device, num_envs=SETS * PATHS, seed=PRICE_SEED, **own)
    figures, recording = evaluate(trainer.policy, env, seed=PRICE_SEED)
    best, held = _others(config, str(trainer.device))
    earned = _growth_of_sets(recording)
    shares = earned / best
    row = {
        "growth": float(earned.mean()),
        "of_best": float(earned.mean() / best.mean()),
        "least_of_best": float(shares.min()),
        "most_of_best": float(shares.max()),
        "exposure": figures.exposure,
        "turnover": figures.turnover,
        **figures.options,
    }
    found = {
        "trained": row,
        "best": {"growth": float(best.mean()), "of_best": 1.0},
        "hold": {"growth": held, "of_best": held / float(best.mean())},
    }
    if figures.options and recording.regime is not None:
        names = list(figures.options)
        steps = float(recording.steps.double().mean())
        gains = recording.gains(len(REGIMES), len(names)) / steps / best.mean()
        for regime, parts in zip(REGIMES, gains, strict=True):
            found[regime] = {"of_best": float(parts.sum()), **dict(zip(names, parts.tolist(), strict=True))}
    return found


def _growth_of_sets(recording: Any) -> Tensor:
    """Log growth in a bar, float64 ``[10]``, of the sets of paths."""
    growth = recording.equity[:, -1].clamp_min(1e-6).log().view(SETS, PATHS).sum(1)
    return growth / recording.steps.double().view(SETS, PATHS).sum(1)


@cache
def _best_of(config: Any, device: str) -> tuple[Tensor, float]:
    from torchrl_perf.systems.options_market.evaluation import evaluate
    from torchrl_perf.systems.options_market.networks import make_market
    from torchrl_perf.systems.options_market.optimum import InformedTrader, best_trading

    market = make_market(config, device, num_envs=SETS * PATHS, seed=PRICE_SEED)
    settings = market.settings
    best = best_trading(settings.regime, cost=settings.cost, max_weight=settings.max_weight)
    figures, recording = evaluate(InformedTrader(market, best), market, seed=PRICE_SEED)
    return _growth_of_sets(recording), figures.buy_and_hold / figures.steps


def _others(config: Any, device: str) -> tuple[Tensor, float]:
    """Growth of the best trading in each set, and of buying and holding; the same for all seeds of a study."""
    import dataclasses

    # what only learning reads is not a part of the market
    market = ("market", "sentiment_correlation", "commission", "slippage", "max_weight", "dead_band", "window")
    own = {name: getattr(config, name) for name in (*market, "bars_per_week", "max_episode_steps", "ruin", "reward")}
    plain = type(config)(env="OptionMarketPlain")
    return _best_of(dataclasses.replace(plain, **own), device)
