"""Error bars of evaluations, and the bars before a test that a trader sees and does not trade."""

import math

import pytest
import torch
from fire_runs import SMALL as FIRES
from trading_runs import EXPOSURE, SMALL

from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape, random_breaks
from torchrl_perf.envs.market import PriceSeries
from torchrl_perf.systems.fuel_breaks.evaluation import RANDOM_PLACEMENTS, compare
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.evaluation import figures_of, walk_forward
from torchrl_perf.systems.options_market.picture import EquityRecording


def test_growth_error_is_the_standard_deviation_over_the_root_of_the_envs():
    growth = torch.tensor([0.1, 0.2, 0.4, 0.7], dtype=torch.float64)
    equity = torch.stack((torch.ones(4), growth.exp()), -1)
    flat = torch.ones(4, 2, dtype=torch.float64)
    option, steps = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    figures = figures_of(EquityRecording(equity, flat, flat * 0, flat[:, :1] * 0, option, steps, 0.0), [])
    mean = 0.35
    by_hand = math.sqrt(sum((value - mean) ** 2 for value in growth.tolist()) / 3 / 4)
    assert figures.growth == pytest.approx(mean)
    assert figures.growth_error == pytest.approx(by_hand)


@pytest.mark.parametrize("window", [2, 5])
def test_a_test_is_traded_from_its_first_bar_to_its_last_whatever_the_window(window):
    closes = torch.linspace(0.0, 1.0, 100, dtype=torch.float64).square().exp()  # no two moves are alike
    config = OptionsMarketConfig.without_task(
        **{**SMALL, **EXPOSURE, "market": "recorded", "total_steps": 32, "window": window, "commission": 0.0},
        slippage=0.0,
    )
    series = PriceSeries([f"day {number}" for number in range(100)], closes)
    (fold,) = walk_forward(config, train_bars=80, test_bars=20, folds=1, series=series, envs=1)
    assert fold.after.steps == 19
    assert fold.after.buy_and_hold == pytest.approx(math.log(float(closes[99] / closes[80])), rel=1e-4)


def test_random_placements_share_the_fires_of_their_landscape():
    """The error of the mean: averaged over the placements in one landscape, added in squares over landscapes."""
    env = FuelBreaks(1, landscape=Landscape.fractal(0, FIRES["size"], count=3), budget=4)
    found = compare(None, env, fires=64, seed=5)
    generator = torch.Generator().manual_seed(5)
    breaks = random_breaks(env.burnable().repeat(RANDOM_PLACEMENTS, 1, 1), 4, generator=generator)
    squares = 0.0
    for landscape in range(3):
        errors = [
            float(env.assess(breaks[row : row + 1], landscape_id=torch.tensor([landscape]), fires=64, seed=5).error)
            for row in range(landscape, len(breaks), 3)
        ]
        assert len(errors) == RANDOM_PLACEMENTS
        squares += (sum(errors) / RANDOM_PLACEMENTS) ** 2
    assert found.error["random"] == pytest.approx(math.sqrt(squares) / 3, rel=1e-5)
    assert found.error["random"] > 0
