"""The best trading of a market of regimes: against every plan of small cases, closed forms, and the env itself."""

import itertools
import math

import pytest
import torch
from torchrl.envs import TransformedEnv

from torchrl_perf.envs import OptionMarket, RegimeSettings
from torchrl_perf.envs.market.regime import stationary
from torchrl_perf.systems.options_market import optimum
from torchrl_perf.systems.options_market.evaluation import evaluate, evaluate_informed, kelly_fraction
from torchrl_perf.systems.options_market.optimum import InformedTrader, best_trading
from torchrl_perf.transforms import OptionState

TWO = {"transition": ((0.95, 0.05), (0.1, 0.9)), "mean": (0.002, -0.002), "sigma": (0.01, 0.02)}
SWINGS = {"transition": ((1.0,),), "mean": (0.0,), "sigma": (0.02,), "reversion": (0.4,)}


def plain_growth(mean, sigma, weight):
    """Expected log growth by Gauss and Hermite, another rule than the package's."""
    import numpy as np

    points, shares = np.polynomial.hermite_e.hermegauss(60)
    change = np.exp(mean + sigma * points) - 1
    return float((shares * np.log(np.maximum(1 + weight * change, 1e-3))).sum() / shares.sum())


def every_plan(earned, following, weights, cost):
    """The greatest long-run growth of all plans: a weight for each node and present weight."""
    nodes, count = earned.shape
    states = list(itertools.product(range(nodes), range(count)))
    plans = torch.tensor(list(itertools.product(range(count), repeat=len(states))))  # [P, nodes * count]
    reward = torch.zeros(len(plans), len(states), dtype=torch.float64)
    chain = torch.zeros(len(plans), len(states), len(states), dtype=torch.float64)
    for index, (node, held) in enumerate(states):
        target = plans[:, index]
        for to in range(count):
            chosen, gap = target == to, weights[to] - weights[held]
            traded = abs(gap) / (1 + cost * weights[to] * math.copysign(1.0, gap)) if gap else 0.0
            reward[chosen, index] = earned[node, to] + math.log(1 - cost * traded)
            for after in range(nodes):
                chain[chosen, index, states.index((after, to))] = following[node, after]
    lazy = 0.5 * (chain + torch.eye(len(states), dtype=torch.float64))
    for _ in range(16):
        lazy = lazy @ lazy
    return float((lazy @ reward.unsqueeze(-1)).amax())


@pytest.mark.parametrize("cost", [0.0, 0.001, 0.01, 0.1])
def test_no_plan_of_two_regimes_grows_faster(cost):
    regime = RegimeSettings(**TWO)
    found = best_trading(regime, cost=cost, weights=3)
    weights = [-1.0, 0.0, 1.0]
    earned = torch.tensor(
        [[plain_growth(m, s, w) for w in weights] for m, s in zip(TWO["mean"], TWO["sigma"], strict=True)],
        dtype=torch.float64,
    )
    best = every_plan(earned, torch.tensor(TWO["transition"], dtype=torch.float64), weights, cost)
    assert found.growth == pytest.approx(best, abs=2e-6)
    assert found.growth > 1e-4 or cost == 0.1


def test_no_plan_of_swings_grows_faster():
    found = best_trading(RegimeSettings(**SWINGS), cost=0.005, weights=3, places=3)
    grid = found.gap.tolist()
    assert grid == pytest.approx([-0.1, 0.0, 0.1])  # four deviations of .02 / .8
    edges = [-math.inf, -0.05, 0.05, math.inf]
    below = [[0.5 * (1 + math.erf((edge - 0.6 * x) / 0.02 / math.sqrt(2))) for edge in edges] for x in grid]
    following = torch.tensor([[b - a for a, b in itertools.pairwise(row)] for row in below], dtype=torch.float64)
    weights = [-1.0, 0.0, 1.0]
    earned = torch.tensor([[plain_growth(-0.4 * x, 0.02, w) for w in weights] for x in grid], dtype=torch.float64)
    assert found.growth == pytest.approx(every_plan(earned, following, weights, 0.005), abs=2e-6)


def test_closed_forms():
    # without costs the best weight of each regime, by its share of the time
    regime = RegimeSettings(**TWO)
    found = best_trading(regime, cost=0.0, weights=401)
    assert found.growth == pytest.approx(float((stationary(regime.transition) * found.by_regime).sum()), rel=1e-6)
    # a single regime never needs to trade again: Kelly's growth whatever the costs
    steady = RegimeSettings(transition=((1.0,),), mean=(0.08 - 0.25**2 / 2,), sigma=(0.25,))
    weight = kelly_fraction(0.08, 0.25, 2.0)
    for cost in (0.0, 0.01):
        found = best_trading(steady, cost=cost, max_weight=2.0, weights=401)
        assert found.growth == pytest.approx(plain_growth(0.08 - 0.25**2 / 2, 0.25, weight), rel=0.01)
        flat = int(found.weights.abs().argmin())
        assert float(found.weights[found.target[0, flat]]) == pytest.approx(weight, abs=0.03) or cost > 0


def test_costs_and_bounds():
    regime = RegimeSettings.five()
    growth = [best_trading(regime, cost=cost).growth for cost in (0.0, 0.00155, 0.01, 0.03)]
    assert growth == sorted(growth, reverse=True)
    assert growth[1] == pytest.approx(4.35e-4, rel=0.02)  # of an hour: a third in a month
    assert growth[0] / growth[1] == pytest.approx(1.233, rel=0.02)
    assert growth[3] < 0.3 * growth[1]
    assert best_trading(regime, cost=0.00155, allow_short=False).growth < 0.7 * growth[1]
    # no edge: no trade
    still = RegimeSettings(transition=((0.9, 0.1), (0.1, 0.9)), mean=(-5e-7, -5e-5), sigma=(0.001, 0.01))
    found = best_trading(still, cost=0.001)
    flat = int(found.weights.abs().argmin())
    assert found.growth == pytest.approx(0.0, abs=1e-8)
    assert (found.target[:, flat] == flat).all()


def test_a_trader_who_sees_the_regime_reaches_it():
    regime = RegimeSettings.five()
    env = OptionMarket(768, regime=regime, dead_band=0.2, window=1, max_episode_steps=200)
    found = best_trading(regime, cost=env.settings.cost)
    with_options = TransformedEnv(env, OptionState(2))
    figures, _ = evaluate(InformedTrader(env, found), with_options, seed=3)
    assert evaluate_informed(with_options, seed=3) == figures
    assert figures.growth == pytest.approx(200 * found.growth, abs=3 * figures.growth_error)
    assert figures.growth > 20 * figures.growth_error
    assert figures.growth > figures.buy_and_hold + 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": 1.0}, r"cost: expected a number in \[0, 1 / max_weight\), received 1.0"),
        ({"cost": 0.6, "max_weight": 2.0}, "received 0.6 with max_weight=2.0"),
        ({"cost": 0.0, "weights": 4}, "weights: expected an odd number >= 3, received 4"),
        ({"cost": 0.0, "weights": 1, "allow_short": False}, "weights: expected a number >= 2, received 1"),
        ({"cost": 0.0, "places": 2}, "places: expected a number >= 3, received 2"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        best_trading(RegimeSettings(), **options)


def test_other_markets_and_a_growth_that_does_not_settle(monkeypatch):
    best = best_trading(RegimeSettings(), cost=0.0)
    for env in (OptionMarket(2, semantics="rules"), OptionMarket(2, prices=torch.rand(900) + 1)):
        with pytest.raises(ValueError, match=r"env: expected synthetic prices and semantics='target', received"):
            InformedTrader(env, best)
    with pytest.raises(ValueError, match=r"best: expected weights up to max_weight = 2\.0, received 1\.0"):
        InformedTrader(OptionMarket(2, max_weight=2.0), best)
    monkeypatch.setattr(optimum, "MOST_ROUNDS", 3)
    with pytest.raises(RuntimeError, match=r"expected growth that settles, received .* after 3 rounds"):
        best_trading(RegimeSettings.five(), cost=0.001)
