"""A trader with options learns: SAC below a policy over options, with every step of the loop on one device.

Run it with ``python examples/options_trading.py``; ``--help`` lists the settings. Without costs and with a known drift
the best position is known too (Kelly, 1956): the first lines to look at. With ``--task OptionMarket`` prices have five
regimes, and the best growth is known. With ``--task OptionMarketZeroEdge`` the thing to learn is to do nothing. With
``--prices FILE`` (a gzipped CSV of dates and closes, or ``sp500`` for the series of the package skfolio) it learns on
one window of the past and trades the next, again and again. The last lines say what such a result means, and what not.

``torchrl-perf train options-market`` learns the tasks with checkpoints, curves and a resume. This file shows what it is
made of: a config, a trainer whose ``step`` is one iteration (collect, store steps and finished options, update,
metrics), and one row of metrics at a time that comes to the host. Read it from top to bottom: Config, settings_of,
learn, walk, main.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from torchrl_perf.systems.options_market import OPTIONS_MARKET_PRESETS, OptionsMarketConfig, OptionsMarketTrainer
from torchrl_perf.systems.options_market import evaluation as judged
from torchrl_perf.systems.options_market.networks import make_options_market_env
from torchrl_perf.systems.options_market.picture import draw_equity


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    task: Literal["OptionMarketKelly", "OptionMarketZeroEdge", "OptionMarket"] = "OptionMarketKelly"
    """Which synthetic market; not looked at with prices."""
    prices: str = ""
    """Gzipped CSV of dates and closes, or sp500; "" for a synthetic market."""
    train_bars: int = 2_520
    """Bars of a window that is learnt from, with prices."""
    test_bars: int = 504
    """Bars of the next one, which is traded."""
    folds: int = 3
    """How many of them."""
    total_steps: int = 0
    """Env steps of a run; 0 is what the task asks for."""
    log_interval: int = 10
    """Iterations between two rows."""
    picture: Path = Path("equity.png")
    """Where the picture goes, or the pictures of the tests as a folder without the suffix."""
    seed: int = 0
    """Seed of networks, market and sampling."""
    device: str = "auto"
    """Device of everything."""


def settings_of(config: Config) -> OptionsMarketConfig:
    """The settings of the trainer."""
    preset = OPTIONS_MARKET_PRESETS["OptionMarketSP500" if config.prices else config.task]
    file = "" if config.prices == "sp500" else config.prices
    changed = {"prices_file": file, "seed": config.seed, "device": config.device, "logger": "none"}
    if config.total_steps:
        changed |= {"total_steps": config.total_steps}
        changed |= {"learning_starts": min(preset.learning_starts, config.total_steps // 4)}
    return dataclasses.replace(preset, **changed)


def learn(trainer: OptionsMarketTrainer, log_interval: int) -> None:
    """Run all iterations."""
    iterations = trainer.config.iterations
    for done in range(1, iterations + 1):
        trainer.step()
        if done % log_interval and done != iterations:
            continue
        row = trainer.summarise(trainer.metrics.flush(done * trainer.config.batch_size))  # the only copy to the host
        print(
            f"{done * trainer.config.batch_size:>9,} steps   weight {row['market/weight']:+.2f}   turnover "
            f"{row['market/turnover']:.4f}   options in use {row['option/num_used']:.0f}   "
            f"return {row.get('episode/mean_return', 0.0):+.4f}"
        )


def walk(settings: OptionsMarketConfig, config: Config) -> None:
    """Learn on windows of the past and trade the next ones."""
    folds = judged.walk_forward(
        settings,
        train_bars=config.train_bars,
        test_bars=config.test_bars,
        folds=config.folds,
        folder=config.picture.with_suffix(""),
    )
    for fold in folds:
        print(f"{fold.tested_on[0]} to {fold.tested_on[1]}: {fold.after}\npicture: {fold.picture}")
    print(judged.summary(folds))


def main(config: Config) -> None:
    """Trains, trades, draws and says what it means."""
    torch.set_num_threads(1)  # networks this small gain nothing from a second core
    settings = settings_of(config)
    if config.prices:
        walk(settings, config)
    else:
        trainer = OptionsMarketTrainer(settings)
        learn(trainer, config.log_interval)
        env = make_options_market_env(settings, trainer.device, options=trainer.options)  # one of its own
        figures, recording = judged.evaluate(trainer.policy, env, seed=settings.seed + 1)
        if settings.market == "five_regimes":
            share = figures.growth / judged.evaluate_informed(env, seed=settings.seed + 1).growth
            print(f"{share:.0%} of the growth of the best trader, who sees the regimes")
        if settings.market == "brownian":
            best = judged.kelly_fraction(settings.drift, settings.volatility, settings.max_weight)
            print(f"mean weight {figures.weight:+.2f}; without costs the best one is {best:+.2f}")
        print(figures)
        print(f"picture: {draw_equity(recording, config.picture, names=trainer.options.names)}")
        trainer.close()
    print(*judged.MEANING, sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
