"""Figures of a trader on prices that it has not learnt from."""

import pytest
import torch
from states import run
from trading_runs import make

from torchrl_perf.bench import curves_market
from torchrl_perf.systems.options_market.networks import make_market
from torchrl_perf.systems.options_market.optimum import InformedTrader, best_trading

FIVE = {"market": "five_regimes", "sentiment_correlation": 0.98, "semantics": "target", "window": 1}
FIVE |= {"max_episode_steps": 60, "dead_band": 0.2}
PLAIN = {"options": "none", "max_option_share": 0.5, "min_options_used": 3, "option_capacity": 2_000}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(curves_market, "SETS", 2)
    monkeypatch.setattr(curves_market, "PATHS", 8)
    curves_market._best_of.cache_clear()
    yield
    curves_market._best_of.cache_clear()


def test_the_best_trader_has_all_of_its_own_growth():
    trainer = run(make(**FIVE, **PLAIN), 1)
    market = make_market(trainer.config, "cpu", num_envs=16, seed=curves_market.PRICE_SEED)
    best = best_trading(market.settings.regime, cost=market.settings.cost)
    informed = InformedTrader(market, best)
    # it reads the state of the env that it trades in
    trainer.policy.forward = informed
    curves = curves_market.unseen_prices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrl_perf.systems.options_market.networks.make_options_market_env", lambda *a, **k: market)
        found = curves(trainer, "plain")
    assert found["trained"]["of_best"] == pytest.approx(1.0)
    assert found["trained"]["least_of_best"] == pytest.approx(1.0)
    assert found["best"]["growth"] > 0
    assert found["hold"]["of_best"] < 1


@pytest.mark.parametrize("options", [{"options": "positions"}, PLAIN], ids=["options", "plain"])
def test_figures_of_a_trader(options):
    trainer = run(make(**FIVE, **options), 3)
    found = curves_market.unseen_prices(trainer, "run")
    row = found["trained"]
    assert row["least_of_best"] <= row["of_best"] <= row["most_of_best"]
    assert curves_market.unseen_prices(trainer, "run") == found
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
