"""Runs with a replay or exploration of their own on each rank, begun with some ranks and gone on with by others."""

import os

from torchrl_perf import cli

USUAL = ["--device", "cpu", "--num-envs", "12", "--no-progress", "--run-dir", "runs", "--hidden-size", "16"]
REPLAY = ["--capacity", "600", "--minibatch-size", "12", "--learning-starts", "60"]
OWN = {
    "dqn": [*REPLAY, "--sampler", "prioritized", "--n-step", "3", "--eps-frames", "1200", "--num-steps", "2"],
    "ddpg": [*REPLAY, "--noise-frames", "1200", "--num-steps", "2"],
    "pqn": ["--num-steps", "2", "--eps-frames", "1200", "--minibatches", "1"],
}


def _run(name: str) -> None:
    """Begins the run of an algorithm, or goes on with it."""
    begun = os.path.isdir("runs") and [each for each in os.listdir("runs") if each.startswith(f"{name}-")]
    words = ["train", name, *USUAL, *OWN[name], "--total-steps", "240"]
    if begun:
        words = ["train", name, "--resume", f"runs/{begun[0]}", "--total-steps", "480", "--no-progress"]
        words += ["--ranks", os.environ["WORLD_SIZE"], "--keep-schedules"]
    raise SystemExit(cli.main(words))


def dqn() -> None:
    """Prioritised replay, windows of rewards, epsilon-greedy."""
    _run("dqn")


def ddpg() -> None:
    """Replay and noise of actions."""
    _run("ddpg")


def pqn() -> None:
    """No replay; epsilon-greedy."""
    _run("pqn")
