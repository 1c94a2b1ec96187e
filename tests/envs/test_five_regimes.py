"""Prices of five regimes: what each does, how long it lasts, what the sentiment tells; and where options may begin."""

import pytest
import torch

from torchrl_perf.envs import OptionMarket, RegimeSettings
from torchrl_perf.envs.market import (
    FIVE_REGIMES,
    OPTION_NAMES,
    PositionRules,
    column_names,
    option_set,
    position_option_set,
    reading,
)
from torchrl_perf.envs.market.regime import stationary


@pytest.fixture(scope="module")
def walked():
    """What 256 markets did in 240 bars, under positions at random: regime, gap, return and sentiment, and options."""
    env = OptionMarket(256, regime=RegimeSettings.five(), window=1, max_episode_steps=None, ruin=0.01, seed=5)
    sets = {"positions": position_option_set(env), "trading": option_set(env)}
    seen = {name: [] for name in ("regime", "gap", "move", "sentiment", *sets)}
    td = env.reset()
    draw = torch.Generator().manual_seed(0)
    for _ in range(240):
        price = td["price"].log().squeeze(-1)
        seen["regime"].append(env.get_buffer("state_regime").clone())
        seen["gap"].append(env.get_buffer("state_gap").clone())
        seen["sentiment"].append(reading(td).sentiment)
        for name, options in sets.items():
            seen[name].append(options.initiation(td))
        td.set("action", torch.randint(-1, 2, (256, 1), generator=draw).float())
        td = env.step(td)["next"]
        seen["move"].append(td["price"].log().squeeze(-1) - price)
    return {name: torch.stack(values, 1) for name, values in seen.items()}


def test_what_each_state_does(walked):
    settings = RegimeSettings.five()
    assert len(FIVE_REGIMES) == len(settings.mean) == 5
    for number, sigma in enumerate(settings.sigma):
        own = walked["regime"] == number
        surprise = walked["move"] - settings.mean[number] + settings.reversion[number] * walked["gap"]
        assert float(surprise[own].std()) == pytest.approx(sigma, rel=0.05)
        assert abs(float(surprise[own].mean())) < 4 * sigma / int(own.sum()) ** 0.5
    shares = torch.bincount(walked["regime"].flatten(), minlength=5) / walked["regime"].numel()
    torch.testing.assert_close(shares.double(), stationary(settings.transition), atol=0.05, rtol=0)


def test_the_gap_is_the_way_since_the_state_began(walked):
    regime, gap, move = walked["regime"], walked["gap"], walked["move"]
    lasts = regime[:, 1:] == regime[:, :-1]
    torch.testing.assert_close(gap[:, 1:][lasts], (gap + move)[:, :-1][lasts], atol=1e-5, rtol=0)
    assert not gap[:, 1:][~lasts].any()
    assert float((~lasts).float().mean()) == pytest.approx(1 / 87, rel=0.15)
    back = regime == FIVE_REGIMES.index("reverting")
    # the stationary deviation of an AR(1) that goes a fifth of the way back at each step
    assert float(gap[back].std()) == pytest.approx(0.004 / (1 - 0.8**2) ** 0.5, rel=0.1)


def test_the_sentiment_tells_the_state(walked):
    means = [float(walked["sentiment"][walked["regime"] == number].mean()) for number in range(5)]
    assert means == pytest.approx([0.93, 0.05, 0.5, 0.61, 0.25], abs=0.03)


@pytest.mark.parametrize("name", ["positions", "trading"])
def test_every_option_may_begin_in_one_bar_of_twenty(walked, name):
    begins = dict(zip(OPTION_NAMES, walked[name].float().mean((0, 1)).tolist(), strict=True))
    # with "trading", meant for two regimes and longs, a purchase of what has fallen needs a neutral sentiment
    least = 0.05 if name == "positions" else 0.005
    assert min(begins.values()) > least, begins
    assert begins["trend"] > 0.15


def test_one_regime_more_and_less():
    assert RegimeSettings.five(sentiment_correlation=0.5).sentiment_correlation == 0.5
    plain = OptionMarket(2)
    assert "gap" not in plain.market.entries
    with pytest.raises(ValueError, match=r"reversion: expected none or K = 2 entries, received \(0.1,\)"):
        RegimeSettings(reversion=(0.1,))
    with pytest.raises(ValueError, match=r"score: expected none or K = 2 entries"):
        RegimeSettings(score=(0.1,))
    with pytest.raises(ValueError, match=r"reversion: expected numbers in \[0, 1\)"):
        RegimeSettings(reversion=(0.1, 1.0))
    # scores tell states of one mean apart
    assert RegimeSettings(mean=(0.0, 0.0), score=(0.0, 1.0), sentiment_correlation=0.5).score == (0.0, 1.0)


def row(**values):
    """A row of the flat observation of one bar, neutral but for the given quantities."""
    td = OptionMarket(1, window=1).observation_spec.zero()
    now = {"sentiment": 0.5, "volatility": 0.01, "divergence": 0.0, "gap": 0.0, "size": 0.0, "age": 1, **values}
    columns, flat = column_names(1), td["observation"]
    ways = {"technical/0/volatility_20": "volatility", "technical/0/sma10_gap": "gap"}
    ways["technical/0/sma_divergence"] = "divergence"
    for column, name in ways.items():
        flat[:, columns.index(column)] = 100 * now[name]
    flat[:, columns.index("regime/sentiment")] = now["sentiment"]
    flat[:, columns.index("position/size")] = now["size"]
    flat[:, columns.index("position/open")] = float(now["size"] != 0)
    return td.set("option_age", torch.tensor([now["age"]]))


BEGINS = {
    "open_long": [({"sentiment": 0.36, "size": 1.0}, True), ({"sentiment": 0.34}, False)],
    "open_short": [({"sentiment": 0.64, "size": -1.0}, True), ({"sentiment": 0.66}, False)],
    "close": [({}, False), ({"size": -0.1}, True)],
    "trend": [
        ({"divergence": 0.0151}, True),
        ({"divergence": 0.0149}, False),
        ({"divergence": 0.0151, "volatility": 0.02}, False),
        ({"divergence": -0.0151, "sentiment": 0.7}, False),
        ({"divergence": 0.0151, "sentiment": 0.7}, True),
    ],
    "scalp": [
        ({"gap": 0.0051}, True),
        ({"gap": -0.0051}, True),
        ({"gap": 0.0049}, False),
        ({"gap": 0.003, "divergence": 0.0025}, True),
        ({"gap": 0.0101, "sentiment": 0.7}, False),
        ({"gap": 0.0101, "volatility": 0.0}, False),
    ],
    "wait": [({"sentiment": level}, True) for level in (0.0, 1.0)],
}
ENDS = {
    "open_long": [({"sentiment": 0.34}, 1.0), ({"age": 20}, 1.0), ({"age": 2}, None)],
    "open_short": [({"sentiment": 0.66}, 1.0), ({"age": 20}, 1.0)],
    "close": [({}, 1.0), ({"size": 0.1, "age": 2}, 1.0), ({"size": 0.1}, None)],
    "trend": [({"divergence": 0.0074}, 0.85), ({"divergence": 0.0076}, None), ({"divergence": 0.02, "age": 50}, 1.0)],
    "scalp": [
        ({"sentiment": 0.76}, 1.0),
        ({"sentiment": 0.24}, 1.0),
        ({"sentiment": 0.74}, None),
        ({"gap": 0.0}, None),
        ({"gap": 0.02, "age": 30}, 1.0),
    ],
    "wait": [({"age": 30}, 1.0), ({"age": 3}, None)],
}


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_rules_of_positions(name):
    options, number = position_option_set(OptionMarket(1, window=1)), OPTION_NAMES.index(name)
    for values, expected in BEGINS[name]:
        assert options.initiation(row(**values))[0, number].item() is expected, values
    for values, expected in ENDS[name]:
        td = row(**values)
        by_time = float(options.termination.hazard(td)[0, number])
        found = float(options.termination(td)[0, number])
        assert found == pytest.approx(by_time if expected is None else expected), values


def test_the_set_of_positions(device):
    env = OptionMarket(3, device=device)
    options = position_option_set(env, PositionRules(trending=0.0))
    assert options.names == OPTION_NAMES
    assert options.action_ranges[0] == (0.0, 1.0)
    td = env.reset().set("option_age", torch.ones(3, dtype=torch.int64, device=device))
    assert options.termination(td).device == env.device
    with pytest.raises(ValueError, match=r"env: expected semantics='target', .* received 'rules'"):
        position_option_set(OptionMarket(1, semantics="rules"))
    with pytest.raises(ValueError, match=r"bearish: expected a number from 0 to 1, received 35"):
        PositionRules(bearish=35)
    with pytest.raises(ValueError, match=r"stretched: expected a number from 0 to inf, received -1"):
        PositionRules(stretched=-1)
