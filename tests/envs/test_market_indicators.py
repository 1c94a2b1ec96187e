"""Indicators from bar to bar against whole series and plain formulas; facts of the synthetic price."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from market_twin import plain_row

from torchrl_perf.envs import MarketSettings, OptionMarket, RegimeSettings
from torchrl_perf.envs.market.indicators import (
    FEATURES,
    LOOKBACK,
    indicator_row,
    series_averages,
    series_paths,
    update_averages,
    update_path,
)
from torchrl_perf.envs.market.regime import RegimeMarket, next_regime, stationary

F64 = torch.float64


def whole(closes, bars_per_week=168):
    """Rows of the bars from the 24th on."""
    logs = closes.log()
    returns = torch.cat((torch.zeros_like(logs[..., :1]), logs.diff()), -1)
    clock = torch.arange(closes.shape[-1]).expand(closes.shape)
    averages = series_averages(returns)[..., LOOKBACK - 1 :, :]
    return indicator_row(series_paths(logs), averages, clock[..., LOOKBACK - 1 :], bars_per_week)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sigma=st.sampled_from([1e-5, 1e-3, 0.05]),
    level=st.sampled_from([1e-4, 1.0, 1e6]),
    drift=st.sampled_from([-0.01, 0.0, 0.01]),
)
def test_whole_series_equal_plain_formulas(seed, sigma, level, drift):
    returns = drift + sigma * torch.randn(60, dtype=F64, generator=torch.Generator().manual_seed(seed))
    closes = level * returns.cumsum(0).exp()
    rows = whole(closes, 24)
    for bar in (23, 24, 37, 59):
        expected = torch.tensor(plain_row(closes[: bar + 1].tolist(), bar, 24), dtype=F64)
        torch.testing.assert_close(rows[bar - LOOKBACK + 1], expected, rtol=1e-6, atol=1e-9)


def test_bar_by_bar_equals_whole_series():
    returns = 0.02 * torch.randn(4, 150, dtype=F64)
    returns[:, 0] = 0.0
    logs = returns.cumsum(-1)
    averages = series_averages(returns)
    path, carried = series_paths(logs)[:, 16], averages[:, 39]
    for bar in range(40, 150):
        path = update_path(path, returns[:, bar])
        carried = update_averages(carried, returns[:, bar])
    torch.testing.assert_close(carried, averages[:, -1], rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(path, series_paths(logs)[:, -1], rtol=0, atol=1e-14)
    assert not path[:, -1].any()


def test_a_ramp_by_hand():
    # 1 more each bar, from 1 to 60
    closes = torch.arange(1.0, 61.0, dtype=F64)
    row = dict(zip(FEATURES, whole(closes)[-1].tolist(), strict=True))
    assert row["sma10_gap"] == pytest.approx(100 * (60 / 55.5 - 1))
    assert row["sma20_gap"] == pytest.approx(100 * (60 / 50.5 - 1))
    assert row["sma_divergence"] == pytest.approx(100 * (55.5 / 50.5 - 1))
    assert row["rsi14"] == 1.0
    assert row["atr14"] == pytest.approx(100 / 60)
    assert row["band_width"] == pytest.approx(100 * 4 * math.sqrt(399 / 12) / 50.5)
    assert row["band_position"] == pytest.approx(9.5 / (2 * math.sqrt(399 / 12)))
    assert row["efficiency_20"] == pytest.approx(1.0)
    assert row["below_high_24"] == 0.0
    assert row["above_low_24"] == pytest.approx(100 * (60 / 37 - 1))
    assert row["return_5"] == pytest.approx(100 * math.log(60 / 55))
    # an EMA lags a ramp by (1 - a) / a bars, 5.5 and 12.5, and the signal follows
    assert row["macd"] == pytest.approx(100 * 7 / 60, rel=0.02)
    assert row["macd_histogram"] == pytest.approx(0.0, abs=0.3)
    assert row["week_sin"] == pytest.approx(math.sin(2 * math.pi * 59 / 168))


def test_constant_prices():
    row = dict(zip(FEATURES, whole(torch.full((50,), 3.7, dtype=F64))[-1].tolist(), strict=True))
    assert row.pop("rsi14") == 0.5
    assert not any(value for name, value in row.items() if not name.startswith("week"))


def test_float32_does_not_wear_out():
    market = {dtype: RegimeMarket(8, MarketSettings(), dtype, torch.device("cpu")) for dtype in (torch.float32, F64)}
    state, price = market[F64].draw()
    low = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    low_price = price.float()
    for _ in range(3000):
        normal, uniform = torch.randn(2, 8), torch.rand(8)
        low, low_price = market[torch.float32].step(low, low_price, normal, uniform)
        state, price = market[F64].step(state, price, normal.double(), uniform.double())
    torch.testing.assert_close(low["window"].double(), state["window"], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(low_price.double(), price, rtol=1e-3, atol=0)


# -- the synthetic price ----------------------------------------------------------------------------------------------


def simulated(settings, rows, bars):
    """Returns and sentiment scores [bars, rows] without the indicators; the score precedes the return it knows of."""
    market = RegimeMarket(rows, MarketSettings(regime=settings, window=1), F64, torch.device("cpu"))
    state, _ = market.draw()
    regime, noise = state["regime"], state["noise"]
    returns, scores = [], []
    for _ in range(bars):
        normal = torch.randn(2, rows, dtype=F64)
        scores.append(market.signal({"regime": regime, "noise": noise}))
        returns.append(market.mean[regime] + market.sigma[regime] * normal[0])
        regime = next_regime(regime, market.cumulative, torch.rand(rows, dtype=F64))
        noise = settings.sentiment_decay * noise + (1 - settings.sentiment_decay**2) ** 0.5 * normal[1]
    return torch.stack(returns), torch.stack(scores)


def correlation(left, right):
    left, right = left - left.mean(), right - right.mean()
    return float((left * right).mean() / (left.square().mean() * right.square().mean()).sqrt())


def test_stylised_facts():
    returns, _ = simulated(RegimeSettings(), 400, 1000)
    centred = returns - returns.mean()
    kurtosis = float(centred.pow(4).mean() / centred.square().mean().square())
    assert 8.8 < kurtosis < 9.9
    assert abs(correlation(returns[:-1], returns[1:])) < 0.02
    size = returns.abs()
    for lag, expected in ((1, 0.358), (10, 0.282), (100, 0.025)):
        assert correlation(size[:-lag], size[lag:]) == pytest.approx(expected, abs=0.035)


def test_shares_of_the_regimes():
    shares = stationary(RegimeSettings().transition)
    assert shares.tolist() == pytest.approx([0.8, 0.2])
    assert stationary(((1.0,),)).tolist() == [1.0]
    assert stationary(((0.0, 1.0), (1.0, 0.0))).tolist() == pytest.approx([0.5, 0.5])
    market = RegimeMarket(20000, MarketSettings(window=1), F64, torch.device("cpu"))
    state, _ = market.draw()
    assert float(state["regime"].double().mean()) == pytest.approx(0.2, abs=0.012)
    assert (state["clock"] >= 0).all() and (state["clock"] < 168).all()


def test_three_regimes_follow_their_transition():
    rows = ((0.5, 0.3, 0.2), (0.1, 0.8, 0.1), (0.25, 0.25, 0.5))
    cumulative = torch.tensor(rows).cumsum(-1)[:, :-1]
    for start, row in enumerate(rows):
        following = next_regime(torch.full((40000,), start), cumulative, torch.rand(40000))
        shares = (following.unsqueeze(-1) == torch.arange(3)).double().mean(0)
        assert shares.tolist() == pytest.approx(row, abs=0.012)


@pytest.mark.parametrize("known", [0.0, 0.7])
def test_sentiment_knows_what_it_is_told(known):
    settings = RegimeSettings(sentiment_correlation=known, mean=(4e-4, -1e-3))
    returns, scores = simulated(settings, 300, 600)
    assert float(scores.std()) == pytest.approx(1.0, abs=0.06)
    ahead, behind = correlation(scores, returns), correlation(scores[1:], returns[:-1])
    if known:
        assert ahead > 0.15 and ahead > behind
    else:
        assert abs(ahead) < 0.02
        assert correlation(scores[:-1], scores[1:]) == pytest.approx(0.9, abs=0.02)
        uniform = torch.special.ndtr(scores)
        quantiles = torch.quantile(uniform.flatten()[::7], torch.tensor([0.1, 0.5, 0.9], dtype=F64))
        assert quantiles.tolist() == pytest.approx([0.1, 0.5, 0.9], abs=0.03)


def test_the_env_runs_that_price():
    env = OptionMarket(64, max_episode_steps=None, window=1, dtype=F64, seed=0)
    batch = env.rollout(100, lambda td: td.set("action", torch.zeros(64, 1, dtype=F64)))
    returns = (batch["next", "price"] / batch["price"]).log().squeeze(-1)
    assert float(returns.std()) == pytest.approx(2.312e-6**0.5, rel=0.12)
    technical = batch["next", "observation"][..., FEATURES.index("return_1")] / 100
    torch.testing.assert_close(technical, returns, rtol=0, atol=1e-12)
