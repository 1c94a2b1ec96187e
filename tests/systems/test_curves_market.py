"""Figures of a trader on prices that it has not learnt from."""

import pytest
import torch
from states import run
from trading_runs import make

# imported before the patch below, which a module that is first imported meanwhile would keep
import torchrl_perf.systems.options_market.evaluation  # noqa: F401
from torchrl_perf.bench import curves_market
from torchrl_perf.systems.options_market.networks import make_market
from torchrl_perf.systems.options_market.optimum import InformedTrader, best_trading
from torchrl_perf.systems.options_market.picture import EquityRecording

FIVE = {"market": "five_regimes", "sentiment_correlation": 0.98, "semantics": "target", "window": 1}
FIVE |= {"max_episode_steps": 60, "dead_band": 0.2}
PLAIN = {"options": "none", "max_option_share": 0.5, "min_options_used": 3, "option_capacity": 2_000}
SEEDS = curves_market.PRICE_SEEDS


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(curves_market, "PRICE_SEEDS", (5, 6))
    monkeypatch.setattr(curves_market, "PATHS", 8)
    curves_market._best_of.cache_clear()
    yield
    curves_market._best_of.cache_clear()


def test_the_best_trader_has_all_of_its_own_growth():
    trainer = run(make(**FIVE, **PLAIN), 1)
    made = []

    def market_of(config, device, *, options=None, **arguments):
        market = make_market(config, device, **arguments)
        best = best_trading(market.settings.regime, cost=market.settings.cost)
        # it reads the state of the env that it trades in
        trainer.policy.forward = InformedTrader(market, best)
        made.append(arguments)
        return market

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrl_perf.systems.options_market.networks.make_options_market_env", market_of)
        found = curves_market.unseen_prices(trainer, "plain")
    assert made == [{"num_envs": 8, "seed": 5}, {"num_envs": 8, "seed": 6}]
    assert found["trained"]["of_best"] == pytest.approx(1.0)
    assert found["trained"]["least_of_best"] == pytest.approx(1.0)
    assert found["trained"]["most_of_best"] == pytest.approx(1.0)
    assert found["trained"]["prices_at_80"] == 2
    assert found["best"]["growth"] > 0
    assert found["hold"]["of_best"] < 1


@pytest.mark.parametrize("options", [{"options": "positions"}, PLAIN], ids=["options", "plain"])
def test_figures_of_a_trader(options):
    trainer = run(make(**FIVE, **options), 3)
    found = curves_market.unseen_prices(trainer, "run")
    row = found["trained"]
    assert row["least_of_best"] <= row["of_best"] <= row["most_of_best"]
    assert curves_market.unseen_prices(trainer, "run") == found
    assert 0 <= row["prices_won"] <= 2
    if options["options"] == "none":
        assert set(found) == {"trained", "best", "hold"}
        return
    assert set(curves_market.REGIMES) < set(found)
    names = list(trainer.options.names)
    assert sum(row[name] for name in names) == pytest.approx(1.0)
    total = 0.0
    for regime in curves_market.REGIMES:
        parts = found[regime]
        assert sum(parts[name] for name in names) == pytest.approx(parts["of_best"], abs=1e-9)
        total += parts["of_best"]
    assert total == pytest.approx(row["of_best"], rel=1e-3, abs=1e-6)
    assert torch.tensor(total).isfinite()


def test_price_seeds_are_ten_and_their_prices_differ():
    assert len(set(SEEDS)) == len(SEEDS) == 10
    trainer = run(make(**FIVE, **PLAIN), 1)
    growth, held = curves_market._others(trainer.config, "cpu")
    assert growth[0] != growth[1]
    assert held[0] != held[1]


def test_recordings_of_several_sets_are_joined():
    def recording(rows, steps, length):
        series = torch.arange(1.0, length + 2, dtype=torch.float64).expand(rows, -1).contiguous()
        flags = torch.zeros(rows, length, dtype=torch.int64)
        return EquityRecording(
            series, series, series, series[:, 1:], flags, torch.full((rows,), steps), 0.001, regime=flags
        )

    both = curves_market._joined([recording(2, 3, 3), recording(1, 5, 5)])
    assert both.steps.tolist() == [3, 3, 5]
    assert both.equity[0].tolist() == [1, 2, 3, 4, 4, 4]
    assert both.cost[0].tolist() == [2, 3, 4, 0, 0]
    assert both.option[0].tolist() == both.regime[0].tolist() == [0, 0, 0, -1, -1]
    assert both.equity[2].tolist() == [1, 2, 3, 4, 5, 6]
