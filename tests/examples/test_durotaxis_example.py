"""The example on colonies trains, prints its results, and draws a picture."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "durotaxis.py"
TINY = {"num_envs": 8, "num_steps": 8, "total_steps": 640, "critical_nodes": 12, "size": 60.0, "device": "cpu"}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_durotaxis", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("per_node", [False, True])
def test_it_trains_and_draws(example, tmp_path, capsys, per_node):
    picture = tmp_path / "colony.png"
    success = example.main(example.Config(**TINY, per_node=per_node, picture=picture))
    *rows, said, drawn = capsys.readouterr().out.splitlines()
    assert len(rows) == 1
    assert said == f"success of the last 100 episodes: {success:.0%}"
    assert drawn == f"picture: {picture}"
    assert picture.stat().st_size > 10_000


def test_same_seed_same_result(example):
    rows = []
    for seed in (0, 0, 1):
        trainer = example.make_trainer(example.Config(**TINY, seed=seed))
        example.learn(trainer, 100)
        rows.append([param.sum().item() for param in trainer.actor.parameters()])
        trainer.close()
    assert rows[0] == rows[1] != rows[2]


def test_reading_order_and_settings():
    tree = ast.parse(PATH.read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert names == ["Config", "make_trainer", "learn", "draw", "main"]
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    for field, text in zip(config.body, config.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), f"{field.target.id} has no help line"


@pytest.mark.slow
def test_it_reaches_nine_of_ten(example, tmp_path):
    assert example.main(example.Config(device="cpu", picture=tmp_path / "colony.png")) >= 0.9
