"""What a walk forward over real prices leaves, and the study of it."""

import json
import math

import pytest
from trading_runs import EXPOSURE, SMALL, write_prices

from torchrl_perf.bench import curves_walk
from torchrl_perf.bench.curves import main, one_run
from torchrl_perf.bench.curves_studies import STUDIES, Run
from torchrl_perf.systems.options_market import OptionsMarketConfig


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(curves_walk, "TRAIN_BARS", 80)
    monkeypatch.setattr(curves_walk, "TEST_BARS", 20)
    prices = {"market": "recorded", "prices_file": str(write_prices(tmp_path / "prices.csv.gz", bars=125))}
    return OptionsMarketConfig.without_task(**{**SMALL, **EXPOSURE, **prices, "total_steps": 64})


def test_all_tests_together(config):
    found = curves_walk.walked(config)
    own, held = found["evaluation"]["trained"], found["evaluation"]["hold"]
    tests = [figures for who, figures in found["evaluation"].items() if who.startswith("to 2001-")]
    assert own["tests"] == len(tests) == 2
    assert found["steps"] == 2 * 64
    assert own["growth"] == pytest.approx(sum(one["growth"] for one in tests))
    assert held["growth"] == pytest.approx(sum(one["held"] for one in tests))
    assert own["growth_a_year"] == pytest.approx(own["growth"] / (40 / 252))
    assert own["won"] == sum(one["growth"] > max(one["held"], 0.0) for one in tests)
    assert own["costs"] > 0
    for name, total in (("growth", own), ("hold", held)):
        curve = found["curves"][name]
        assert curve["step"] == [0, 20, 40]
        assert (curve["value"][0], curve["value"][-1]) == (0.0, pytest.approx(total["growth"]))
        assert all(math.isfinite(value) for value in curve["value"])


def test_the_study_stores_and_draws_it(config, tmp_path, monkeypatch, capsys):
    study = STUDIES["sp500"]
    monkeypatch.setattr(Run, "config", lambda self, seed, **changes: config)
    options = ["--out", str(tmp_path), "--pictures", str(tmp_path), "--device", "cpu", "--study", "sp500"]
    assert main([*options, "--seeds", "3"]) == 0
    row = json.loads((tmp_path / "sp500_options_3.json").read_text())["rows"][0]
    assert (row["run"], row["seed"], row["steps"]) == ("options", 3, 128)
    assert set(study.figures) <= set(row["evaluation"]["trained"])
    assert (tmp_path / "curve_sp500.png").stat().st_size > 10_000
    assert "hold" in capsys.readouterr().out
    again = one_run(study, "options", 3, type("", (), {"total_steps": None, "device": "cpu"}))
    assert again["evaluation"] == row["evaluation"]


def test_the_study_has_five_seeds_of_its_own():
    assert len(STUDIES["sp500"].seeds) == 5
    run = STUDIES["sp500"].runs["options"]
    assert run.config(30, device="cpu").market == "recorded"
    assert run.config(30, device="cpu").option_capacity >= 512
