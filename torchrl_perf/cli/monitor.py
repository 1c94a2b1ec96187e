"""``torchrl-perf monitor``: watch a run from another terminal.

It reads the files of the run's folder and NVML; the run does not know of it. It loads torch only where there is an
NVIDIA driver.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchrl_perf.cli.command_parser import CommandParser
from torchrl_perf.cli.monitor_view import as_panel, as_text
from torchrl_perf.cli.run_folder import (
    ProgressTail,
    RunStatus,
    find_run,
    finite,
    newest_checkpoint,
    read_status,
)
from torchrl_perf.run_layout import CONFIG, PROGRESS, read_json

__all__ = ["Monitor", "main"]

SPEEDS = ("steps_per_second", "experiences_per_second")
NO_PHASES = (*SPEEDS, "total_seconds")
"""Entries below ``time/`` that are no part of an interval."""
# A look costs 2.5 ms of a core, and a run that shares that core 8 ms: once in two seconds is less than half a percent.
INTERVAL = 2.0
LEAST_INTERVAL = 0.05


class Monitor:
    """Takes snapshots of a run.

    Args:
        run: folder of the run.
        read_gpu: returns readings under ``gpu/``; by default NVML's, of the device that the run's process sees.
    """

    def __init__(self, run: Path, read_gpu: Callable[[], dict[str, float]] | None = None) -> None:
        self.run = run
        self._tail = ProgressTail(run / PROGRESS)
        self._config = read_json(run / CONFIG)
        self._read_gpu = read_gpu or _gpu_reader(str(self._config.get("device", "auto")), read_status(run).pid)

    def snapshot(self) -> dict[str, Any]:
        """Look at the run; what is unknown is None, and numbers that are not finite are left out.

        Returns:
            run (path), name, state, pid, step, total_steps, seconds_left, wall_time (s), steps_per_second,
            experiences_per_second, mean_return, phases (name to share of the time), gpu (utilization, memory_used_mib,
            memory_total_mib, temperature_c, power_w), memory (as the run has logged it), checkpoint (name),
            checkpoint_age (s), row_age (s), nonfinite (key to count of the last interval), first_bad_iteration, curves
            (values of the latest rows). Ready for ``json.dumps``.
        """
        status = read_status(self.run)  # before the rows: a run that is over has written its last one
        self._tail.poll()
        rows = list(self._tail.rows)
        row = rows[-1] if rows else {}
        get = {name: number for name, value in row.items() if (number := finite(value)) is not None}.get
        checkpoint = newest_checkpoint(self.run)
        step, total, speed = get("step", status.step), self._config.get("total_steps"), get("time/steps_per_second")
        total = total if isinstance(total, int | float) and total > 0 else None
        left = max(total - step, 0) / speed if total and step is not None and speed else None
        first_bad = get("train/first_bad_iteration", -1.0)
        return {
            "run": str(self.run),
            "name": self.run.resolve().name,
            "state": status.state,
            "pid": status.pid,
            "step": None if step is None else int(step),
            "total_steps": total,
            "seconds_left": left,
            "wall_time": get("wall_time"),
            **{name: get(f"time/{name}") for name in SPEEDS},
            "mean_return": _latest(rows, "episode/mean_return"),
            "phases": phase_shares(row),
            "gpu": _below("gpu/", self._read_gpu() or row),
            "memory": _below("memory/", row),
            "checkpoint": checkpoint.name if checkpoint else None,
            "checkpoint_age": checkpoint.age if checkpoint else None,
            "row_age": self._row_age() if rows else None,
            "nonfinite": {key: count for key, count in _below("nonfinite/", row).items() if count > 0},
            "first_bad_iteration": first_bad if first_bad is not None and first_bad >= 0 else None,
            "curves": {
                **{name: _curve(rows, f"time/{name}") for name in SPEEDS},
                "mean_return": _curve(rows, "episode/mean_return"),
            },
        }

    def _row_age(self) -> float | None:
        try:
            return max(0.0, time.time() - self._tail.path.stat().st_mtime)
        except OSError:
            return None

    def snapshots(self, interval: float) -> Iterator[dict[str, Any]]:
        """Snapshots at intervals, the first at once, until the run is over; the last one shows its end.

        Args:
            interval: seconds between two.
        """
        while True:
            snapshot = self.snapshot()
            yield snapshot
            if RunStatus(snapshot["state"]).is_over:
                return
            time.sleep(interval)


def phase_shares(row: dict[str, float]) -> dict[str, float]:
    """How the time of an interval splits into the phases of an iteration.

    Args:
        row: seconds under ``time/<phase>`` and ``time/total``.

    Returns:
        Phase to share of the total, and what no phase covers as ``other``; empty without a total.
    """
    times = {name: value for name, value in _below("time/", row).items() if name not in NO_PHASES}
    total = times.pop("total", 0.0)
    if total <= 0:
        return {}
    shares = {name: value / total for name, value in times.items()}
    rest = 1.0 - sum(shares.values())
    return {**shares, "other": rest} if rest >= 0.005 else shares


def _below(prefix: str, row: dict[str, float]) -> dict[str, float]:
    """The finite cells whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in row.items()
            if name.startswith(prefix) and finite(value) is not None}  # fmt: skip


def _curve(rows: list[dict[str, float]], column: str) -> list[float]:
    return [value for row in rows[-24:] if (value := finite(row.get(column))) is not None]


def _latest(rows: list[dict[str, float]], column: str) -> float | None:
    """The newest finite value: an interval in which no episode ended has none."""
    return next((value for row in reversed(rows) if (value := finite(row.get(column))) is not None), None)


def _gpu_reader(device: str, pid: int | None) -> Callable[[], dict[str, float]]:
    """Reads the GPU of a run, as the process of the run numbers its devices."""
    device = "cuda" if device == "auto" else device
    if not device.startswith("cuda") or not _has_driver():
        return dict
    from torchrl_perf.runtime.nvml import GpuReader

    return GpuReader(device, environ=_environment(pid)).read


def _has_driver() -> bool:
    return os.name == "nt" or any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg"))


def _environment(pid: int | None) -> dict[str, str]:
    """Environment of the run's process where it may be read, else this one's."""
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes() if pid is not None else b""
    except OSError:
        block = b""
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in block.split(b"\0") if entry)
    return {name: value for name, _, value in pairs} or dict(os.environ)


def main(argv: list[str]) -> int:
    """Watch a run until it is over; see ``torchrl-perf monitor --help``.

    Args:
        argv: the arguments behind ``monitor``.

    Returns:
        Exit code: 0, after Ctrl-C too; 2 if there is no run to watch.
    """
    options = parser().parse_args(argv)
    try:
        monitor = Monitor(find_run(options.run, options.run_dir))
    except FileNotFoundError as error:
        print(f"torchrl-perf monitor: {error}", file=sys.stderr)
        return 2
    try:
        if options.once:
            _show(monitor.snapshot(), as_json=options.json)
        elif options.json or not sys.stdout.isatty():
            for snapshot in monitor.snapshots(options.interval):
                _show(snapshot, as_json=options.json)
        else:
            _watch(monitor, options.interval)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # The reader has gone; Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = CommandParser(
        "torchrl-perf monitor",
        description="Watch a run: speed, return, how its time is spent, the GPU, checkpoints. Reads the run's files "
        "and NVML only; ends with the run, or with Ctrl-C.",
    )
    made.add_argument("run", nargs="?", type=Path, metavar="RUN", help="folder of the run (default: the newest)")
    made.add_argument("--run-dir", type=Path, default=Path("runs"), help="where to look for it (default: runs)")
    made.add_argument("--interval", type=_seconds, default=INTERVAL, help="seconds between two looks (default: 2)")
    made.add_argument("--once", action="store_true", help="look once and end")
    made.add_argument("--json", action="store_true", help="print a line of JSON at each look")
    return made


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_INTERVAL <= value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"expected seconds of at least {LEAST_INTERVAL}, received {text!r}. Remedy: --interval {LEAST_INTERVAL:g} "
            "or more"
        )
    return value


def _show(snapshot: dict[str, Any], *, as_json: bool) -> None:
    print(json.dumps(snapshot, allow_nan=False) if as_json else as_text(snapshot), flush=True)


def _watch(monitor: Monitor, interval: float) -> None:
    """The live screen."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:  # plain text does without rich
        for snapshot in monitor.snapshots(interval):
            _show(snapshot, as_json=False)
        return
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        for snapshot in monitor.snapshots(interval):
            live.update(as_panel(snapshot, console.width), refresh=True)
