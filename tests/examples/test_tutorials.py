"""docs/tutorials/, docs/zoo.md, README.md and the front page: their snippets and commands run in order, as they are.

A fence ``python title="name.py"`` is a file that later fences import; a fence ``bash`` holds commands, of which those
of ``torchrl-perf`` run.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from torchrl_perf.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page for page in (ROOT / "docs" / "tutorials").glob("*.md") if "```" in page.read_text(encoding="utf-8"))
PAGES.append(ROOT / "docs" / "zoo.md")
SLOW = ("gymnasium",)
FENCE = re.compile(r'^```(python|bash)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FIRST_LOOK = re.compile(r"<!-- first-look -->\n```python\n(.*?)^```\n<!-- /first-look -->", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder that modules are imported from, and that they leave again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def run_fences(page: Path, folder: Path) -> dict[str, object]:
    """Run a page; the variables of its snippets."""
    torch.manual_seed(0)
    scope: dict[str, object] = {"__name__": page.stem}
    for language, title, code in FENCE.findall(page.read_text(encoding="utf-8")):
        if title:
            (folder / title).write_text(code, encoding="utf-8")
        elif language == "python":
            exec(compile(code, f"{page.name}: {code.splitlines()[0]}", "exec"), scope)
        else:
            for line in code.splitlines():
                if line.startswith("torchrl-perf "):
                    assert main(shlex.split(line, comments=True)[1:]) == 0, line
    return scope


def marked(page):
    """A page as an argument of a test; slow where it trains, evaluates and exports."""
    return pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else [])


@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_a_tutorial_runs(page, folder, capsys):
    if "torchrl-perf export" in page.read_text(encoding="utf-8"):
        pytest.importorskip("onnxruntime", reason="of the extra export")
    scope = run_fences(page, folder)
    said = capsys.readouterr()
    check = CHECKS.get(page.stem)
    if check is not None:
        check(scope, folder, said.out + said.err)


def learnt(scope, folder, said):
    """The corridor is learnt within the run of the page."""
    assert scope["result"].mean_return > -2.0
    assert scope["result"].run_dir == Path("runs/ppo-Corridor-0-2")  # the command made the first one
    assert "mean return" in said


def logged(scope, folder, said):
    assert len(scope["rows"]) == 2
    assert list((folder / "runs" / "ppo-CartPole-0" / "tensorboard").iterdir())
    assert scope["row"]["return"] == 5.0


def resumed(scope, folder, said):
    rows = (folder / "runs" / "ppo-CartPole-0" / "progress.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in rows[1:]] == [f"{4096 * count}" for count in range(1, 7)]


def drawn(scope, folder, said):
    assert scope["rows"].batch_size == torch.Size([256])
    assert {"index", "priority_weight", "steps_to_next_obs", "gamma"} <= set(scope["rows"].keys())


def shared(scope, folder, said):
    assert scope["env"].batch_size[0] == 8 * scope["env"].num_agents


def counted(scope, folder, said):
    assert [row.count for row in scope["report"].rows] == [1]
    assert "slow.py:11" in said
    assert "slow.py:12" in said


def exported(scope, folder, said):
    """A new user's four commands: the policy is trained, evaluated and exported."""
    run = folder / "runs" / "sac-Thermostat-0"
    assert (run / "policy.onnx").stat().st_size > 0
    assert "mean return" in said


def used(scope, folder, said):
    run = folder / "runs" / "ppo-CartPole-0"
    assert (run / "play.gif").is_file()
    assert (run / "policy.onnx").is_file()
    assert (folder / "comparison.png").is_file()
    assert scope["rows"]["action"].shape == (5,)


CHECKS = {
    "gymnasium": exported,
    "use_policy": used,
    "own_env": learnt,
    "logging": logged,
    "resume": resumed,
    "replay": drawn,
    "multi_agent": shared,
    "host_waits": counted,
}


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_look_runs_and_is_the_same_everywhere(page):
    readme = FIRST_LOOK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    here = FIRST_LOOK.search((ROOT / page).read_text(encoding="utf-8"))
    assert here is not None
    assert here[1] == readme[1]
    if page == "README.md":
        scope = {}
        exec(compile(here[1], page, "exec"), scope)
        assert {"index", "priority_weight", "steps_to_next_obs", "gamma", "next"} <= set(scope["rows"].keys())
        assert scope["rows"].batch_size == torch.Size([256])


def test_the_picture_comes_before_any_table():
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert 0 < text.index("![") < text.index("\n| ")
        assert text.index("```bash") < text.index("\n| ")
        assert text.index("```python") < text.index("\n| ")
