"""``torchrl-perf zoo``, and the commands for a finished run on ``zoo:NAME``: nothing is written into the package."""

import json

import pytest

from torchrl_perf.cli import main
from torchrl_perf.zoo import FOLDER, zoo_entries

NAME = "ppo-CartPole"
RUN = f"zoo:{NAME}"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty current folder; the package's own is as it was afterwards."""
    before = {file: file.read_bytes() for file in FOLDER.rglob("*") if file.is_file()}
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert {file: file.read_bytes() for file in FOLDER.rglob("*") if file.is_file()} == before


def test_it_lists_each_entry_with_its_return(capsys):
    assert main(["zoo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("zoo:")}
    assert list(rows) == [f"zoo:{name}" for name in zoo_entries()]
    card = zoo_entries()[NAME].card
    assert rows[RUN][1:4] == ["ppo", "CartPole", f"{card['parameters']:,}"]
    assert f"{card['evaluation']['mean_return']:.2f}" in rows[RUN]
    assert lines[0].split()[0] == "name"
    assert 'torchrl_perf.trainers.load_policy("zoo:NAME") from Python.' in lines[-1]


def test_evaluate(capsys):
    assert main(["evaluate", RUN, "--episodes", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == zoo_entries()[NAME].card["steps"]
    assert found["tasks"][0]["mean_return"] > 400


def test_play_and_plot_write_to_a_folder_of_its_name(elsewhere, capsys):
    assert main(["play", RUN, "--max-steps", "3"]) == 0
    assert main(["plot", RUN]) == 0
    assert sorted(file.name for file in (elsewhere / NAME).iterdir()) == ["learning_curve.png", "play.gif"]


def test_export(elsewhere):
    assert main(["export", RUN, "--format", "torch", "--rows", "8", "--out", "exported"]) == 0
    assert sorted(file.name for file in (elsewhere / "exported").iterdir()) == ["policy.md", "policy.pt2"]
    assert main(["export", RUN, "--format", "torch", "--rows", "8"]) == 0
    assert (elsewhere / NAME / "policy.pt2").is_file()


def test_compare(elsewhere, capsys):
    assert main(["compare", RUN, "zoo:dqn-CartPole", "--out", "both.png"]) == 0
    table = (elsewhere / "both.md").read_text(encoding="utf-8")
    assert "| ppo on CartPole " in table
    assert "| dqn on CartPole " in table


@pytest.mark.parametrize("command", ["evaluate", "play", "export", "plot", "compare"])
def test_an_unknown_name_is_refused_and_leaves_nothing(command, elsewhere, capsys):
    assert main([command, "zoo:pqn-Cartpole-0"]) == 1
    assert "received 'pqn-Cartpole-0'. Remedy: zoo:pqn-CartPole." in capsys.readouterr().err
    assert not list(elsewhere.iterdir())
