"""Whole training on Gymnasium's envs on the CPU, in frames/s: this package's trainers, Stable-Baselines3, CleanRL.

All learn with the same env, number of envs, network, batch and updates for each frame. Each run is a process of its
own, and the sides take turns, so that whatever else the machine does hits them alike. The first two iterations, in
which ``mode="compile"`` compiles, are told apart. Stable-Baselines3 runs where it is installed. CleanRL's scripts run
as they are, from a checkout of its repository, by a Python that has what they require: Gymnasium before 1.0, so that
its envs are one version older.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_perf.bench.report import format_table, write_results

COLUMNS = ("case", "side", "frames", "start_s", "frames_per_second", "times", "note")
OURS = ("torchrl_perf", "torchrl_perf-compile")
SIDES = (*OURS, "sb3", "cleanrl")
RUN = Path(__file__).parent / "peers" / "training_run.py"


@dataclass(frozen=True)
class Case:
    """What is trained, with the same sizes on all sides."""

    algorithm: str
    """``"ppo"`` or ``"sac"``."""
    env: str
    """Gymnasium id."""
    frames: int
    """Frames of a run."""
    num_envs: int
    """Envs that run at once."""
    num_steps: int
    """Steps of each env before updates."""
    epochs: int = 0
    """PPO: passes over a batch."""
    minibatches: int = 0
    """PPO: minibatches of a pass."""
    batch_size: int = 256
    """SAC: rows of an update; there is one update for each frame."""
    learning_starts: int = 0
    """SAC: frames before the first update."""
    cleanrl: str = ""
    """CleanRL's script."""


CASES = {
    "ppo-HalfCheetah": Case("ppo", "HalfCheetah-v5", 65_536, 8, 256, 10, 32, cleanrl="ppo_continuous_action.py"),
    "ppo-CartPole": Case("ppo", "CartPole-v1", 131_072, 8, 128, 4, 4, cleanrl="ppo.py"),
    "sac-HalfCheetah": Case(
        "sac", "HalfCheetah-v5", 6_000, 1, 1, learning_starts=1_000, cleanrl="sac_continuous_action.py"
    ),
}
"""PPO with two layers of 64 tanh units, SAC with two of 256 ReLU units, which all three have by default."""


@dataclass(frozen=True)
class BenchTraining:
    """Options of ``torchrl-perf bench training``."""

    only: tuple[str, ...] = tuple(CASES)
    """Cases."""
    sides: tuple[str, ...] = SIDES
    """Whose training."""
    cleanrl: str | None = None
    """Folder of a checkout of CleanRL's repository; without it CleanRL is left out."""
    cleanrl_python: str = sys.executable
    """Python that runs CleanRL's scripts."""
    rounds: int = 3
    """Runs of each, of which the fastest counts."""
    threads: int = 2
    """CPU threads of PyTorch, on every side."""
    shorten: int = 1
    """Divides the frames of every run."""
    out: str | None = None
    """Folder for training_cpu.json; the package's bench/results by default."""


def command_of(case: Case, side: str, frames: int, options: BenchTraining) -> tuple[list[str], str | None]:
    """The command that runs one side, and the folder to run it in.

    Raises:
        ValueError: for CleanRL without a folder that has its script.
    """
    if side != "cleanrl":
        settings = {"side": side, "frames": frames, **{name: getattr(case, name) for name in _SHARED}}
        return [sys.executable, str(RUN), json.dumps(settings)], None
    folder = Path(options.cleanrl or "").resolve()
    script = folder / "cleanrl" / case.cleanrl
    if not (options.cleanrl and script.exists()):
        raise ValueError(
            f"cleanrl: expected a checkout of CleanRL's repository with cleanrl/{case.cleanrl}, received "
            f"{options.cleanrl!r}. Remedy: git clone https://github.com/vwxyzjn/cleanrl, and --cleanrl FOLDER."
        )
    env = case.env.replace("HalfCheetah-v5", "HalfCheetah-v4")  # the same physics and observations
    settings = {"env-id": env, "total-timesteps": frames, "num-envs": case.num_envs}
    if case.algorithm == "ppo":
        settings |= {"num-steps": case.num_steps, "update-epochs": case.epochs, "num-minibatches": case.minibatches}
    else:
        settings |= {"batch-size": case.batch_size, "learning-starts": case.learning_starts}
    given = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return [options.cleanrl_python, str(script), "--no-cuda", *given], str(folder)


_SHARED = (
    "algorithm", "env", "num_envs", "num_steps", "epochs", "minibatches", "batch_size", "learning_starts"
)  # fmt: skip


def run_once(case: Case, side: str, options: BenchTraining) -> dict[str, Any]:
    """Frames/s of one run after its start, and the seconds of that; a note where it failed."""
    frames = max(case.frames // options.shorten, 4 * case.num_envs * case.num_steps)
    row: dict[str, Any] = {"side": side, "frames": frames, "load": os.getloadavg()[0]}
    try:
        command, folder = command_of(case, side, frames, options)
    except ValueError as error:
        return {**row, "note": str(error)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **threads, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    printed = done.stdout if done.returncode == 0 else ""
    speeds = re.findall(r"^(?:SPS|frames_per_second): ([\d.]+)", printed, re.MULTILINE)
    if not speeds:
        return {**row, "note": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]}
    start = re.findall(r"^start_s: ([\d.]+)", printed, re.MULTILINE)
    # CleanRL's is one over all frames so far: its last line is of the whole run, in which nothing compiles
    return {**row, "frames_per_second": float(speeds[-1]), **({"start_s": float(start[-1])} if start else {})}


def measure(name: str, options: BenchTraining) -> list[dict[str, Any]]:
    """A row for each side of a case: the fastest of its rounds, and how many times the faster peer's speed ours is."""
    best: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for side in options.sides:
            row = {"case": name, **run_once(CASES[name], side, options)}
            if row.get("frames_per_second", 0.0) > best.get(side, {}).get("frames_per_second", -1.0):
                best[side] = row
    speeds = {side: row["frames_per_second"] for side, row in best.items() if "frames_per_second" in row}
    peers = [speed for side, speed in speeds.items() if side not in OURS]
    for side in set(OURS) & speeds.keys():
        if peers:
            best[side]["times"] = speeds[side] / max(peers)
    return list(best.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Times all sides and writes training_cpu.json."""
    import tyro

    options = tyro.cli(BenchTraining, args=argv, prog="torchrl-perf bench training")
    for option, names in (("only", tuple(CASES)), ("sides", SIDES)):
        if unknown := [name for name in getattr(options, option) if name not in names]:
            print(
                f"{option}: expected names among {', '.join(names)}, received {', '.join(unknown)}. Remedy: these.",
                file=sys.stderr,
            )
            return 1
    rows: list[dict[str, Any]] = []
    for name in options.only:
        rows += measure(name, options)
        write_results("training_cpu", rows, options.out)  # a case takes minutes: what is measured is kept
    print(format_table(rows, COLUMNS))
    print("times: as a multiple of the faster peer's speed")
    print(f"written to {write_results('training_cpu', rows, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
