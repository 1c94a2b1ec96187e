"""Judges a run by what it has left: its rows, its checkpoints, its state."""

import csv
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median

from torchrl_perf.cli.run_folder import find_run, read_status
from torchrl_perf.run_layout import CHECKPOINTS, CONFIG, PROGRESS, read_json
from torchrl_perf.runtime.doctor.checks import Check, Finding, run_checks, short_error

__all__ = ["RunLog", "check_run", "read_log"]

SERIES = ("step", "time/steps_per_second", "gpu/utilization")
MEMORY = ("memory/allocated_mib", "memory/heap_mib", "memory/rss_mib")
OPTION = "option/usage_"
# Columns that may have holes: no episode ended, the driver was silent, a phase did not run.
MAY_BE_EMPTY = ("episode/", "fault/", "gpu/", "time/")
LEAST_ROWS = 8
LEAST_LEAK_MIB = 4.0
SLOWER, MUCH_SLOWER = 0.2, 0.5
LITTLE_USE_PERCENT = 40.0
MOST_OF_ONE_OPTION, LEAST_OF_AN_OPTION, LEAST_OPTIONS = 0.5, 0.05, 3


@dataclass
class Column:
    """What is known of a column once its rows are gone."""

    has_value: bool = False
    """Whether a finite number has come."""
    holes: int = 0
    """Empty cells behind the first number."""
    not_finite: int = 0
    """Cells that hold NaN or inf behind the first finite number, or in a column other than one of episodes."""
    last: float = math.nan
    """Last number."""
    total: float = 0.0
    """Sum of the finite numbers."""


@dataclass
class RunLog:
    """A ``progress.csv``, of which only the columns that are judged as series are kept."""

    rows: int = 0
    """Whole rows."""
    broken: int = 0
    """Lines that are not rows of numbers."""
    not_rising: int = 0
    """Rows whose step is not above that of the row before."""
    columns: dict[str, Column] = field(default_factory=dict)
    """Every column by name."""
    series: dict[str, array] = field(default_factory=dict)
    """Values of some columns, one a row, NaN where there is none."""

    def values(self, name: str) -> list[float]:
        """Finite values of a series behind the first row, whose interval holds compilation and warm-up."""
        return [value for value in self.series.get(name, ())[1:] if math.isfinite(value)]


def read_log(path: Path) -> RunLog:
    """Read a ``progress.csv`` row by row; memory grows with the few columns that are kept.

    Args:
        path: the file.

    Raises:
        ValueError: for a file that has no column ``step``, so is not one of these.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = csv.reader(line.replace("\0", "?") for line in file)  # zeros are what a crash of the machine leaves
        try:
            return _read(lines, path)
        except csv.Error as error:
            raise ValueError(f"{path}: expected a table, received {error}.") from None


def _read(lines: Iterator[list[str]], path: Path) -> RunLog:
    names = next(lines, [])
    if "step" not in names:
        found = ", ".join(names[:8])[:160] or "an empty file"
        raise ValueError(f"{path}: expected a table with a column step, found {found}.")
    log = RunLog(columns={name: Column() for name in names})
    log.series = {name: array("d") for name in names if name in (*SERIES, *MEMORY) or name.startswith(OPTION)}
    for cells in lines:
        if cells:
            _take(log, names, cells)
    return log


def _take(log: RunLog, names: list[str], cells: list[str]) -> None:
    """Add one line."""
    try:
        numbers = [float(cell) if cell else None for cell in cells]
    except ValueError:
        numbers = []
    if len(numbers) != len(names) or numbers[names.index("step")] is None:
        log.broken += 1
        return
    steps = log.series["step"]
    log.rows += 1
    for name, number in zip(names, numbers, strict=True):
        if name == "step" and steps and number is not None and not number > steps[-1]:
            log.not_rising += 1
        if name in log.series:
            log.series[name].append(math.nan if number is None else number)
        _count(log.columns[name], name, number)


def _count(column: Column, name: str, number: float | None) -> None:
    if number is None:
        column.holes += column.has_value
    elif math.isfinite(number):
        column.has_value, column.last = True, number
        column.total += number
    else:
        column.last = number
        column.not_finite += column.has_value or not name.startswith("episode/")


def check_run(run: Path) -> list[Check]:
    """Judge a run that is over, or that goes on.

    Args:
        run: folder of the run.

    Returns:
        state, rows, finite numbers, speed, GPU, memory, checkpoints, options; each with a verdict and a remedy.

    Raises:
        FileNotFoundError: if there is no such folder, or it holds no run.
        ValueError: if its ``progress.csv`` is another program's.
    """
    run = find_run(run, run)
    config, path = read_json(run / CONFIG), run / PROGRESS
    log = read_log(path) if path.is_file() else RunLog()
    frames = [config.get(name) for name in ("num_envs", "num_steps")]
    batch = math.prod(size for size in frames if isinstance(size, int))
    return run_checks(
        {
            "state": partial(_state, run),
            "rows": partial(_rows, log, has_file=path.is_file()),
            "finite numbers": partial(_finite, log, on_nan=config.get("on_nan", "stop")),
            "speed": partial(_speed, log),
            "GPU utilisation": partial(_utilisation, log),
            "device memory": partial(_memory, log, MEMORY[:1], batch),
            "process memory": partial(_memory, log, MEMORY[1:], batch),
            "checkpoint": partial(_checkpoint, run, log, batch),
            "options": partial(_options, log),
        }
    )


def _state(run: Path) -> Finding:
    status = read_status(run)
    resume = "go on with --resume, from the newest checkpoint."
    findings: dict[str, Finding] = {
        "finished": Finding("ok", "finished."),
        "stopped": Finding("warn", "stopped by a signal.", resume),
        "failed": Finding("fail", "ended with an error.", f"read what it printed; {resume}"),
        "killed": Finding("fail", f"says running, process {status.pid} is gone: killed.", resume),
        "running": Finding("warn", f"still running as process {status.pid}.", "judge it again at its end."),
    }
    return findings.get(status.state, Finding("n/a", "the run has left no status.json."))


def _rows(log: RunLog, *, has_file: bool) -> Finding:
    if not has_file:
        return Finding("n/a", "no progress.csv.")
    if log.rows == 0:
        return Finding("fail", "progress.csv has no row.", "a smaller log_interval; or the run ended before its first.")
    if log.not_rising or log.broken:
        found = f"{log.rows} rows, {log.broken} broken lines, {log.not_rising} steps that do not rise."
        return Finding("fail", found, "two processes wrote into one folder, or a disk was full: one run a folder.")
    holes = [name for name, column in log.columns.items() if column.holes and not name.startswith(MAY_BE_EMPTY)]
    if holes:
        found = f"{log.rows} rows, with empty cells in {_some(holes)}."
        return Finding("warn", found, "a metric that is not added in each interval; add it, or leave it out.")
    return Finding("ok", f"{log.rows} rows, whole and rising, up to step {log.series['step'][-1]:,.0f}.")


def _finite(log: RunLog, on_nan: str) -> Finding:
    if log.rows == 0:
        return Finding("n/a", "no rows.")
    remedy = "a lower learning_rate or max_grad_norm, precision='ieee'; on_nan says what a run does then."
    counts = {name: column.total for name, column in log.columns.items()
              if name.startswith("nonfinite/") and column.total > 0}  # fmt: skip
    listed = _some([f"{name.removeprefix('nonfinite/')} {count:,.0f}" for name, count in counts.items()])
    first_bad = log.columns.get("train/first_bad_iteration", Column()).last
    if first_bad >= 0:
        # a run that was told to skip or to roll back has gone on from there
        found = f"not finite from iteration {first_bad:.0f}, on_nan={on_nan}" + (f": {listed}." if counts else ".")
        return Finding("fail" if on_nan == "stop" else "warn", found, remedy)
    bad = {name: column for name, column in log.columns.items() if column.not_finite}
    at_the_end = [name for name, column in bad.items() if not math.isfinite(column.last)]
    if at_the_end:
        return Finding("fail", f"{_some(at_the_end)} end as NaN or inf.", remedy)
    if counts:
        return Finding("warn", f"values that were not finite: {listed}; the run went on without them.", remedy)
    if bad:
        return Finding("warn", f"NaN or inf in {_some(list(bad))}.", remedy)
    return Finding("ok", "every number is finite.")


def _speed(log: RunLog) -> Finding:
    speeds = log.values("time/steps_per_second")
    if len(speeds) < 2:
        return Finding("n/a", "fewer than two intervals behind the first.")
    found = f"{median(speeds):,.0f} steps/s"
    third = len(speeds) // 3
    if len(speeds) < LEAST_ROWS:
        return Finding("ok", f"{found}; too few intervals for a trend.")
    early, late = median(speeds[:third]), median(speeds[-third:])
    change = late / early - 1.0 if early > 0 else 0.0
    found = f"{found}, {change:+.0%} from the first third to the last."
    if change < -SLOWER:
        remedy = "look for memory that grows, a GPU that gets hot (torchrl-perf monitor), another job on the machine."
        return Finding("fail" if change < -MUCH_SLOWER else "warn", found, remedy)
    return Finding("ok", found)


def _utilisation(log: RunLog) -> Finding:
    values = log.values("gpu/utilization")
    if not values:
        return Finding("n/a", "no readings.")
    found = f"{fmean(values):.0f} % on average, {min(values):.0f} to {max(values):.0f} %."
    if fmean(values) < LITTLE_USE_PERCENT:
        remedy = "more num_envs, mode='graph'; `torchrl-perf syncs` for a script of your own."
        return Finding("warn", found, remedy)
    return Finding("ok", found)


def _memory(log: RunLog, columns: Sequence[str], batch: int) -> Finding:
    """Whether memory grows with the iterations, by the first of some readings that the run has."""
    from torchrl_perf.runtime.memory import LeakCheck

    column = next((name for name in columns if name in log.series), columns[0])
    readings = zip(log.series.get("step", ()), log.series.get(column, ()), strict=False)
    pairs = [(step / batch, value) for step, value in readings if math.isfinite(value)]
    check = LeakCheck()
    for iteration, value in pairs:
        check.record(round(iteration), value)
    report = check.report()
    slope = report.slope_mib_per_1000
    if len(pairs) < LEAST_ROWS or not math.isfinite(slope):
        return Finding("n/a", f"{len(pairs)} readings, too few for a slope.")
    found = (
        f"{slope:+.2f} MiB per 1,000 iterations (95 %: {report.low:+.2f} to {report.high:+.2f}), "
        f"{pairs[0][1]:,.1f} to {pairs[-1][1]:,.1f} MiB, by {column}."
    )
    grown = slope * (pairs[-1][0] - pairs[0][0]) / 1000
    # over a run of few iterations a list of a hundred rows has a slope too
    if report.leaks and grown >= LEAST_LEAK_MIB:
        remedy = "look for tensors with their graph, or endless lists, that are kept from iteration to iteration."
        # the resident size moves by whole arenas of the allocator: a hint, no proof
        return Finding("warn" if column == "memory/rss_mib" else "fail", found, remedy)
    return Finding("ok", found)


def _checkpoint(run: Path, log: RunLog, batch: int) -> Finding:
    """Whether the newest checkpoint and the best one load, and how many steps the newest is behind the last row."""
    from torchrl_perf.trainers.run.checkpoint import CheckpointFolder, iteration_of

    folder = CheckpointFolder(run / CHECKPOINTS)
    files = folder.files()
    if not files:
        return Finding("fail", "there is none.", "a checkpoint_interval, so that a run that is killed can go on.")
    has_best = folder.best.is_file()
    errors = _load_errors([files[0], *([folder.best] if has_best else [])])
    if errors:
        older = f"{files[1].name}, the one before, may load" if files[1:] else "there is no older one"
        return Finding("fail", f"{'; '.join(errors)}.", f"{older}; --resume takes a file too.")
    found = f"{files[0].name}{' and best.pt load' if has_best else ' loads'}"
    if log.rows:
        last, saved = log.series["step"][-1], iteration_of(files[0]) * batch
        if last > saved:
            behind = f"{found}, {last - saved:,.0f} steps behind the last row."
            return Finding("warn", behind, "a smaller checkpoint_interval; a resume runs these steps again.")
        return Finding("ok", f"{found}, up to the last row.")
    return Finding("ok", f"{found}.")


def _load_errors(files: Iterable[Path]) -> list[str]:
    """Which of the files cannot be read as a resume would read them, and why."""
    from torchrl_perf.trainers.run.checkpoint import read_checkpoint

    errors = []
    for path in files:
        try:
            read_checkpoint(path)
        except Exception as error:  # what a broken file raises is as various as its faults
            errors.append(f"{path.name} does not load ({short_error(error)})")
    return errors


def _options(log: RunLog) -> Finding:
    """Whether a policy over options has come to use few of them, by their shares over the last quarter of the rows."""
    quarter = max(1, log.rows // 4)
    usage = {}
    for name, values in log.series.items():
        known = [value for value in values[-quarter:] if math.isfinite(value)]
        if name.startswith(OPTION) and known:
            usage[name.removeprefix(OPTION)] = fmean(known)
    if not usage:
        return Finding("n/a", "the run has no options.")
    most = max(usage, key=usage.__getitem__)
    used = sum(share > LEAST_OF_AN_OPTION for share in usage.values())
    found = f"{used} of {len(usage)} options above {LEAST_OF_AN_OPTION:.0%}, {most} has {usage[most]:.0%}."
    if usage[most] > MOST_OF_ONE_OPTION or used < min(LEAST_OPTIONS, len(usage)):
        return Finding("warn", found, "a larger entropy weight or temperature of the controller, looser initiation.")
    return Finding("ok", found)


def _some(names: list[str]) -> str:
    """The first few names of a list."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
