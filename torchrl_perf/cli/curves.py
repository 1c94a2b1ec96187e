"""The logged rows of runs, for pictures of them."""

from pathlib import Path
from typing import Any, NamedTuple

from torchrl_perf.metrics.comparison import Curve
from torchrl_perf.metrics.plot import EVALUATION_COLUMN, RETURN_COLUMN, read_progress
from torchrl_perf.run_layout import CONFIG, PROGRESS, read_json
from torchrl_perf.zoo import run_path

__all__ = ["LoggedRun", "curve_of", "groups_of", "logged_run", "metric_of"]

NO_DIFFERENCE = (
    *("seed", "run_dir", "device", "mode", "logger"),
    *("checkpoint_interval", "keep_checkpoints", "gc_interval", "memory_rule", "split_on_oom"),
    *("log_interval", "eval_interval", "eval_episodes", "best_metric"),
)
"""Settings that make no other experiment of a run."""


class LoggedRun(NamedTuple):
    """A run and its rows.

    Attributes:
        path: its folder.
        settings: as the folder has them, the algorithm among them.
    """

    path: Path
    settings: dict[str, Any]


def logged_run(path: Path) -> LoggedRun:
    """A run with rows.

    Args:
        path: its folder, or ``zoo:NAME``.

    Raises:
        FileNotFoundError: for a folder that is not there, is none of a run, or has no rows, and an unknown name.
    """
    path = run_path(path)
    settings = read_json(path / CONFIG)
    if not settings or not (path / PROGRESS).is_file():
        beside = sorted(each.name for each in path.iterdir()) if path.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"run: expected the folder of a run with {CONFIG} and {PROGRESS}, received {path} with {beside}. Remedy: a "
            "folder that is named at the end of a run whose logger is csv."
        )
    return LoggedRun(path, settings)


def metric_of(runs: list[LoggedRun], column: str | None) -> str:
    """The metric to draw: the one that was asked for, evaluations where all runs have them, or the return.

    Args:
        runs: at least one.
        column: the name that was asked for.
    """
    if column is not None:
        return column
    return EVALUATION_COLUMN if all(_has(run, EVALUATION_COLUMN) for run in runs) else RETURN_COLUMN


def _has(run: LoggedRun, column: str) -> bool:
    try:
        return bool(read_progress(run.path / PROGRESS, column)["step"])
    except KeyError:
        return False


def curve_of(run: LoggedRun, column: str) -> Curve:
    """A metric of a run over its steps.

    Raises:
        ValueError: where no row has it.
    """
    try:
        found = read_progress(run.path / PROGRESS, column)
    except KeyError as error:
        raise ValueError(str(error.args[0])) from None
    if not found["step"]:
        raise ValueError(
            f"{run.path}: expected rows with a finite {column}, received none. Remedy: a longer run, or another metric."
        )
    return Curve(found["step"], found[column])


def teaches(name: str) -> bool:
    """Whether a setting makes another experiment of a run."""
    return name not in NO_DIFFERENCE and not name.startswith("wandb_")


def groups_of(runs: list[LoggedRun]) -> dict[str, list[LoggedRun]]:
    """Runs that differ by the seed alone, by a name that says what the others differ in.

    Args:
        runs: in the order in which their groups shall come.
    """
    seen: dict[str, list[LoggedRun]] = {}
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if teaches(name)}
        seen.setdefault(repr(sorted(settings.items())), []).append(run)
    firsts = [group[0].settings for group in seen.values()]
    named: dict[str, list[LoggedRun]] = {}
    for group in seen.values():
        name = _name(group[0].settings, firsts)
        while name in named:
            name += "'"
        named[name] = group
    return named


def _name(settings: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Algorithm and env, and those settings in which groups of the same algorithm and env differ."""
    alike = [each for each in others if all(each.get(key) == settings.get(key) for key in ("algorithm", "env"))]
    differing = [
        f"{key}={_plain(value)}"
        for key, value in settings.items()
        if teaches(key) and any(each.get(key) != value for each in alike)
    ]
    return ", ".join([f"{settings.get('algorithm', 'run')} on {settings.get('env', '?')}", *differing[:4]])


def _plain(value: Any) -> str:
    """A value as a command line has it."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
