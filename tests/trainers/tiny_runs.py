"""Small runs on a CPU, and what they leave."""

import contextlib
import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import torch

from torchrl_perf.trainers import PPOConfig, PPOTrainer
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder

TINY = PPOConfig(num_envs=8, num_steps=8, total_steps=640, epochs=1, minibatches=2, hidden_size=32, device="cpu")
OF_THE_PROCESS = ("wall_time", "time/", "memory/", "gpu/")


def make(tmp_path, **options):
    return PPOTrainer(dataclasses.replace(TINY, run_dir=str(tmp_path), **options))


def at(trainer, iteration, action):
    """Does something in the middle of the iteration that follows ``iteration``."""
    step = trainer.step

    def step_and_act():
        step()
        if trainer.iterations_done == iteration:
            action()

    trainer.step = step_and_act
    return trainer


def names(folder):
    return [path.name for path in CheckpointFolder(folder / "checkpoints").files()]


def newest(run_dir):
    return CheckpointFolder(run_dir / "checkpoints").load_newest()[1]


def rows_of(run_dir):
    """Rows of progress.csv without what depends on the process."""
    with (run_dir / "progress.csv").open(newline="") as file:
        return [
            {k: v for k, v in row.items() if v and not k.startswith(OF_THE_PROCESS)} for row in csv.DictReader(file)
        ]


def steps_of(run_dir):
    return [int(row["step"]) // 64 for row in rows_of(run_dir)]


def status_of(run_dir):
    return json.loads((run_dir / "status.json").read_text())


def resumed(trainer, run_dir):
    """The trainer with the newest checkpoint of a run."""
    trainer.load_state_dict(newest(run_dir))
    return trainer


def assert_same_parameters(one, other):
    for mine, theirs in zip(one.loss.parameters(), other.loss.parameters(), strict=True):
        assert torch.equal(mine, theirs)


HOLD = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=1); input()"


@contextlib.contextmanager
def in_use(run_dir: Path):
    """Another process has the folder of a run, and is killed at the end."""
    command = [sys.executable, "-c", HOLD, str(run_dir / "run.lock")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()
