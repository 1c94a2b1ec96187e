"""The examples around TorchRL's own trainers and scripts: no host read, and they learn."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("algorithm", "total_frames", "prioritized"),
    [
        ("dqn", 28 * 256, False),
        ("sac", 28 * 64, True),
        pytest.param("dqn", 28 * 256, True, marks=pytest.mark.slow),
        pytest.param("sac", 28 * 64, False, marks=pytest.mark.slow),
    ],
)
def test_off_policy_trainers_read_nothing(capsys, algorithm, total_frames, prioritized):
    example = load("torchrl_trainer")
    config = example.Config(algorithm=algorithm, total_frames=total_frames, prioritized=prioritized, device="cpu")
    mean_return = example.main(config)
    assert math.isfinite(mean_return) == (algorithm == "dqn")  # an episode of Pendulum takes 200 steps
    assert f"{algorithm}: 0.0 host reads a batch, mean return of" in capsys.readouterr().out.splitlines()[-1]


def test_ppo_trainer_reads_nothing_and_learns(capsys):
    example = load("torchrl_trainer")
    mean_return = example.main(example.Config(total_frames=15 * 4096, device="cpu"))
    assert mean_return >= 150  # a random policy gets 22
    assert capsys.readouterr().out.startswith("ppo: 0.0 host reads a batch")


@pytest.mark.filterwarnings("ignore:The env passed to Collector is missing transforms:FutureWarning")
def test_replay_only_runs_in_thirty_lines(capsys):
    mean_return = load("replay_only").main(total_frames=1280)
    assert mean_return > 9
    assert capsys.readouterr().out == f"mean return of the last 20 episodes: {mean_return:.1f}\n"
