"""A whole training run: iterations, rows of metrics, checkpoints, and a clean stop."""

import logging
import math
import os
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchrl_perf.metrics import ProgressLine, make_loggers, save_learning_curve
from torchrl_perf.parallel import RankLostError, Ranks, RankStoppedError
from torchrl_perf.parallel.watch import RankWatch, watched
from torchrl_perf.run_layout import PROGRESS, RunState
from torchrl_perf.runtime.signals import StopRequest
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.evaluation import Episodes, evaluation_of
from torchrl_perf.trainers.mujoco_c import episodes_in_c
from torchrl_perf.trainers.run.files import RunFolderError, card, make_run_dir
from torchrl_perf.trainers.run.loop import RunLoop, Trainer, TrainingDivergedError
from torchrl_perf.trainers.run.made_of import env_name
from torchrl_perf.trainers.run.rank_folder import open_folder, save_rescued
from torchrl_perf.trainers.run.schedules import go_on

__all__ = ["RunFolderError", "RunResult", "Trainer", "TrainingDivergedError", "train"]

logger = logging.getLogger("torchrl_perf")


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    run_dir: Path
    """Folder with config.json, machine.json, status.json, progress.csv, checkpoints and learning_curve.png."""
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
    """0; 128 + the number of the signal that stopped the run; 1 if its last state could not be saved."""
    problem: str = ""
    """Why the last state could not be saved."""
    evaluated: float = math.nan
    """The last evaluation, by default the mean return of its episodes; NaN without one."""
    in_c: Episodes | None = None
    """Episodes in MuJoCo's own C code, of a policy that learnt on MuJoCo Warp; None for any other."""

    def __str__(self) -> str:
        evaluated = f", evaluated {self.evaluated:.1f}" if math.isfinite(self.evaluated) else ""
        if self.in_c is not None:
            evaluated += f", in MuJoCo's C code {self.in_c.mean_return:.1f} ± {self.in_c.return_deviation:.1f}"
        return (
            f"{self.steps} steps in {self.seconds:.1f} s ({self.steps_per_second:,.0f} steps/s), mean return of the "
            f"last 100 episodes {self.mean_return:.1f}{evaluated}, saved in {self.run_dir}"
        )


def train(trainer: Trainer, run_dir: str | os.PathLike[str] | None = None, *, progress: bool = True) -> RunResult:
    """Runs ``trainer`` to the end of its configuration, its stop return, a signal, or a number that is not finite.

    With ``eval_interval`` the policy is evaluated in envs of its own; see
    :class:`~torchrl_perf.trainers.evaluation.Evaluation`.

    Metrics cross to the host in one copy every ``log_interval`` iterations, read while the next iteration runs. Ctrl-C
    and SIGTERM finish the iteration, write a checkpoint and close the loggers; the result's ``exit_code`` says so. A
    second one ends the process at once, as a kill may: the files on disk still load. Rows that were logged after the
    checkpoint that ``trainer`` has loaded are dropped; the run writes them again.

    Several ranks call it together: the first one writes rows, status and the folder, each one its checkpoints. Where a
    rank is lost, the others save what they can and end.

    Args:
        trainer: a new trainer, or one that has loaded a checkpoint.
        run_dir: folder of the run; by default a new one under ``config.run_dir``.
        progress: whether to show a line in the terminal.

    Raises:
        RunFolderError: an OSError, before anything is run, if the folder cannot be used.
        ValueError: before anything is written, if evaluations are wanted and there is no env for them.
        TrainingDivergedError: naming the number that was not finite, after the loggers are closed.
        RankLostError: where another rank has died, naming it, its host and the step.
        RankStoppedError: where another rank has failed, and says why.
        Exception: any other of the loop, with a note on how to go on, after the loggers are closed.
    """
    names = _names_of(trainer)
    evaluation = evaluation_of(trainer)
    with nullcontext() if evaluation is None else closing(evaluation):
        return _train(trainer, run_dir, names, evaluation, progress)


def _train(
    trainer: Trainer, run_dir: str | os.PathLike[str] | None, names: tuple[str, str], evaluation: Any, progress: bool
) -> RunResult:
    """The run, in its folder."""
    config, (env, label) = trainer.config.whole, names
    ranks: Ranks = getattr(trainer, "ranks", None) or Ranks.alone()
    resumes = run_dir is not None
    path = Path(run_dir) if resumes else ranks.of_first(lambda: make_run_dir(config, env, label))
    if resumes:
        go_on(trainer, path)  # compares the settings with those in the folder, which are overwritten below
    with open_folder(ranks, path, config, env) as folder:
        stored, names_of = card(config, env), (path, config.wandb_project, path.name)
        places = config.logger if ranks.first else "none"
        rows = make_loggers(places, *names_of, stored, resume=resumes, wandb=config.wandb)
        with closing(rows), _progress_line(config, progress and ranks.first) as line:
            if resumes:
                rows.load_state_dict({"local": {"last_step": _last_step(trainer)}})
            trainer.metrics.logger = rows
            loop = RunLoop(trainer, folder, rows, line, evaluation)
            with watched(ranks, lambda: trainer.iterations_done) as watch:
                loop.start()
                result = _run(loop, watch)
            if ranks.first and not result.exit_code:
                result = replace(result, in_c=episodes_in_c(trainer))
            rows.flush()
            picture = _draw(path, f"{config.algorithm.upper()} on {label}", result.mean_return) if ranks.first else None
            if picture is not None:
                rows.log_file("learning_curve", picture, result.steps)
    return result


def _run(loop: RunLoop, watch: RankWatch | None = None) -> RunResult:
    """Run the loop to its end, whether it is good or bad, and write that to the status file last."""
    trainer, before = loop.trainer, loop.trainer.iterations_done
    state: RunState = "failed"
    try:
        with StopRequest() as stop:
            whole = _iterate(loop, stop, watch)
            exit_code = 0 if loop.finished else stop.exit_code
            loop.finish(save=whole)
        state = "stopped" if exit_code else "finished"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            state = "stopped"
        elif isinstance(error, RankLostError | RankStoppedError):
            loop.rescue()
            if isinstance(error, RankLostError):
                save_rescued(loop.trainer, loop.folder.path)
                error.args = (f"{error} {loop.way_on}",)
        elif not isinstance(error, TrainingDivergedError):
            loop.rescue()
            error.add_note(loop.way_on)
        raise
    finally:
        loop.write_status(state)
        loop.close()
    seconds = loop.seconds
    return RunResult(
        run_dir=loop.folder.path,
        steps=loop.steps,
        mean_return=loop.mean_return,
        seconds=seconds,
        steps_per_second=(trainer.iterations_done - before) * loop.config.batch_size / max(seconds, 1e-9),
        solved=loop.solved,
        exit_code=1 if loop.problem else exit_code,
        problem=loop.problem,
        evaluated=loop.evaluated,
    )


def _iterate(loop: RunLoop, stop: StopRequest, watch: RankWatch | None) -> bool:
    """Iterations until the run is over; whether the last one is whole."""
    try:
        while not loop.finished and not loop.agree_on_stop(stop):
            loop.advance()
    except TrainingDivergedError:
        raise
    except Exception as error:
        if watch is not None:
            loop.go_alone()
            watch.explain(error, loop.steps)  # raises where another rank is why
        if not stop.requested:
            raise
        # a signal to the whole process group also ends workers and compilers that the iteration needs
        logger.warning("the iteration was cut off by signal %s (%r); the last checkpoint is kept.", stop.signum, error)
        loop.rescue()
        return False
    return True


def _names_of(trainer: Trainer) -> tuple[str, str]:
    """What the settings of a run call its env, by which it can be made again where it has a name; and its class."""
    source = getattr(trainer, "source", None)
    label = "" if source is None else source.label
    if getattr(trainer, "own_env", False):
        name = label or env_name(trainer.config, _env_of(trainer))
        return name, name
    name = env_name(trainer.config, None)
    return name, label or name


def _env_of(trainer: Trainer) -> Any:
    """The env that a trainer was given, or its collector where it has none; None for one that its config names."""
    if not getattr(trainer, "own_env", False):
        return None
    return getattr(trainer, "env", None) or getattr(trainer, "collector", None)


def _progress_line(config: RunConfig, shown: bool) -> AbstractContextManager[ProgressLine | None]:
    return closing(ProgressLine(config.iterations * config.batch_size)) if shown else nullcontext()


def _last_step(trainer: Trainer) -> int:
    """Env steps at the last row that is part of the state of a trainer."""
    notes = trainer.train_state.notes
    row = notes["row"]["iteration"] if "row" in notes else trainer.iterations_done
    return row * trainer.config.whole.batch_size


def _draw(run_dir: Path, title: str, mean_return: float) -> Path | None:
    """Writes the picture of the run, where there is a curve; its path, or None."""
    if not (run_dir / PROGRESS).is_file() or not math.isfinite(mean_return):
        return None
    picture = run_dir / "learning_curve.png"
    try:
        save_learning_curve(run_dir / PROGRESS, picture, title=title)
    except OSError as error:
        logger.warning("learning_curve.png cannot be written: %s.", error)
        return None
    return picture
