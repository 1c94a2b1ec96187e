"""The example on trading trains, compares, draws a picture and says what it means."""

import ast
import gzip
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from torchrl_perf.systems.options_market.evaluation import MEANING

PATH = Path(__file__).resolve().parents[2] / "examples" / "options_trading.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_options_trading", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("task", ["OptionMarketKelly", "OptionMarketZeroEdge"])
def test_it_trains_and_draws(example, tmp_path, capsys, task):
    picture = tmp_path / "equity.png"
    example.main(example.Config(task=task, total_steps=8192, log_interval=100, picture=picture, device="cpu"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-len(MEANING) :] == list(MEANING)
    assert lines[0].lstrip().startswith("8,192 steps   weight ")
    assert lines[1].startswith("mean weight ")
    assert "buy and hold" in lines[2]
    assert lines[3] == f"picture: {picture}"
    assert picture.stat().st_size > 10_000


def test_it_compares_with_the_best_growth(example, tmp_path, capsys):
    picture = tmp_path / "equity.png"
    example.main(example.Config(task="OptionMarket", total_steps=8192, log_interval=9, picture=picture, device="cpu"))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("% of the growth of the best trader, who sees the regimes") for line in lines)
    assert picture.stat().st_size > 10_000


def test_it_walks_forward(example, tmp_path, capsys):
    closes = (0.01 * torch.randn(520, generator=torch.Generator().manual_seed(0))).cumsum(0).exp()
    days = [f"{2000 + i // 336}-{1 + i % 336 // 28:02d}-{1 + i % 28:02d}" for i in range(520)]
    rows = [f"{day},{float(close)}" for day, close in zip(days, closes, strict=True)]
    file = tmp_path / "closes.csv.gz"
    file.write_bytes(gzip.compress("\n".join(["Date,SP500", *rows]).encode()))
    windows = {"train_bars": 400, "test_bars": 100, "folds": 1, "total_steps": 512}
    example.main(example.Config(prices=str(file), **windows, picture=tmp_path / "walk.png", device="cpu"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{days[400]} to {days[499]}: log growth ")
    assert lines[2].startswith("1 tests: log growth ")
    assert len(list((tmp_path / "walk").glob("*.png"))) == 1


def test_reading_order_and_settings():
    assert len(PATH.read_text(encoding="utf-8").splitlines()) < 120
    tree = ast.parse(PATH.read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert names == ["Config", "settings_of", "learn", "walk", "main"]
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    for field, text in zip(config.body, config.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), f"{field.target.id} has no help line"
