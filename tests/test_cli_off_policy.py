"""``torchrl-perf train dqn``: the parts of the command that off-policy runs add to what PPO's have."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from torchrl_perf.cli import main
from torchrl_perf.registry import ALGORITHMS

TINY = ["--num-envs", "4", "--num-steps", "8", "--total-steps", "128", "--log-interval", "1", "--no-progress"]
TINY += ["--device", "cpu", "--learning-starts", "32", "--capacity", "64", "--minibatch-size", "16"]
TINY += ["--hidden-size", "32"]


def train(tmp_path: Path, *options: str) -> int:
    """Exit code of a small DQN run below ``tmp_path``."""
    return main(["train", "dqn", *TINY, "--run-dir", str(tmp_path / "runs"), *options])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_help_explains_every_setting(name, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: torchrl-perf train {name}" in text
    config = ALGORITHMS[name].load("config")
    options = set(re.findall(r"--[a-z][a-z0-9-]+", text))
    assert options >= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(config)}
    words = " ".join(re.sub(r"[│|]", " ", text).split())
    assert "Discount factor." in words


@pytest.mark.parametrize("name", ALGORITHMS)
def test_presets_are_of_their_env_and_algorithm(name):
    config, presets = ALGORITHMS[name].load("config"), ALGORITHMS[name].load("presets")
    for env, preset in presets.items():
        assert type(preset) is config
        assert (preset.env, preset.stop_return, preset.algorithm) == (env, None, name)


def test_a_run_has_a_folder_of_its_name_and_resumes(tmp_path, capsys):
    assert train(tmp_path, "--seed", "3", "--sampler", "prioritized", "--beta-final", "1") == 0
    run_dir = tmp_path / "runs" / "dqn-CartPole-3"
    stored = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    assert (stored["sampler"], stored["beta_final"], stored["capacity"]) == ("prioritized", 1.0, 64)
    assert capsys.readouterr().out.splitlines()[-1].startswith("128 steps in ")
    assert main(["train", "dqn", "--resume", str(run_dir), "--total-steps", "192", "--no-progress"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("192 steps in ")
    steps = [line.partition(",")[0] for line in (run_dir / "progress.csv").read_text(encoding="utf-8").split()]
    assert steps == ["step", "32", "64", "96", "128", "160", "192"]


@pytest.mark.parametrize("option", [("--capacity", "128"), ("--n-step", "2"), ("--dueling",), ("--compact",)])
def test_what_a_checkpoint_fixes_cannot_change(tmp_path, capsys, option):
    assert train(tmp_path, "--logger", "none") == 0
    assert main(["train", "dqn", "--resume", str(tmp_path / "runs" / "dqn-CartPole-0"), *option]) == 1
    assert f"received another {option[0][2:].replace('-', '_')}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minibatch-size", "65"], "minibatch_size: expected at most 64, the rows that are filled"),
        (["--capacity", "16"], "capacity: expected at least num_envs * num_steps = 32 rows"),
        (["--env", "Pendulum"], "action_spec: expected discrete actions"),
        (["--env", "Antelope"], "env: expected one of CartPole"),
        (["--tau", "0"], "tau: expected a number in (0, 1], received 0.0."),
        (["--beta", "1.5"], "beta: expected a number in [0, 1], received 1.5."),
        (["--alpha", "-1"], "alpha: expected a number of at least 0, received -1.0."),
    ],
)
def test_settings_that_cannot_run_leave_no_folder(tmp_path, capsys, options, message):
    assert train(tmp_path, *options) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()
