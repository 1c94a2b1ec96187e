"""The examples learn: each reaches the return that its header promises, on a CPU, from the file as a user runs it."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    """The example as a module, without running it."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_name(request):
    return request.param


@pytest.mark.slow
def test_ppo_reaches_475_and_prints_its_last_line(capsys, device_name):
    example = load("ppo")
    config = example.Config(total_steps=200_000, device=device_name)
    mean_return = example.main(config)
    last = capsys.readouterr().out.splitlines()[-1]
    assert mean_return >= 475
    assert last == f"mean return of the last 100 episodes: {mean_return:.1f}"


@pytest.mark.parametrize(
    ("iterations", "least"), [(8, 40), pytest.param(45, 400, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_captured_iteration_learns(capsys, iterations, least):
    mean_return = load("ppo_captured").main(iterations=iterations)
    assert mean_return >= least  # a random policy gets 22
    assert capsys.readouterr().out.splitlines()[-1] == f"mean return of the last 100 episodes: {mean_return:.1f}"


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.slow
def test_drop_in_learns_before_and_after(capsys, ours):
    example = load("drop_in")
    mean_return = example.main(example.Config(ours=ours, total_frames=102_400, device="cpu"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert mean_return >= 200  # a random policy gets 22
    assert last.startswith("torchrl_perf: " if ours else "torchrl: ")


def test_drop_in_changes_three_lines():
    source = (EXAMPLES / "drop_in.py").read_text(encoding="utf-8")
    branch = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "config.ours"
    )
    assert len(branch.body) == len(branch.orelse) == 3
    targets = [[ast.unparse(line.targets[0]) for line in lines] for lines in (branch.body, branch.orelse)]
    assert targets[0] == targets[1] == ["collector", "advantage", "loss"]


@pytest.mark.parametrize("name", ["ppo", "drop_in", "ppo_captured"])
def test_imports_are_third_party_or_the_package(name):
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    local = {path.stem for path in EXAMPLES.glob("*.py")}
    assert not {module.partition(".")[0] for module in modules} & local


@pytest.mark.parametrize("name", ["ppo", "drop_in"])
def test_settings_are_documented(name):
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config")
    for field, text in zip(config.body, config.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), f"{field.target.id} has no help line"


def test_reading_order():
    tree = ast.parse((EXAMPLES / "ppo.py").read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert names == ["Config", "make_env", "make_actor_critic", "make_loss", "optimize", "main"]


def test_same_seed_same_result(capsys):
    example = load("ppo")
    config = example.Config(num_envs=8, num_steps=8, total_steps=640, device="cpu")
    first, second = example.main(config), example.main(config)
    other = example.main(example.Config(num_envs=8, num_steps=8, total_steps=640, seed=1, device="cpu"))
    assert first == second != other
    assert torch.isfinite(torch.tensor(first))
