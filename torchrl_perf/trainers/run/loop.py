"""The host side of a run: when to log, save, judge and stop, always one iteration behind the device."""

import logging
import math
from pathlib import Path
from typing import Any, Protocol

from torchrl.record.loggers import Logger

from torchrl_perf.metrics import DeviceMetrics, PhaseTimer, ProgressLine
from torchrl_perf.parallel import Ranks
from torchrl_perf.parallel.join import place_of
from torchrl_perf.run_layout import RunState
from torchrl_perf.runtime.files import CheckpointError
from torchrl_perf.runtime.memory import MemoryGuard
from torchrl_perf.runtime.nvml import GpuSampler
from torchrl_perf.runtime.signals import StopRequest
from torchrl_perf.runtime.timing import Stopwatch
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.run.files import RunFolder
from torchrl_perf.trainers.run.joint_rows import joint_row, rank_of_fault
from torchrl_perf.trainers.run.metric_names import known_metrics, unknown_metric
from torchrl_perf.trainers.run.numerics import NumericalGuard
from torchrl_perf.trainers.run.rank_folder import newest_common
from torchrl_perf.trainers.run.state import TrainState

logger = logging.getLogger("torchrl_perf")


class Trainer(Protocol):
    """The interface of a trainer for :func:`train`.

    Attributes:
        iterations_done: iterations run so far; counted by :func:`train`.
        metrics: flushed once an interval; has ``episode/mean_return``.
        phases: times of the parts of an iteration.
        guard: finds numbers that are not finite, and judges the flushed rows.
        train_state: everything that changes between two iterations.
    """

    iterations_done: int
    metrics: DeviceMetrics
    phases: PhaseTimer
    guard: NumericalGuard
    train_state: TrainState

    @property
    def config(self) -> RunConfig:
        """Settings of the run."""
        ...

    def step(self) -> object:
        """Runs one iteration."""
        ...

    def summarise(self, row: dict[str, float]) -> dict[str, float]:
        """Gets a row of metrics before it is logged, and returns the one to log; most trainers return it as it is."""
        ...


class TrainingDivergedError(RuntimeError):
    """A number was not finite, and the run may or can not go on. The last good checkpoint is kept."""


class RunLoop:
    """Iterations of a run, with its rows, checkpoints, status file, and the decision to stop.

    At the end of an interval the copy of the metrics is started and, if a checkpoint is due, the state is copied to the
    host; then the next iteration is launched; only then is the row read, judged and logged, and the checkpoint written.
    The device thus works while the host does, and a run stops one iteration after the row that ends it, on every
    device. A checkpoint is written after the rows up to it are on disk.

    Args:
        trainer: what to run.
        folder: of the run.
        row_logger: where rows go.
        line: shows the progress, or None.
        evaluation: evaluates the policy, or None; see :func:`~torchrl_perf.trainers.evaluation.evaluation_of`.

    Where several ranks share the run, each has a loop. All take the same decisions, of rows that are those of all.

    Attributes:
        config: settings of the whole run.
        ranks: the processes that share it.
        problem: why the last checkpoint that was due is missing, or an empty text.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        row_logger: Logger,
        line: ProgressLine | None,
        evaluation: Any = None,
    ) -> None:
        config = self.config = trainer.config.whole
        self.ranks: Ranks = getattr(trainer, "ranks", None) or Ranks.alone()
        self._size = self.ranks.size
        self._fault_of: int | None = None  # the rank with the first number of the last row that was not finite
        self._asks = True  # whether ranks ask each other, before the next iteration, if one is to stop
        self.trainer, self.folder, self.line = trainer, folder, line
        self.problem = ""
        self._logger = row_logger
        device = trainer.metrics.device
        self._memory = MemoryGuard(device, rule=config.memory_rule, gc_interval=config.gc_interval)
        self._gpu = GpuSampler(device).start() if device.type == "cuda" else None
        self._notes = trainer.train_state.notes
        self._notes.setdefault("row", {"iteration": trainer.iterations_done})
        self._mean_return = math.nan
        self._row: tuple[int, float] | None = None  # under way: iterations done, seconds
        self._logged = (trainer.iterations_done, 0.0)
        self._snapshot: tuple[int, dict[str, Any]] | None = None  # not written yet
        self._saved: int | None = None
        self._skips = 0
        self._told = False
        self._evaluation = evaluation
        self._evaluating = 0.0  # seconds
        self._earlier = float(self._notes.get("seconds", 0.0))  # before the resume
        self._watch = Stopwatch("cpu").start()

    def start(self) -> None:
        """Before the first iteration: restore the best checkpoint, take a state to roll back to, write the status."""
        self._restore_best()
        self.trainer.guard.snapshot()
        self.write_status("running")

    # -- where the run stands -----------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Wall time since the loop began."""
        self._watch.stop()
        return self._watch.host_seconds

    @property
    def steps(self) -> int:
        """Env steps taken, those before a resume included."""
        return self.trainer.iterations_done * self.config.batch_size

    @property
    def mean_return(self) -> float:
        """Mean return of the last 100 finished episodes at the last row; NaN if none finished."""
        if math.isfinite(self._mean_return):
            return self._mean_return
        return self._notes["row"].get("mean_return", math.nan)

    @property
    def evaluated(self) -> float:
        """The newest evaluation, by the metric that says how good a policy is; NaN without one."""
        return self._notes.get("evaluated", {}).get("value", math.nan)

    @property
    def solved(self) -> bool:
        """Whether a row has reached ``stop_return``."""
        wanted = self.config.stop_return
        return wanted is not None and self.mean_return >= wanted

    @property
    def finished(self) -> bool:
        """Whether the run is over: all iterations are done, or one more after the row that reached the return."""
        done = self.trainer.iterations_done
        return done >= self.config.iterations or (self.solved and done > self._notes["row"]["iteration"])

    @property
    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint in the folder of the run, that all ranks have."""
        if self._size > 1:
            return newest_common(self.folder.path, self._size)
        return next(iter(self.folder.checkpoints.files()), None)

    @property
    def way_on(self) -> str:
        """A sentence on how to continue after an error."""
        newest = self.newest_checkpoint
        if newest is None:
            return f"The run in {self.folder.path} has no checkpoint yet. Remedy: a checkpoint_interval saves them."
        command = f"torchrl-perf train {self.config.algorithm} --resume {self.folder.path}"
        return f"The last checkpoint is {newest}. To go on from it: {command}"

    # -- an iteration -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Launch an iteration, then finish the row and the checkpoint of the one before."""
        trainer, config = self.trainer, self.config
        trainer.step()
        trainer.iterations_done += 1
        self.settle()
        self._memory.after_iteration()
        done = trainer.iterations_done
        if done % config.log_interval == 0:
            self._start_row()
            trainer.guard.snapshot()
        if config.checkpoint_interval and done % config.checkpoint_interval == 0:
            self._take_snapshot()
        if self._evaluation is not None and (done % config.eval_interval == 0 or done == config.iterations):
            self._evaluate()

    def agree_on_stop(self, stop: StopRequest) -> bool:
        """Whether the run is to stop after this iteration: a signal has come to this rank or to another.

        On CUDA, where an iteration is one launch, ranks ask each other once a row, else before each iteration.

        Args:
            stop: of this rank; it gets the signal of another.
        """
        if not self.ranks.several:
            return stop.requested
        if not self._asks:
            return False
        self._asks = self.ranks.device.type != "cuda"
        number = max(self.ranks.values(stop.signum or 0))
        stop.signum = stop.signum or number or None
        return number > 0

    def go_alone(self) -> None:
        """After another rank was lost: what is left to do is done without asking the others."""
        self.ranks = Ranks.alone(self.ranks.device)

    def settle(self) -> None:
        """Read, judge and log the pending row, and write the pending checkpoint.

        Raises:
            TrainingDivergedError: if the row has numbers that are not finite, as ``on_nan`` says.
        """
        if self._row is not None:
            self._finish_row()
        if self._snapshot is not None:
            self._write_snapshot()

    def finish(self, *, save: bool = True) -> None:
        """Save the present state, and log the last interval.

        A resumed run takes the interval up where it is, so its rows are those of a run that was never stopped: the row
        of this interval is not part of the state.

        Args:
            save: whether the state is that of a whole iteration.
        """
        self.settle()
        if save and self._saved != self.trainer.iterations_done:
            self._take_snapshot()
            if self._snapshot is not None:
                self._write_snapshot()
        if self._notes["row"]["iteration"] != self.trainer.iterations_done:
            self._start_row()
            self._finish_row(lasting=False)

    def rescue(self) -> None:
        """After an error: write the pending checkpoint and row, as far as possible."""
        try:
            self.settle()
        except Exception as error:  # the first error is the one to report
            logger.info("what was under way is lost: %s", error)

    def write_status(self, state: RunState) -> None:
        """Write the state of the run to the status file."""
        self.folder.write_status(state, self.steps)

    def close(self) -> None:
        """End the threads of the loop."""
        self._memory.close()
        if self._gpu is not None:
            self._gpu.close()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _start_row(self) -> None:
        self.trainer.metrics.start_flush(self.steps)
        self.trainer.phases.start_flush()
        self._row = (self.trainer.iterations_done, self.seconds - self._evaluating)

    def _finish_row(self, *, lasting: bool = True) -> None:
        """Log the pending row and act on it; a resumed run writes a row again if it is not lasting."""
        assert self._row is not None
        trainer, config = self.trainer, self.config
        (done, now), self._row = self._row, None
        self.folder.check()
        before, then = self._logged
        self._logged = (done, now)
        seconds = max(now - then, 1e-9)
        speed = (done - before) * config.batch_size / seconds
        extra = {
            **self._notes.pop("evaluation", {}),
            "time/steps_per_second": speed,
            "time/experiences_per_second": self._experiences(before, done) / seconds,
            "time/total_seconds": self._earlier + now,
            **{f"time/{name}": value for name, value in (trainer.phases.finish_flush() or {}).items()},
            **self._memory.row(),
            **(self._gpu.latest() if self._gpu is not None else {}),
        }
        row = trainer.metrics.finish_flush(extra, summarise=self._summarise) or {}
        self._asks = True
        self._mean_return = row.get("episode/mean_return", math.nan)
        if lasting:
            value = row.get(config.best_by.removeprefix("-"), math.nan)
            best = {"metric": config.best_by, "value": value}
            self._notes["row"] = {"iteration": done, "mean_return": self._mean_return, **best}
        if self.line is not None:
            self.line.update(done * config.batch_size, mean_return=self._mean_return, steps_per_second=speed)
        self.write_status("running")
        self._judge(row)

    def _summarise(self, row: dict[str, float]) -> dict[str, float]:
        """The row of all ranks, as the trainer has it logged."""
        if self.ranks.several:
            rows = self.ranks.values(row)
            self._fault_of = rank_of_fault(rows)
            row = joint_row(rows, self.trainer.metrics.reductions)
        return self.trainer.summarise(row)

    def _experiences(self, first: int, last: int) -> float:
        config = self.config
        fill = getattr(config, "fill_iterations", 0)  # off-policy: iterations that only fill the buffer
        learning = max(last - fill, 0) - max(first - fill, 0)
        return learning * config.experiences_per_iteration

    def _judge(self, row: dict[str, float]) -> None:
        """Apply ``on_nan`` after a row with numbers that are not finite."""
        guard = self.trainer.guard
        verdict = guard.verdict(row)
        if verdict is None:
            return
        message = verdict.message
        if self._fault_of is not None:
            place = self.ranks.values(place_of(self.ranks.rank))[self._fault_of]
            message = f"On {place}: {message}"
        if verdict.action == "skip":
            if not self._skips:
                logger.warning("%s The columns nonfinite/... count what follows.", message)
            self._skips += 1
            return
        self._snapshot = None  # it holds the numbers that are not finite
        if verdict.action == "stop":
            raise TrainingDivergedError(f"{message} {self.way_on}")
        logger.warning("%s", message)
        guard.rollback()

    def _evaluate(self) -> None:
        """Evaluate the present policy. The next row has the figures, and the best one so far gets a checkpoint."""
        before, done = self.seconds, self.trainer.iterations_done
        figures = self.ranks.of_first(self._evaluation.row)
        self._evaluating += self.seconds - before
        config = self.config
        self._notes["evaluation"] = figures
        value = figures.get(config.best_by.removeprefix("-"), math.nan)
        self._notes["evaluated"] = {
            "iteration": done,
            "metric": config.best_by,
            "best": value,
            "value": figures[config.evaluated_by],
        }
        if config.best_by.removeprefix("-") in figures and self._snapshot is None and self._improves(value):
            self._take_snapshot()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _take_snapshot(self) -> None:
        if self.ranks.all(self.trainer.guard.may_save()):
            self._notes["seconds"] = self._earlier + self.seconds
            self._snapshot = (self.trainer.iterations_done, self.trainer.train_state.snapshot())

    def _write_snapshot(self) -> None:
        """Write the checkpoint that is due; training goes on without it if the disk refuses, and says so once."""
        assert self._snapshot is not None
        self.folder.check()
        (iteration, state), self._snapshot = self._snapshot, None
        self._logger.flush()  # a row that a checkpoint counts as written has to be on disk
        best = self._best_of(iteration)
        try:
            self.folder.checkpoints.write({**state, "notes": {**self._notes, **best}}, iteration)
            self._saved = iteration
            if best:
                self._notes.update(best)
                self.folder.checkpoints.mark_best(iteration)
        except (OSError, CheckpointError) as error:
            if not self.problem:
                last = "none yet" if self._saved is None else f"{self._saved:09d}.pt"
                logger.warning(
                    "the checkpoint of iteration %d cannot be written: %s. Training goes on; the last one is %s. "
                    "Remedy: free space or the permission to write in %s.",
                    *(iteration, error, last, self.folder.checkpoints.path),
                )
            self.problem = f"the last checkpoint could not be written: {error}"
            return
        if self.problem:
            logger.warning("checkpoints can be written again: iteration %d.", iteration)
        self.problem = ""
        self.write_status("running")

    def _best_of(self, iteration: int) -> dict[str, Any]:
        """The note that makes a checkpoint the best one, if its last row says so."""
        metric, row, evaluated = self.config.best_by, self._notes["row"], self._notes.get("evaluated", {})
        if self._evaluation is not None and metric.removeprefix("-").startswith("eval/"):
            if evaluated.get("iteration") != iteration or evaluated.get("metric") != metric:
                return {}  # a checkpoint between two evaluations
            row = {"metric": metric, "value": evaluated["best"]}
        value = row.get("value", math.nan)
        if not metric or row.get("metric") != metric or not math.isfinite(value):
            self._tell_unknown(metric)
            return {}
        return {"best": {"metric": metric, "value": value, "iteration": iteration}} if self._improves(value) else {}

    def _improves(self, value: float) -> bool:
        """Whether a value of the metric that marks the best checkpoint is better than the best so far."""
        metric, before = self.config.best_by, self._notes.get("best", {})
        sign = -1.0 if metric.startswith("-") else 1.0
        # with another metric than before the resume, the comparison starts over
        return math.isfinite(value) and (before.get("metric") != metric or sign * value > sign * before["value"])

    def _tell_unknown(self, metric: str) -> None:
        """Say once that no row has the metric that marks the best checkpoint, if that is so."""
        fill = getattr(self.config, "fill_iterations", 0)  # before, the metrics of updates are not there yet
        if self._told or self.trainer.iterations_done <= fill:
            return
        self._told = True
        if problem := unknown_metric(metric, known_metrics(self.trainer)):
            logger.warning("%s No checkpoint is marked as the best one.", problem)

    def _restore_best(self) -> None:
        """The best checkpoint as the state says, which was saved before ``best.pt`` was renamed."""
        best = self._notes.get("best", {})
        if best.get("iteration") == self.trainer.iterations_done:
            try:
                self.folder.checkpoints.mark_best(best["iteration"])
            except OSError as error:
                logger.warning("best.pt cannot be written: %s.", error)
