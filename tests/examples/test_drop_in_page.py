"""docs/drop_in.md: its steps run one after the other, and change the lines that the benchmark counts."""

import re
from pathlib import Path

import pytest
import torch

from torchrl_perf.bench.dropin import LINES_OF_GRAPH
from torchrl_perf.bench.dropin_loops import PPOLoop

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "drop_in.md").read_text(encoding="utf-8")
STEP = re.compile(r"^## (Step \d).*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SIZES = "frames, total = 4096, 204_800"


def steps() -> dict[str, str]:
    """The snippets of the page by step."""
    return dict(STEP.findall(PAGE))


def lines_of(code: str) -> list[str]:
    """The lines of a snippet that do something, imports apart."""
    lines = [line.strip() for line in code.splitlines()]
    return [line for line in lines if line and not line.startswith(("from ", "import ", "#"))]


@pytest.fixture(scope="module")
def names():
    """The variables of each step after it, from a run of few frames."""
    torch.manual_seed(0)
    scope, kept = {}, {}
    for title, code in steps().items():
        assert (SIZES in code) == (title == "Step 0")
        exec(compile(code.replace(SIZES, "frames, total = 1024, 2048"), f"docs/drop_in.md, {title}", "exec"), scope)
        kept[title] = dict(scope)
    return kept


def ours(value) -> bool:
    return type(value).__module__.startswith("torchrl_perf")


def test_each_step_replaces_what_it_says(names):
    parts = ("collector", "advantage", "loss", "buffer", "optimizer")
    found = {title: [name for name in parts if ours(scope[name])] for title, scope in names.items()}
    assert found["Step 0"] == []
    assert found["Step 1"] == ["collector"]
    assert found["Step 2"] == ["collector", "advantage", "loss"]
    assert found["Step 3"] == list(parts)


def test_the_graph_and_the_trainer_learn_from_every_frame(names):
    scope = names["Step 4"]
    assert scope["step"].calls == 2
    assert int(scope["collector"].frames) == 2048
    assert names["Step 5"]["config"].iterations == 1


def test_the_settings_are_those_of_the_benchmark():
    default, code = PPOLoop.default, steps()
    assert f"frames, total = {default.frames_per_batch}, {default.total_frames:_}" == SIZES
    assert f"CartPole({default.num_envs}," in code["Step 0"]
    assert f"range({PPOLoop.epochs})" in code["Step 0"]
    assert f"batch_size={default.batch_size}" in code["Step 0"]
    assert f"epochs={PPOLoop.epochs}, parts={default.updates // PPOLoop.epochs}" in code["Step 4"]
    assert f"first {default.first_frames:,} frames" in PAGE


def test_the_graph_changes_as_many_lines_as_the_benchmark_counts():
    script = lines_of(steps()["Step 0"])
    new = [line for line in lines_of(steps()["Step 4"]) if line not in script]
    assert new[0].startswith("collector = ")  # counted as a part
    assert len(new) - 1 == LINES_OF_GRAPH
