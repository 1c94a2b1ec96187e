"""``torchrl-perf envs``: what it lists, and what each env is said to need."""

import importlib.util

import pytest
from named_envs import Corridor

from torchrl_perf.cli import main
from torchrl_perf.cli.envs import rows
from torchrl_perf.envs import registry
from torchrl_perf.registry import TASKS


@pytest.fixture
def absent(monkeypatch):
    """No optional package is there."""
    find = importlib.util.find_spec
    gone = ("mujoco", "ale_py", "vmas", "Box2D", "jax")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name in gone else find(name, *args))


def test_tasks_come_first_each_with_a_sentence(capsys):
    assert main(["envs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert list(found)[: len(TASKS)] == list(TASKS)
    assert found["CartPole"].endswith("by pushing it left (0) or right (1).")
    assert "HalfCheetah-v5" in found
    assert "HalfCheetah-v4" not in found
    assert lines[-1].startswith("A name for it: torchrl_perf.envs.register")


def test_what_absent_packages_would_need(absent):
    needs = {row.name: row.needs for row in rows()}
    assert needs["HalfCheetah-v5"] == "pip install 'torchrl_perf[mujoco]'"
    assert needs["ALE/GAME-v5"] == "pip install 'torchrl_perf[atari]'"
    assert needs["vmas:SCENARIO"] == "pip install 'torchrl_perf[marl]'"
    assert "gymnasium[box2d]" in needs["LunarLander-v3"]
    assert needs["CartPole-v1"] == needs["CartPole"] == ""


def test_a_word_finds_names_and_older_versions(capsys):
    assert main(["envs", "halfcheetah"]) == 0
    text = capsys.readouterr().out
    assert "HalfCheetah-v4" in text
    assert "CartPole" not in text.split("An env of your own")[0]


def test_a_registered_env(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})
    registry.register("Hall", Corridor, about="Walk right.", needs="pip install hall")
    (row,) = [row for row in rows() if row.name == "Hall"]
    assert row == ("Hall", "registered", "Walk right.", "pip install hall")


def test_a_word_that_no_env_has(capsys):
    assert main(["envs", "cartpoool"]) == 1
    assert "received 'cartpoool'. Remedy: torchrl-perf envs CartPole" in capsys.readouterr().out
