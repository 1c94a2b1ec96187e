"""examples/marine_navigation.py trains, compares and draws, repeats itself, and reads in the order of its header."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "marine_navigation.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_marine_navigation", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def config_of(example, tmp_path, **options):
    small = {"total_steps": 2_560, "num_scenarios": 3, "folder": tmp_path / "pictures", "device": "cpu"}
    return example.Config(**{**small, **options})


@pytest.mark.slow
def test_it_trains_compares_and_draws(example, tmp_path, capsys):
    figures = example.main(config_of(example, tmp_path))
    *_, scripted, learnt, files = capsys.readouterr().out.splitlines()
    assert scripted.startswith("scripted: 15 vessels: ")  # five in each of three worlds
    assert learnt == f"sac: {figures}"
    picture, animation = map(Path, files.split())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert animation.read_bytes().startswith(b"GIF8")


def test_same_seed_same_result(example, tmp_path):
    first, second, other = (
        example.make_trainer(config_of(example, tmp_path, agent="dqn", total_steps=2_304, seed=seed))
        for seed in (1, 1, 2)
    )
    found = []
    for trainer in (first, second, other):
        example.torch.manual_seed(trainer.config.seed)
        example.train(trainer)
        found.append([p.sum().item() for p in trainer.q_network.parameters()])
    assert found[0] == found[1] != found[2]


def test_every_agent_is_there(example):
    from torchrl_perf.registry import MARINE_AGENTS

    assert set(example.AGENTS) == set(MARINE_AGENTS)


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
