"""train(): files of a run, early stop, signals."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from torchrl_perf.trainers import PPOConfig, PPOTrainer, train
from torchrl_perf.trainers.checkpoint import load_checkpoint

TINY = PPOConfig(num_envs=8, num_steps=8, total_steps=640, epochs=1, minibatches=2, hidden_size=32, device="cpu")


def make(tmp_path, **options):
    return PPOTrainer(dataclasses.replace(TINY, run_dir=str(tmp_path), **options))


def test_a_run_leaves_config_rows_checkpoint_and_picture(tmp_path):
    result = train(make(tmp_path, log_interval=3), progress=False)
    assert result.run_dir == tmp_path / "ppo-CartPole-0"
    assert PPOConfig(**json.loads((result.run_dir / "config.json").read_text())) == dataclasses.replace(
        TINY, run_dir=str(tmp_path), log_interval=3
    )
    assert (result.run_dir / "learning_curve.png").stat().st_size > 1000
    assert load_checkpoint(result.run_dir / "checkpoint.pt")["iterations_done"] == 10
    lines = (result.run_dir / "progress.csv").read_text().splitlines()
    assert len(lines) == 1 + 4  # after 3, 6, 9 and 10 iterations
    assert (result.steps, result.exit_code, result.solved) == (640, 0, False)
    assert "640 steps" in str(result)


def test_a_second_run_gets_a_folder_of_its_own(tmp_path):
    folders = {train(make(tmp_path, total_steps=64, logger="none"), progress=False).run_dir.name for _ in range(3)}
    assert folders == {"ppo-CartPole-0", "ppo-CartPole-0-2", "ppo-CartPole-0-3"}


def test_it_stops_at_the_wanted_return(tmp_path):
    result = train(make(tmp_path, stop_return=1.0, log_interval=1, logger="none", num_steps=64), progress=False)
    assert result.solved
    assert result.mean_return >= 1.0
    assert result.steps < 64 * 8 * 10


def test_checkpoints_at_an_interval(tmp_path):
    trainer = make(tmp_path, checkpoint_interval=4, logger="none", log_interval=100)
    saved = []
    save = trainer.save
    trainer.save = lambda path: saved.append(trainer.iterations_done) or save(path)
    train(trainer, progress=False)
    assert saved == [4, 8, 10]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_iteration_and_writes_a_checkpoint(tmp_path, number):
    trainer = make(tmp_path, log_interval=100)
    step = trainer.step

    def step_and_signal():
        if trainer.iterations_done == 3:
            os.kill(os.getpid(), number)
        step()

    trainer.step = step_and_signal
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    result = train(trainer, progress=False)
    assert result.exit_code == 128 + number
    assert result.steps == 4 * 64
    assert load_checkpoint(result.run_dir / "checkpoint.pt")["iterations_done"] == 4
    assert len((result.run_dir / "progress.csv").read_text().splitlines()) == 2  # the last interval is written
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_an_interrupted_run_goes_on_to_the_same_end(tmp_path):
    whole = make(tmp_path, logger="none")
    train(whole, progress=False)

    part = make(tmp_path, logger="none")
    step = part.step

    def step_and_signal():
        if part.iterations_done == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        step()

    part.step = step_and_signal
    result = train(part, progress=False)
    resumed = make(tmp_path, logger="none", seed=5)
    resumed.load(result.run_dir / "checkpoint.pt")
    train(resumed, result.run_dir, progress=False)
    for one, two in zip(whole.loss.parameters(), resumed.loss.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_process_that_is_terminated_says_so(tmp_path):
    code = """
import sys
from torchrl_perf.trainers import PPOConfig, PPOTrainer, train
config = PPOConfig(num_envs=8, num_steps=8, total_steps=10**9, hidden_size=32, device="cpu", run_dir=sys.argv[1],
                   logger="none", log_interval=1)
trainer = PPOTrainer(config)
step = trainer.step
def announced():
    step()
    print("stepped", flush=True)
trainer.step = announced
sys.exit(train(trainer, progress=False).exit_code)
"""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "stepped\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert (tmp_path / "ppo-CartPole-0" / "checkpoint.pt").is_file()
