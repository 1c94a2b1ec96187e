"""examples/dqn.py learns, repeats itself, and reads in the order that its header gives."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "dqn.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_dqn", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_it_learns_and_prints_its_last_line(example, capsys):
    mean_return = example.main(example.Config(total_steps=15_000, eps_frames=5_000, device="cpu"))
    assert mean_return >= 50  # a random policy gets 22
    assert capsys.readouterr().out.splitlines()[-1] == f"mean return of the last 100 episodes: {mean_return:.1f}"


@pytest.mark.gpu
def test_it_learns_captured(example):
    assert example.main(example.Config(device="cuda")) >= 400


def test_same_seed_same_result(example):
    config = example.Config(num_steps=8, total_steps=2_048, updates=2, device="cpu")
    assert example.main(config) == example.main(config)


def test_reading_order(example):
    names = [node.name for node in ast.parse(PATH.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    order = re.search(r"Read it from top to bottom: ([\w, ]+)\.", " ".join(example.__doc__.split())).group(1)
    assert names == order.split(", ")
