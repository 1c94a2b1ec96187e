"""The VMAS example runs from the file as a user runs it, and its agents learn where to go."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("vmas", reason="needs the extra 'marl'")

PATH = Path(__file__).resolve().parents[2] / "examples" / "vmas_navigation.py"
# VMAS depends on gym, which says that it is unmaintained; and its step waits for the host
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_vmas_navigation", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_short_run(example, capsys):
    settings = {"num_envs": 4, "num_steps": 10, "max_steps": 10, "total_steps": 80, "hidden_size": 8, "parts": 2}
    mean_return = example.main(example.Config(**settings, num_agents=2))
    assert math.isfinite(mean_return)
    assert capsys.readouterr().out.splitlines()[-1] == f"mean return of the last 100 episodes: {mean_return:.1f}"


@pytest.mark.slow
def test_it_learns(example):
    assert example.main(example.Config(total_steps=64_000)) > 1.5
