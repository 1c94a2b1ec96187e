"""One run of a sweep as Ray Tune sees it: a process of ``torchrl-perf train``, whose rows are reported as they come."""

import contextlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ray import tune

from torchrl_perf.cli.sweep_plan import Run
from torchrl_perf.cli.sweep_table import CUT, rows_since, run_folder
from torchrl_perf.run_layout import STATUS, read_json
from torchrl_perf.streams import say

__all__ = ["SCORE", "STEPS", "Halving", "SweepTrial", "Tell"]

STEPS, SCORE = "env_steps", "score"
POLL_SECONDS = 0.5
STOP_SECONDS = 60.0
"""How long a run that is stopped may take to write its checkpoint."""


class SweepTrial(tune.Trainable):
    """A run in a process of its own, which resumes by itself where it has been begun before.

    A process, so that a run that fails or runs out of memory ends alone, and so that it is the same run as one by hand.
    One that is finished, or was stopped since others were better, is not begun again: its rows are told once more.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Starts the run.

        Args:
            config: ``case``, with ``run``, a :class:`Run` as plain values, and ``metric`` and ``sign``, of which the
                score is made.
        """
        case = config["case"]
        self._run, self._metric, self._sign = _run_of(config), case["metric"], case["sign"]
        self._process: subprocess.Popen[bytes] | None = None
        self._told, self._score = 0, -math.inf
        if not self._over():
            self._start()

    def step(self) -> dict[str, Any]:
        """Waits for the next row of metrics.

        Returns:
            Env steps, score, and whether the run is over.

        Raises:
            RuntimeError: for a run that failed, with the last line that it said.
        """
        while True:
            ended = self._process is None or self._process.poll() is not None
            rows = rows_since(run_folder(self._run), 0)
            if len(rows) > self._told:
                self._told += 1
                row = rows[self._told - 1]
                self._score = self._sign * row[self._metric] if self._metric in row else self._score
                return {STEPS: int(row["step"]), SCORE: self._score, "done": ended and self._told == len(rows)}
            if ended:
                return self._last(int(rows[-1]["step"]) if rows else 0)
            time.sleep(POLL_SECONDS)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: the run has checkpoints of its own, and is found by its settings."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing, likewise."""

    def cleanup(self) -> None:
        """Stops the run, which writes a checkpoint."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._process.kill()
        self._process.wait()

    def _last(self, steps: int) -> dict[str, Any]:
        """What is told of a process that has ended."""
        if self._process is not None and self._process.returncode:
            raise RuntimeError(
                f"run: expected exit code 0, received {self._process.returncode}: {self._last_line()}. Remedy: "
                f"{self._log} has all that it said."
            )
        return {STEPS: steps, SCORE: self._score, "done": True}

    def _start(self) -> None:
        self._run.place.mkdir(parents=True, exist_ok=True)
        words = [self._run.algorithm, *self._run.options, "--resume", "auto", "--no-progress"]
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "torchrl_perf.cli.sweep_process", *words]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def _over(self) -> bool:
        folder = run_folder(self._run)
        finished = folder is not None and read_json(folder / STATUS).get("state") == "finished"
        return finished or (self._run.place / CUT).exists()

    @property
    def _log(self) -> Path:
        return self._run.place / "output.txt"

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"


class Halving(tune.schedulers.ASHAScheduler):
    """Asynchronous successive halving (arXiv:1810.05934) that notes which runs it has stopped.

    Args:
        first: env steps before the first rung.
        steps: env steps of a whole run.
        factor: one run in so many goes on at each rung.
    """

    def __init__(self, first: int, steps: int, factor: int) -> None:
        self._steps = steps
        super().__init__(STEPS, SCORE, "max", max_t=steps, grace_period=first, reduction_factor=factor)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Whether a run goes on."""
        decision = super().on_trial_result(tune_controller, trial, result)
        if decision == self.STOP and result[STEPS] < self._steps and not result["done"]:
            place = _run_of(trial.config).place
            place.mkdir(parents=True, exist_ok=True)
            (place / CUT).write_text(json.dumps({STEPS: result[STEPS], SCORE: result[SCORE]}) + "\n")
        return decision


class Tell(tune.Callback):
    """Says in a line how each run has ended."""

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Its settings, env steps and score."""
        result = trial.last_result
        self._say(trial, f"{result.get(STEPS, 0):,} env steps, score {result.get(SCORE, math.nan):.6g}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Its settings, and that it failed."""
        self._say(trial, f"failed; {_run_of(trial.config).place / 'output.txt'} says why")

    @staticmethod
    def _say(trial: Any, words: str) -> None:
        run = _run_of(trial.config)
        settings = ", ".join(f"{name} {value}" for name, value in run.settings.items())
        say(f"{settings or run.algorithm}, seed {run.seed}: {words}", sys.stdout)


def _run_of(config: dict[str, Any]) -> Run:
    values = config["case"]["run"]
    return Run(**{**values, "given": tuple(values["given"])})
