"""examples/fuel_breaks.py learns, compares and draws, repeats itself, and reads in the order of its header."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "fuel_breaks.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_fuel_breaks", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def config_of(example, tmp_path, **options):
    small = {"total_steps": 6_400, "fires": 64, "log_interval": 10, "picture": tmp_path / "breaks.png", "device": "cpu"}
    return example.Config(**{**small, **options})


def test_it_learns_compares_and_draws(example, tmp_path, capsys):
    figures = example.main(config_of(example, tmp_path))
    *rows, result, file = capsys.readouterr().out.splitlines()
    assert len(rows) == 2
    assert re.fullmatch(r" +6,400 breaks   burned 0\.\d{3}   epsilon [01]\.\d\d", rows[-1])
    assert result == str(figures)
    assert figures.burned["none"] > figures.burned["random"] > figures.burned["column"]
    assert Path(file.removeprefix("picture: ")).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_same_seed_same_result(example, tmp_path, capsys):
    found = []
    for seed in (1, 1, 2):
        trainer = example.make_trainer(config_of(example, tmp_path, fractal=True, seed=seed))
        for _ in range(trainer.config.fill_iterations + 1):
            trainer.step()
        found.append([float(param.detach().sum()) for param in trainer.q_network.parameters()])
    assert found[0] == found[1] != found[2]


def test_settings_are_documented(example):
    tree = ast.parse(PATH.read_text(encoding="utf-8"))
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    for field, text in zip(config.body, config.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), f"{field.target.id} has no help line"


def test_reading_order(example):
    names = [node.name for node in ast.parse(PATH.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    order = re.search(r"Read it from top to bottom: ([\w, ]+)\.", " ".join(example.__doc__.split())).group(1)
    assert names == order.split(", ")


def test_length():
    assert len(PATH.read_text(encoding="utf-8").splitlines()) < 120
