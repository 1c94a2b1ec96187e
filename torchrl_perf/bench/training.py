"""Whole training on Gymnasium's envs on the CPU, in frames/s: this package's trainers, Stable-Baselines3, CleanRL.

All learn with the same env, number of envs, network, batch and updates for each frame. Each run is a process of its
own, and the sides take turns, so that whatever else the machine does hits them alike. Stable-Baselines3 runs where it
is installed; CleanRL's scripts run as they are, from a checkout of its repository, since no release of it takes
Gymnasium 1.
"""

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_perf.bench.report import format_table, write_results

COLUMNS = ("case", "side", "frames", "frames_per_second", "times", "frames_per_cpu_second", "times_cpu", "note")
SIDES = ("torchrl_perf", "sb3", "cleanrl")
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
    rounds: int = 3
    """Runs of each, of which the fastest counts."""
    threads: int = 2
    """CPU threads of PyTorch, on every side."""
    shorten: int = 1
    """Divides the frames of every run."""
    out: str | None = None
    """Folder for training_cpu.json; the package's bench/results by default."""


def command_of(case: Case, side: str, frames: int, cleanrl: str | None) -> tuple[list[str], str | None]:
    """The command that runs one side, and the folder to run it in.

    Raises:
        ValueError: for CleanRL without a folder that has its script.
    """
    if side != "cleanrl":
        settings = {"side": side, "frames": frames, **{name: getattr(case, name) for name in _SHARED}}
        return [sys.executable, str(RUN), json.dumps(settings)], None
    folder = Path(cleanrl or "").resolve()
    script = folder / "cleanrl" / case.cleanrl
    if not (cleanrl and script.exists()):
        raise ValueError(
            f"cleanrl: expected a checkout of CleanRL's repository with cleanrl/{case.cleanrl}, received {cleanrl!r}. "
            "Remedy: git clone https://github.com/vwxyzjn/cleanrl, and --cleanrl FOLDER."
        )
    options = {"env-id": case.env, "total-timesteps": frames, "num-envs": case.num_envs}
    if case.algorithm == "ppo":
        options |= {"num-steps": case.num_steps, "update-epochs": case.epochs, "num-minibatches": case.minibatches}
    else:
        options |= {"batch-size": case.batch_size, "learning-starts": case.learning_starts}
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [sys.executable, str(script), "--no-cuda", *given], str(folder)


_SHARED = (
    "algorithm", "env", "num_envs", "num_steps", "epochs", "minibatches", "batch_size", "learning_starts"
)  # fmt: skip


def run_once(case: Case, side: str, options: BenchTraining) -> dict[str, Any]:
    """Frames/s of one run, by the clock and by the CPU time of its process; a note where it failed."""
    frames = max(case.frames // options.shorten, 2 * case.num_envs * case.num_steps)
    row: dict[str, Any] = {"side": side, "frames": frames, "load": os.getloadavg()[0]}
    try:
        command, folder = command_of(case, side, frames, options.cleanrl)
    except ValueError as error:
        return {**row, "note": str(error)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, **threads, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    speed = speed_of(done.stdout, side) if done.returncode == 0 else None
    if speed is None:
        return {**row, "note": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]}
    # the time before training, of imports, is a part of the process's CPU time alike: it is taken off in proportion
    training = frames / speed
    return {**row, "frames_per_second": speed, "frames_per_cpu_second": frames / (cpu * min(training / wall, 1.0))}


def speed_of(output: str, side: str) -> float | None:
    """Frames/s that a run has printed: CleanRL those since its beginning in each line, the others once."""
    found = re.findall(r"^SPS: (\d+)" if side == "cleanrl" else r"^frames_per_second: ([\d.]+)", output, re.MULTILINE)
    return float(found[-1]) if found and float(found[-1]) > 0 else None


def measure(options: BenchTraining) -> list[dict[str, Any]]:
    """A row for each case and side: the fastest of its rounds, and how many times slower the others are."""
    rows = []
    for name in options.only:
        best: dict[str, dict[str, Any]] = {}
        for _ in range(options.rounds):
            for side in options.sides:
                row = {"case": name, **run_once(CASES[name], side, options)}
                if row.get("frames_per_second", 0.0) > best.get(side, {}).get("frames_per_second", -1.0):
                    best[side] = row
        ours = best.get("torchrl_perf", {})
        for row in best.values():
            for column, times in (("frames_per_second", "times"), ("frames_per_cpu_second", "times_cpu")):
                if row is not ours and column in row and column in ours:
                    row[times] = ours[column] / row[column]
        rows += best.values()
    return rows


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
    rows = measure(options)
    print(format_table(rows, COLUMNS))
    print("times: how many times as fast torchrl_perf is")
    print(f"written to {write_results('training_cpu', rows, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
