"""``--resume``: a run, one of its checkpoints, or the newest with steps left; and what ends a run otherwise."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from torchrl_perf.cli import main
from torchrl_perf.cli import train as command
from torchrl_perf.cli.resume import given_settings
from torchrl_perf.envs import CartPole
from torchrl_perf.trainers import PPOConfig, PPOTrainer
from torchrl_perf.trainers.run import run as run_module
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder, read_checkpoint

TINY = ["--num-envs", "4", "--num-steps", "8", "--log-interval", "1", "--no-progress", "--device", "cpu"]
TINY += ["--checkpoint-interval", "1", "--epochs", "1", "--minibatches", "1", "--hidden-size", "32"]


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Drawing takes longer than these runs."""
    monkeypatch.setattr(run_module, "_draw", lambda *_: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder of runs with one of three iterations."""
    folder = tmp_path_factory.mktemp("finished") / "runs"
    assert main(["train", "ppo", *TINY, "--run-dir", str(folder), "--total-steps", "96"]) == 0
    return folder


@pytest.fixture
def runs(finished, tmp_path):
    """A copy of it that knows its own place."""
    shutil.copytree(finished, tmp_path / "runs")
    path = tmp_path / "runs" / "ppo-CartPole-0" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run_dir": str(tmp_path / "runs")}))
    return tmp_path / "runs"


def train(runs: Path, *options: str) -> int:
    """Exit code of a small run with these options."""
    return main(["train", "ppo", *TINY, "--run-dir", str(runs), *options])


def stored(run_dir: Path) -> dict[str, object]:
    """The settings of a run."""
    return json.loads((run_dir / "config.json").read_text())


def steps(run_dir: Path) -> list[str]:
    """The first column of progress.csv."""
    return [line.partition(",")[0] for line in (run_dir / "progress.csv").read_text().split()][1:]


class TestAuto:
    def test_a_new_run_where_there_is_none(self, tmp_path, capsys):
        assert train(tmp_path / "runs", "--total-steps", "32", "--resume", "auto") == 0
        assert f"no run with steps left below {tmp_path / 'runs'}; a new one starts" in capsys.readouterr().err
        assert (tmp_path / "runs" / "ppo-CartPole-0").is_dir()

    def test_a_complete_run_is_left_alone(self, runs, capsys):
        assert train(runs, "--total-steps", "96", "--resume", "auto") == 0
        assert "ppo-CartPole-0: it is complete" in capsys.readouterr().err
        assert steps(runs / "ppo-CartPole-0-2") == ["32", "64", "96"]

    def test_one_that_was_killed_before_its_last_row_ends_as_it_should(self, runs, capsys):
        run_dir = runs / "ppo-CartPole-0"
        lines = (run_dir / "progress.csv").read_text().splitlines(keepends=True)
        (run_dir / "progress.csv").write_text("".join(lines[:3]))
        (run_dir / "status.json").write_text('{"pid": 1, "state": "running", "step": 64}')
        for path in sorted((run_dir / "checkpoints").glob("0*.pt")):
            state = read_checkpoint(path)  # the last row was no regular one
            torch.save({**state, "notes": {"row": {"iteration": 2}}}, path)
        assert train(runs, "--total-steps", "96", "--resume", "auto") == 0
        assert "goes on from 000000003.pt, 96 of 96 steps" in capsys.readouterr().err
        assert steps(run_dir) == ["32", "64", "96"]
        assert json.loads((run_dir / "status.json").read_text())["state"] == "finished"

    def test_the_same_command_goes_on_with_more_steps(self, runs, capsys):
        assert train(runs, "--total-steps", "160", "--resume", "auto") == 0
        error = capsys.readouterr().err
        assert f"resume: {runs / 'ppo-CartPole-0'} goes on from 000000003.pt, 96 of 160 steps" in error
        assert steps(runs / "ppo-CartPole-0") == ["32", "64", "96", "128", "160"]
        assert len(list(runs.iterdir())) == 1

    def test_settings_are_those_of_the_run_but_for_what_is_given(self, runs, tmp_path):
        config = tmp_path / "wanted.yaml"
        config.write_text("total_steps: 128\nlearning_rate: 0.004\n")
        options = ["--config", str(config), "--resume", "auto", "--gamma", "0.9"]
        assert main(["train", "ppo", "--run-dir", str(runs), "--no-progress", *options]) == 0
        settings = stored(runs / "ppo-CartPole-0")
        wanted = {"total_steps": 128, "learning_rate": 0.004, "gamma": 0.9, "num_envs": 4, "hidden_size": 32}
        assert {name: settings[name] for name in wanted} == wanted

    def test_another_shape_or_seed_is_another_run(self, runs, capsys):
        assert train(runs, "--total-steps", "128", "--hidden-size", "64", "--resume", "auto") == 0
        assert "ppo-CartPole-0: it has another hidden_size" in capsys.readouterr().err
        assert train(runs, "--total-steps", "32", "--seed", "4", "--resume", "auto") == 0
        assert {path.name for path in runs.iterdir()} == {"ppo-CartPole-0", "ppo-CartPole-0-2", "ppo-CartPole-4"}

    def test_names_of_given_settings(self):
        argv = ["--num-envs=4", "--seed", "3", "--no-clip-value", "--learning_rate", "1", "--no-progress", "-x"]
        given = given_settings(PPOConfig, argv, ["gamma"])
        assert set(given) == {"num_envs", "seed", "clip_value", "learning_rate", "gamma"}


class TestPath:
    def test_a_checkpoint_file_goes_back_and_sets_later_ones_aside(self, runs, capsys):
        folder = runs / "ppo-CartPole-0" / "checkpoints"
        assert main(["train", "ppo", "--resume", str(folder / "000000001.pt"), "--no-progress"]) == 0
        assert "goes on from 000000001.pt, 32 of 96 steps" in capsys.readouterr().err
        assert [path.name for path in CheckpointFolder(folder).files()] == [f"00000000{n}.pt" for n in (3, 2, 1)]
        assert [path.name for path in folder.glob("*.set-aside")] == ["000000003.pt.set-aside"]  # 2 is written anew
        assert steps(runs / "ppo-CartPole-0") == ["32", "64", "96"]

    def test_a_damaged_checkpoint_is_left_for_the_one_before(self, runs, capsys, caplog):
        newest = runs / "ppo-CartPole-0" / "checkpoints" / "000000003.pt"
        newest.write_bytes(newest.read_bytes()[:100])
        assert main(["train", "ppo", "--resume", str(runs / "ppo-CartPole-0"), "--no-progress"]) == 0
        assert "000000003.pt is left out: checkpoint: expected a whole file" in caplog.text
        assert "goes on from 000000002.pt, 64 of 96 steps" in capsys.readouterr().err
        assert steps(runs / "ppo-CartPole-0") == ["32", "64", "96"]

    @pytest.mark.parametrize("place", ["nowhere", "file"])
    def test_no_run(self, tmp_path, capsys, place):
        (tmp_path / "file").touch()
        assert main(["train", "ppo", "--resume", str(tmp_path / place)]) == 1
        assert "--resume: expected" in capsys.readouterr().err

    def test_of_another_algorithm(self, runs, capsys):
        run_dir = runs / "ppo-CartPole-0"
        settings = {"env": "CartPole", "num_envs": 4, "num_steps": 8, "device": "cpu", "total_steps": 960}
        (run_dir / "config.json").write_text(json.dumps(settings | {"learning_starts": 128, "capacity": 256}))
        assert main(["train", "dqn", "--resume", str(run_dir)]) == 1
        assert "expected one of dqn, received one of ppo" in capsys.readouterr().err


class TestEnds:
    def test_a_last_state_that_is_lost_is_exit_code_1(self, tmp_path, capsys, monkeypatch):
        def fails(self, state, iteration):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(CheckpointFolder, "write", fails)
        assert train(tmp_path / "runs", "--total-steps", "32") == 1
        assert "the last checkpoint could not be written: [Errno 28] No space left" in capsys.readouterr().err

    def test_a_folder_that_cannot_be_used_is_one_line(self, tmp_path, capsys):
        (tmp_path / "runs").touch()
        assert train(tmp_path / "runs") == 1
        error = capsys.readouterr().err
        assert "run: expected a folder that can be written to" in error
        assert "Traceback" not in error

    def test_an_error_of_the_loop_keeps_its_type_and_says_how_to_go_on(self, tmp_path, monkeypatch):
        make = command.make_trainer

        def poisoned(*args):
            trainer = make(*args)
            step = trainer.step
            trainer.step = lambda: step() if trainer.iterations_done < 2 else 1 / 0
            return trainer

        monkeypatch.setattr(command, "make_trainer", poisoned)
        with pytest.raises(ZeroDivisionError) as error:
            train(tmp_path / "runs")
        assert f"--resume {tmp_path / 'runs' / 'ppo-CartPole-0'}" in error.value.__notes__[0]


def test_settings_of_a_run_are_those_it_was_asked_for(runs):
    settings = stored(runs / "ppo-CartPole-0")
    assert settings["algorithm"] == "ppo"
    assert PPOConfig.from_dict(settings) == dataclasses.replace(
        PPOConfig(num_envs=4, num_steps=8, total_steps=96, log_interval=1, device="cpu", checkpoint_interval=1),
        **{"epochs": 1, "minibatches": 1, "hidden_size": 32, "run_dir": str(runs)},
    )


def test_a_run_of_another_algorithm_is_one_problem(runs, capsys):
    assert main(["train", "dqn", "--resume", str(runs / "ppo-CartPole-0"), "--no-progress"]) == 1
    assert capsys.readouterr().err == (
        f"torchrl-perf: {runs / 'ppo-CartPole-0' / 'config.json'}: algorithm: expected settings of dqn, received those "
        "of ppo. Remedy: torchrl-perf train ppo, or settings of dqn.\n"
    )


def test_a_folder_that_holds_no_run(tmp_path, capsys):
    assert main(["train", "ppo", "--resume", str(tmp_path), "--no-progress"]) == 1
    assert "--resume: expected the folder of a run, with its config.json, received" in capsys.readouterr().err


def test_an_env_of_another_state_is_told_and_nothing_is_changed(runs, tmp_path):
    class Counting(CartPole):
        def __init__(self, num_envs):
            super().__init__(num_envs, device="cpu")
            self.register_buffer("calls", torch.zeros(()))

    config = PPOConfig.from_dict(stored(runs / "ppo-CartPole-0"))
    trainer = PPOTrainer(config, env=Counting(4))
    before = {name: value.clone() for name, value in trainer.actor.state_dict().items()}
    _, state = CheckpointFolder(runs / "ppo-CartPole-0" / "checkpoints").load_newest()
    with pytest.raises(ValueError, match=r"can load, received something else: .*calls.* Nothing was changed. Remedy"):
        trainer.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in trainer.actor.state_dict().items())
