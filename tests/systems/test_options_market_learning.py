"""A trader learns to trade regimes, not to trade where that costs and earns nothing, and Kelly's weight."""

import dataclasses

import pytest

from torchrl_perf.systems.options_market.config import OPTIONS_MARKET_PRESETS
from torchrl_perf.systems.options_market.evaluation import evaluate, evaluate_informed, kelly_fraction
from torchrl_perf.systems.options_market.networks import make_options_market_env
from torchrl_perf.systems.options_market.trainer import OptionsMarketTrainer


def learn(name, **options):
    config = dataclasses.replace(OPTIONS_MARKET_PRESETS[name], device="cpu", logger="none", **options)
    trainer = OptionsMarketTrainer(config)
    rows = []
    for done in range(1, config.iterations + 1):
        trainer.step()
        trainer.iterations_done += 1
        if done in (config.fill_iterations, config.iterations * 3 // 4, config.iterations):
            rows.append(trainer.summarise(trainer.metrics.flush(done * config.batch_size)))
    env = make_options_market_env(config, "cpu", options=trainer.options)
    return rows, evaluate(trainer.policy, env, seed=7)[0], config


def test_hardly_any_trading_without_an_edge_and_with_costs():
    small = {"max_episode_steps": 60, "minibatch_size": 128, "hidden_size": 16, "initial_temperature": 1e-4}
    rows, figures, _ = learn("OptionMarketZeroEdge", **small, total_steps=12_288, learning_starts=2_048)
    first, _, last = (row["market/turnover"] for row in rows)
    assert first > 0.01
    assert last < 0.5 * first  # with the noise of exploration
    assert figures.turnover < 0.02 * first
    assert figures.growth > -1e-3


@pytest.mark.slow
def test_five_regimes_are_traded_better_than_held_or_left_alone():
    """A tenth of the preset's steps: less than the best growth, which a trader reaches who sees the regimes."""
    _, figures, config = learn("OptionMarket", total_steps=196_608)
    informed = evaluate_informed(make_options_market_env(config, "cpu"), seed=7)
    assert 0.1 * informed.growth < figures.growth < informed.growth
    assert figures.growth > figures.buy_and_hold + 0.01


@pytest.mark.parametrize(
    ("options", "within"),
    [
        pytest.param({"total_steps": 262_144}, 0.15, marks=pytest.mark.slow, id="short"),
        pytest.param({}, 0.1, marks=pytest.mark.long, id="preset"),
    ],
)
def test_the_mean_weight_is_near_kellys_without_costs(options, within):
    """Growth is flat around its maximum: a weight that is 10 % off costs a hundredth of it, 15 % two hundredths."""
    rows, figures, config = learn("OptionMarketKelly", **options)
    best = kelly_fraction(config.drift, config.volatility, config.max_weight)
    assert 0.3 * config.max_weight < best < 0.9 * config.max_weight
    assert figures.weight == pytest.approx(best, rel=within)
    assert figures.options["long"] > 0.95  # the only range that holds as much and no less than nothing
    # with exploration several options run, so that the monitor says nothing
    assert config.gamma > 0 and config.num_critics == 2
    assert rows[-1]["option/max_usage"] <= config.max_option_share == 0.5
    assert rows[-1]["option/num_used"] >= config.min_options_used == 3
