"""The example on latent dynamics trains, prints its results, and draws both pictures."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "active_dynamics.py"
TINY = {"num_envs": 2, "total_steps": 100, "log_interval": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_active_dynamics", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("inputs", ["embedding", "disagreement"])
def test_it_trains_and_draws(example, tmp_path, capsys, inputs):
    r2 = example.main(example.Config(**TINY, inputs=inputs, compare=inputs == "embedding", folder=tmp_path))
    *rows, said, drawn = capsys.readouterr().out.splitlines()
    assert len(rows) == (5 if inputs == "embedding" else 2)
    assert said.startswith(f"limit_cycle, {inputs}: R^2 10 steps ahead {r2:.3f} (persistence")
    assert drawn == f"pictures: {tmp_path / 'phase_portrait.png'}, {tmp_path / 'prediction_error.png'}"
    assert all(path.stat().st_size > 5_000 for path in tmp_path.iterdir()) and len(list(tmp_path.iterdir())) == 2


def test_it_is_short_and_in_the_order_of_its_header():
    tree = ast.parse(PATH.read_text(encoding="utf-8"))
    assert len(PATH.read_text(encoding="utf-8").splitlines()) < 120
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert names == ["Config", "make_trainer", "learn", "main"]
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    for field, text in zip(config.body, config.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), f"{field.target.id} has no help line"
