"""Evaluation of traders: figures by hand, Kelly's weight, walk-forward without a look ahead, pictures, refusals."""

import dataclasses
import math

import pytest
import torch
from states import run
from trading_runs import EXPOSURE, SMALL, make

from torchrl_perf.envs import OptionMarket
from torchrl_perf.envs.market import PriceSeries
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.evaluation import (
    MEANING,
    evaluate,
    figures_of,
    kelly_fraction,
    summary,
    walk_forward,
)
from torchrl_perf.systems.options_market.networks import make_options_market_env, market_of
from torchrl_perf.systems.options_market.picture import EquityRecording


def series(bars=130, seed=0):
    closes = (0.02 * torch.randn(bars, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).cumsum(0)
    return PriceSeries([f"day {number:03d}" for number in range(bars)], closes.exp())


def recording(equity, price, size, cost):
    def rows(values):
        return torch.tensor([values], dtype=torch.float64)

    steps = torch.tensor([len(equity) - 1])
    option = torch.zeros(1, len(equity) - 1, dtype=torch.int64)
    return EquityRecording(rows(equity), rows(price), rows(size), rows(cost), option, steps, 0.01)


def test_figures_by_hand():
    # half of the equity after costs at 100, held; at 110 sold
    bought = 0.5 / 1.005
    after = 1 - 0.01 * bought
    equity = [1.0, after + 0.1 * bought]
    value = 1.1 * bought
    equity += [equity[1] - 0.01 * value]
    size = [0.0, value / equity[1], 0.0]
    figures = figures_of(recording(equity, [100.0, 110.0, 121.0], size, [0.01 * bought, 0.01 * value]), ["a", "b"])
    assert figures.growth == pytest.approx(math.log(equity[2]))
    assert math.isnan(figures.growth_error)
    assert figures.buy_and_hold == pytest.approx(math.log(1.21 / 1.01))
    assert figures.weight == pytest.approx((0.5 + 0.0) / 2)
    assert figures.turnover == pytest.approx((bought + value / equity[1]) / 2)
    assert figures.costs == pytest.approx(0.01 * (bought + value))
    assert figures.drawdown == pytest.approx(1 - equity[2] / equity[1])
    assert figures.options == {"a": 1.0, "b": 0.0}
    assert (figures.envs, figures.steps, figures.do_nothing) == (1, 2.0, 0.0)
    assert "buy and hold +0.18" in str(figures)


def test_a_constant_weight_is_found_again():
    env = make_options_market_env(OptionsMarketConfig.without_task(**{**SMALL, **EXPOSURE, "commission": 0.01}), "cpu")

    def hold(tensordict):
        return tensordict.set("action", torch.full((4, 1), 0.4))

    figures, found = evaluate(hold, env, seed=3)
    assert figures.weight == pytest.approx(0.4, rel=1e-4)
    assert figures.turnover * 0.01055 * figures.steps == pytest.approx(figures.costs, rel=1e-2)
    assert found.equity.shape == (4, 7)
    assert figures.options == {}


def test_kelly_fraction():
    assert kelly_fraction(0.0, 0.2, 1.0) == pytest.approx(0.0, abs=1e-3)
    assert kelly_fraction(4e-6 * 2.5, 0.002, 4.0) == pytest.approx(2.5, rel=0.01)  # Merton's, of short bars
    assert kelly_fraction(1.0, 0.1, 1.0) == 1.0
    assert kelly_fraction(-1.0, 0.1, 2.0) == -2.0


def test_a_trainers_policy_twice_and_nothing_else_changes():
    trainer = run(make(), 3)
    state = torch.get_rng_state()
    figures = [evaluate(trainer.policy, make_options_market_env(trainer.config, "cpu"))[0] for _ in range(2)]
    env = make_options_market_env(trainer.config, "cpu")
    again = evaluate(trainer.policy, env, seed=1)[0]
    assert sum(again.options.values()) == pytest.approx(1.0)
    assert again.envs == 4
    # making an env draws, evaluating does not
    torch.set_rng_state(state)
    evaluate(trainer.policy, env)
    assert torch.equal(torch.get_rng_state(), state)
    assert figures[0] == figures[1]
    assert again.buy_and_hold != figures[0].buy_and_hold
    with pytest.raises(ValueError, match="env: expected an OptionMarket with a flat"):
        evaluate(trainer.policy, OptionMarket(4, observation="dict"))


WALK = {"train_bars": 80, "test_bars": 20, "envs": 2}


def config(**options):
    return OptionsMarketConfig.without_task(**{**SMALL, **EXPOSURE, "market": "recorded", "total_steps": 64, **options})


def test_walk_forward_learns_on_a_window_and_trades_the_next(tmp_path):
    data = series()
    folds = walk_forward(config(), **WALK, series=data, folder=tmp_path / "pictures")
    assert [fold.trained_on for fold in folds] == [("day 000", "day 079"), ("day 020", "day 099")]
    assert [fold.tested_on for fold in folds] == [("day 080", "day 099"), ("day 100", "day 119")]
    for fold, start in zip(folds, (80, 100), strict=True):
        assert (fold.after.envs, fold.after.steps) == (2, 19.0)
        held = math.log(float(data.prices[start + 19] / data.prices[start]) / 1.00155)
        assert fold.after.buy_and_hold == pytest.approx(held, rel=1e-4)
        assert fold.picture.stat().st_size > 10_000
        assert fold.before.steps > 20
    total = sum(fold.after.growth for fold in folds)
    assert summary(folds).startswith(f"2 tests: log growth {total:+.4f}, buy and hold")


def test_what_comes_later_changes_nothing_before():
    data = series()
    other = PriceSeries(data.dates, torch.cat((data.prices[:100], data.prices[100:] * 1.5)))
    first, second = (walk_forward(config(), **WALK, folds=1, series=prices) for prices in (data, other))
    assert first == second
    changed = PriceSeries(data.dates, torch.cat((data.prices[:90], data.prices[90:] * 1.5)))
    third = walk_forward(config(), **WALK, folds=1, series=changed)
    assert third[0].before == first[0].before
    (alone,) = walk_forward(config(), **WALK, folds=1, series=data, windows=False)
    assert (alone.before, alone.after) == (None, first[0].after)
    assert third[0].after.buy_and_hold != first[0].after.buy_and_hold


def test_costs_are_paid_in_the_test():
    free, dear = (
        walk_forward(config(commission=cost, slippage=0.0), **WALK, folds=1, series=series())[0].after
        for cost in (0.0, 0.02)
    )
    assert free.costs == 0.0 < dear.costs
    assert dear.buy_and_hold == pytest.approx(free.buy_and_hold - math.log(1.02))


def test_refusals():
    with pytest.raises(ValueError, match="market: expected 'recorded', prices with a past"):
        walk_forward(dataclasses.replace(config(), market="regimes"), **WALK)
    for windows in ({"folds": 3}, {"train_bars": 120}, {"test_bars": 0}):
        with pytest.raises(ValueError, match=r"folds: expected from 1 to .* bars have room for"):
            walk_forward(config(), **{**WALK, **windows}, series=series())
    with pytest.raises(ValueError, match=r"prices: expected at least .* bars"):
        walk_forward(config(), train_bars=30, test_bars=20, series=series())


def test_the_statement_is_plain():
    assert MEANING[0].startswith("What this says")
    assert "no advice" in MEANING[-1]
    assert market_of(make().env).num_envs == 4
