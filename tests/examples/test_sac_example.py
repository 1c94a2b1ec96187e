"""The SAC example learns on a CPU, in the order that its header says, from the file as a user runs it."""

import ast
import importlib.util
import math
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "sac.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_sac", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_gets_better_than_200(example, capsys):
    mean_return = example.main(example.Config(device="cpu"))
    assert mean_return > -200
    assert capsys.readouterr().out.splitlines()[-1] == f"mean return of the last 100 episodes: {mean_return:.1f}"


@pytest.mark.slow
def test_same_seed_same_result(example):
    settings = {"num_envs": 4, "total_steps": 1_000, "random_steps": 100, "minibatch_size": 32, "hidden_size": 8}
    results = [example.main(example.Config(**settings, seed=seed, device="cpu")) for seed in (0, 0, 1)]
    assert results[0] == results[1] != results[2]
    assert math.isfinite(results[0])


@pytest.mark.gpu
def test_captured_on_a_gpu(example):
    assert math.isfinite(example.main(example.Config(total_steps=8_000, device="cuda")))


def test_reading_order_and_settings():
    tree = ast.parse(PATH.read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert names == ["Config", "make_env", "make_actor_critic", "make_collector", "make_loss", "main"]
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    for field, text in zip(config.body, config.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), f"{field.target.id} has no help line"
