"""The examples learn: each reaches the return that its header promises, on a CPU, from the file as a user runs it."""

import ast
import importlib.util
import re
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


@pytest.mark.parametrize("parts", ["theirs", "ours", "all_ours"])
@pytest.mark.slow
def test_drop_in_learns_before_and_after(capsys, parts):
    example = load("drop_in")
    chosen = {} if parts == "theirs" else {parts: True}
    mean_return = example.main(example.Config(**chosen, total_frames=102_400, device="cpu"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert mean_return >= 200  # a random policy gets 22
    assert last.startswith("torchrl: " if parts == "theirs" else "torchrl_perf: ")


@pytest.mark.parametrize("parts", ["ours", "all_ours"])
def test_drop_in_runs(capsys, parts):
    example = load("drop_in")
    settings = {"num_envs": 8, "frames_per_batch": 256, "total_frames": 512, "epochs": 1, "minibatch_size": 64}
    example.main(example.Config(**{parts: True}, **settings, device="cpu"))
    assert capsys.readouterr().out.splitlines()[-1].startswith("torchrl_perf: ")


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("name", ["drop_in_dqn", "drop_in_sac"])
def test_off_policy_drop_ins_run(capsys, name, ours):
    """In the least number of frames that ends an episode: a pole falls soon, a pendulum swings for 200 steps."""
    example = load(name)
    frames = {"drop_in_dqn": 256, "drop_in_sac": 804}[name]
    settings = {"num_envs": 4, "frames_per_batch": frames, "total_frames": 2 * frames, "updates": 2}
    example.main(example.Config(ours=ours, **settings, batch_size=16, capacity=2048, device="cpu"))
    assert capsys.readouterr().out.splitlines()[-1].startswith("torchrl_perf: " if ours else "torchrl: ")


@pytest.mark.parametrize("name", ["drop_in", "drop_in_dqn", "drop_in_sac"])
def test_drop_in_scripts_change_at_most_five_lines(name):
    """A marked line gives the same name before and after; one that chooses a class stands once."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    made: dict[int, list[tuple[str, str]]] = {}
    for target, value, number in re.findall(r"^ *(?:(\w+) = )?(.*)  # \((\d)\)", text, re.MULTILINE):
        made.setdefault(int(number), []).extend([(target, value)] if target else [])
    assert sorted(made) == [1, 2, 3, 4, 5]
    assert "(1) to (5)" in text
    for lines in made.values():
        assert len({target for target, _ in lines}) == 1
        assert len(lines) == 2 or " if config.ours else " in lines[0][1]


@pytest.mark.parametrize("name", ["ppo", "drop_in", "drop_in_dqn", "drop_in_sac", "ppo_captured"])
def test_imports_are_third_party_or_the_package(name):
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    local = {path.stem for path in EXAMPLES.glob("*.py")}
    assert not {module.partition(".")[0] for module in modules} & local


@pytest.mark.parametrize("name", ["ppo", "drop_in", "drop_in_dqn", "drop_in_sac"])
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
