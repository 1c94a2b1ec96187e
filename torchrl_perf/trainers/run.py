"""A whole training run: iterations, rows of metrics, checkpoints, and a clean stop."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from torchrl_perf.metrics import DeviceMetrics, PhaseTimer, ProgressLine, make_loggers, save_learning_curve
from torchrl_perf.runtime.signals import StopRequest
from torchrl_perf.runtime.timing import Stopwatch
from torchrl_perf.trainers.config import RunConfig


class Trainer(Protocol):
    """What :func:`train` needs of an algorithm.

    Attributes:
        config: settings; ``algorithm``, ``iterations`` and ``batch_size`` among them.
        iterations_done: iterations run so far; counted by :func:`train`.
        metrics: flushed once an interval; has ``train/first_bad_iteration`` and ``episode/mean_return``.
        phases: times of the parts of an iteration.
    """

    iterations_done: int
    metrics: DeviceMetrics
    phases: PhaseTimer

    @property
    def config(self) -> RunConfig:
        """Settings of the run."""
        ...

    @property
    def first_bad_iteration(self) -> Tensor:
        """First iteration whose loss or gradient was not finite, or -1: 0-d."""
        ...

    # an attribute in one algorithm, a method in another
    @property
    def step(self) -> Callable[[], object]:
        """Runs one iteration."""
        ...

    def save(self, path: str | Path) -> Path:
        """Writes a checkpoint."""
        ...


class TrainingDivergedError(RuntimeError):
    """A loss or gradient was not finite. Parameters are those before it; the last good checkpoint is kept."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    run_dir: Path
    """Folder with config.json, progress.csv, checkpoint.pt and learning_curve.png."""
    steps: int
    """Env steps that were taken, those before a resume included."""
    mean_return: float
    """Mean return of the last 100 finished episodes; NaN if none finished."""
    seconds: float
    """Wall time of the loop, compilation included, since the start or the resume."""
    steps_per_second: float
    """Env steps of this loop over its wall time."""
    solved: bool
    """Whether ``stop_return`` was reached."""
    exit_code: int
    """0, or 128 + the number of the signal that stopped the run."""

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in {self.seconds:.1f} s ({self.steps_per_second:,.0f} steps/s), mean return of the "
            f"last 100 episodes {self.mean_return:.1f}, saved in {self.run_dir}"
        )


def make_run_dir(trainer: Trainer) -> Path:
    """A new folder ``<run_dir>/<algorithm>-<env>-<seed>[-k]`` with the resolved configuration in ``config.json``."""
    config = trainer.config
    base = Path(config.run_dir) / f"{config.algorithm}-{config.env.replace('/', '-')}-{config.seed}"
    path, count = base, 1
    while True:
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            count += 1
            path = base.with_name(f"{base.name}-{count}")
    (path / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    return path


def train(trainer: Trainer, run_dir: str | os.PathLike[str] | None = None, *, progress: bool = True) -> RunResult:
    """Runs ``trainer`` to the end of its configuration, its stop return, a signal, or a loss that is not finite.

    Metrics cross to the host in one copy every ``log_interval`` iterations; nothing else waits. Ctrl-C and SIGTERM
    finish the iteration, write a checkpoint and close the loggers; the result's ``exit_code`` says so.

    Args:
        trainer: a new trainer, or one that has loaded a checkpoint.
        run_dir: folder of the run; by default a new one under ``config.run_dir``.
        progress: whether to show a line in the terminal.

    Raises:
        TrainingDivergedError: naming the env step, after the loggers are closed.
    """
    config = trainer.config
    run_dir = make_run_dir(trainer) if run_dir is None else Path(run_dir)
    logger = make_loggers(config.logger, run_dir, "torchrl_perf", run_dir.name, config.to_dict())
    trainer.metrics.logger = logger
    line = ProgressLine(config.iterations * config.batch_size) if progress else None
    loop, before = _Loop(trainer, run_dir, line), trainer.iterations_done
    try:
        with StopRequest() as stop:
            while not loop.finished and not stop.requested:
                loop.advance()
        loop.finish()
        seconds = loop.seconds
        trainer.save(run_dir / "checkpoint.pt")
    finally:
        if line is not None:
            line.close()
        logger.close()
    if (run_dir / "progress.csv").is_file() and math.isfinite(loop.mean_return):
        title = f"{config.algorithm.upper()} on {config.env}"
        save_learning_curve(run_dir / "progress.csv", run_dir / "learning_curve.png", title=title)
    return RunResult(
        run_dir=run_dir,
        steps=trainer.iterations_done * config.batch_size,
        mean_return=loop.mean_return,
        seconds=seconds,
        steps_per_second=(trainer.iterations_done - before) * config.batch_size / max(seconds, 1e-9),
        solved=loop.solved,
        exit_code=stop.exit_code,
    )


class _Loop:
    """One run's host side: when to log, save and stop."""

    def __init__(self, trainer: Trainer, run_dir: Path, line: ProgressLine | None) -> None:
        self.trainer = trainer
        self.run_dir = run_dir
        self.line = line
        self._watch = Stopwatch("cpu").start()
        self.mean_return = math.nan
        self.solved = False
        self._logged_at = (trainer.iterations_done, 0.0)

    @property
    def seconds(self) -> float:
        """Wall time since the loop began."""
        self._watch.stop()
        return self._watch.seconds

    @property
    def finished(self) -> bool:
        return self.solved or self.trainer.iterations_done >= self.trainer.config.iterations

    def advance(self) -> None:
        trainer, config = self.trainer, self.trainer.config
        trainer.step()
        trainer.iterations_done += 1
        if trainer.iterations_done % config.log_interval == 0:
            self.log()
        if config.checkpoint_interval and trainer.iterations_done % config.checkpoint_interval == 0:
            self.check_finite(float(trainer.first_bad_iteration))  # a save waits for the device anyway
            trainer.save(self.run_dir / "checkpoint.pt")

    def finish(self) -> None:
        """Write what the last interval holds."""
        if self._logged_at[0] != self.trainer.iterations_done:
            self.log()

    def check_finite(self, first_bad: float) -> None:
        """Refuse to go on after an iteration whose loss or gradient was not finite."""
        if first_bad >= 0:
            raise TrainingDivergedError(
                f"Expected finite losses, received NaN or inf in iteration {first_bad:.0f} (env step "
                f"{first_bad * self.trainer.config.batch_size:.0f}). Its updates were skipped. Remedy: a lower "
                f"learning_rate or max_grad_norm, from the last good checkpoint in {self.run_dir}."
            )

    def log(self) -> None:
        trainer, config = self.trainer, self.trainer.config
        steps = trainer.iterations_done * config.batch_size
        now = self.seconds
        since = (trainer.iterations_done - self._logged_at[0]) * config.batch_size
        speed = since / max(now - self._logged_at[1], 1e-9)
        times = {f"time/{name}": value for name, value in trainer.phases.flush().items()}
        row = trainer.metrics.flush(steps, extra={"time/steps_per_second": speed, **times})
        self._logged_at = (trainer.iterations_done, now)
        self.check_finite(row["train/first_bad_iteration"])
        self.mean_return = row.get("episode/mean_return", math.nan)
        self.solved = config.stop_return is not None and self.mean_return >= config.stop_return
        if self.line is not None:
            self.line.update(steps, mean_return=self.mean_return, steps_per_second=speed)
