"""Kills runs with SIGKILL at random moments and goes on with them, until the last one ends: what is left is checked.

    python tests/trainers/kill_runs.py ppo,dqn 50 120 FOLDER

does so 50 times for each algorithm, with runs of 120 iterations. Each attempt is a fork of this process, which has
everything imported but has not computed anything, and runs ``torchrl-perf train ... --resume auto``. Printed last, as
JSON: kills, runs, attempts, what the kills met, problems.
"""

import csv
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import tyro  # noqa: F401 (before the forks)

from torchrl_perf.cli.train import main
from torchrl_perf.metrics.plot import save_learning_curve  # noqa: F401 (as above)
from torchrl_perf.registry import ALGORITHMS
from torchrl_perf.runtime.files import CheckpointError
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder, read_checkpoint
from torchrl_perf.trainers.run.files import is_finished

TINY = ["--num-envs", "4", "--num-steps", "8", "--log-interval", "2", "--device", "cpu", "--no-progress"]
TINY += ["--keep-checkpoints", "2", "--hidden-size", "32"]
OPTIONS = {
    "ppo": ["--epochs", "1", "--minibatches", "2", "--checkpoint-interval", "1"],
    "dqn": [
        *("--learning-starts", "64", "--capacity", "256", "--minibatch-size", "16", "--updates-per-iteration", "2"),
        *("--sampler", "prioritized", "--n-step", "3", "--checkpoint-interval", "3"),
    ],
}
OF_THE_PROCESS = ("/random/python", "/random/numpy", "/notes/seconds", "/settings/run_dir")
"""Random states that no run seeds, the time that it took, and its folder."""
TIMES = ("wall_time", "time/", "memory/", "gpu/")  # of the process and the machine, not of the run


def fork(algorithm: str, folder: Path, iterations: int) -> int:
    """Starts a run, or goes on with it, in a child process; returns its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        options = [*TINY, *OPTIONS[algorithm], "--total-steps", str(32 * iterations)]
        options += ["--run-dir", str(folder), "--resume", "auto"]
        code = main(algorithm, options)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def leaves(state: object, path: str = "") -> dict[str, object]:
    """Every leaf of a nested state, by path, less those that are the process's own."""
    if path in OF_THE_PROCESS:
        return {}
    if isinstance(state, dict):
        return {k: v for key, value in state.items() for k, v in leaves(value, f"{path}/{key}").items()}
    if isinstance(state, list | tuple):
        return {k: v for key, value in enumerate(state) for k, v in leaves(value, f"{path}/{key}").items()}
    if isinstance(state, torch.Tensor):
        return {path: (str(state.dtype), state.double().nan_to_num(-7.0).flatten().tolist())}
    return {path: repr(state)}


def rows(run_dir: Path) -> list[dict[str, str]]:
    """Rows of progress.csv without what depends on the process."""
    with (run_dir / "progress.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if v and not k.startswith(TIMES)} for row in csv.DictReader(file)]


def ended(run_dir: Path) -> dict[str, object]:
    """What a run has come to: newest and best state, rows, and the files of its folder."""
    folder = CheckpointFolder(run_dir / "checkpoints")
    return {
        "newest": leaves(read_checkpoint(folder.files()[0])),
        "best": leaves(read_checkpoint(folder.best)),
        "rows": rows(run_dir),
        # the picture is drawn after the end
        "files": sorted(path.name for path in run_dir.rglob("*") if path.is_file() and path.suffix != ".png"),
    }


def half_written(folder: Path) -> list[str]:
    """Checkpoints that cannot be read."""
    problems = []
    for path in folder.glob("*/checkpoints/*.pt"):
        try:
            read_checkpoint(path)
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
    return problems


def moment(folder: Path) -> str:
    """What the kill has met."""
    if list(folder.glob("*/checkpoints/*.partial")):
        return "in a save"
    if not list(folder.glob("*/checkpoints/*.pt")):
        return "before the first checkpoint"
    return "elsewhere"


def kill(pid: int, seconds: float) -> int:
    """Kills a child after some seconds; its exit status."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(algorithm: str, kills: int, iterations: int, folder: Path) -> dict[str, object]:
    """The whole test of an algorithm."""
    draw = random.Random(algorithm)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    whole = os.waitstatus_to_exitcode(os.waitpid(fork(algorithm, folder / "whole", iterations), 0)[1])
    length = time.monotonic() - start
    expected = ended(folder / "whole" / f"{algorithm}-CartPole-0") if whole == 0 else {}
    problems, moments = [] if whole == 0 else [f"whole: {whole}"], {}
    done = runs = attempts = finished = 0
    while done < kills and not problems:
        runs += 1
        status, killed = -9, folder / f"killed-{runs}"
        while status == -9:
            attempts += 1
            pause = draw.uniform(0.0, 0.7 * length) if done < kills else 600.0
            status = kill(fork(algorithm, killed, iterations), pause)
            if status == -9:
                done += 1
                moments[moment(killed)] = moments.get(moment(killed), 0) + 1
                problems += half_written(killed)
        if status != 0:
            problems.append(f"exit code {status}: {killed.with_suffix('.log').read_text()[-2000:]}")
            break
        for run_dir in filter(is_finished, killed.iterdir()):  # more than one if a kill came at the very end
            received = ended(run_dir)
            problems += [f"{run_dir}: another {name}" for name in expected if expected[name] != received[name]]
            finished += 1
    result = {"kills": done, "finished_runs": finished, "attempts": attempts, "moments": moments, "problems": problems}
    return {**result, "seconds": round(time.monotonic() - start, 1), "seconds_of_a_whole_run": round(length, 2)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[1].split(",")
    for each in names:
        ALGORITHMS[each].load("trainer")
    numbers = (int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({each: run(each, *numbers, Path(sys.argv[4]) / each) for each in names}))
