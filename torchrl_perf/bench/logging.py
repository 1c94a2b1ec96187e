"""Logging: metrics read one by one against one deferred packed copy, and what a row costs an iteration of PPO.

The loop is that of a run with ``log_interval=1``: launch an iteration, read the row of the one before, and end the
interval of this one. Variants take turns in short blocks, so that a change of clocks or of load reaches them all.
"""

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchrl.record.loggers.csv import CSVLogger

from torchrl_perf.bench.report import format_table, write_results
from torchrl_perf.metrics import DeviceMetrics, LoggerGroup, make_loggers
from torchrl_perf.runtime import Stopwatch, synchronize
from torchrl_perf.trainers import PPOConfig, PPOTrainer

METRICS = 20
LIMIT_PERCENT = 1.0
WORK, ITERATION = "work of a row, all threads", "an iteration of PPO"
COLUMNS = ("part", "variant", "us", "p10_us", "p90_us", "cost_percent", "verdict")
LOGGERS = ("csv", "csv,tensorboard", "csv,wandb", "csv,wandb,tensorboard")
HOST_NUMBERS = {f"time/part{i}": i + 0.5 for i in range(6)}


@dataclass(frozen=True)
class BenchLogging:
    """Options of ``torchrl-perf bench logging``."""

    quick: bool = False
    """Fewer rounds, under a minute on a CPU; written only where --out says so."""
    shape: str | None = None
    """Envs x steps of a PPO iteration; 4096x128 on CUDA, 128x32 on a CPU."""
    rounds: int | None = None
    """Blocks of each variant; 24, or 6 with --quick."""
    seconds: float = 0.5
    """Length of a block."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for logging.json; the package's bench/results by default."""


def read_rows(device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Time of bringing 20 metrics to the host: ``.item()`` of each, one packed copy, and what a deferred one waits."""
    values = {f"m{i}": torch.rand((), device=device) for i in range(METRICS)}
    metrics = DeviceMetrics(device)
    state = {"step": 0}

    def packed() -> None:
        metrics.add_all(values)
        state["step"] += 1
        metrics.flush(state["step"])

    def deferred() -> None:
        metrics.add_all(values)
        state["step"] += 1
        metrics.start_flush(state["step"])
        if metrics.pending > 1:
            metrics.finish_flush()

    variants: dict[str, Callable[[], object]] = {
        ".item() of each": lambda: [value.item() for value in values.values()],
        "packed, waited for": packed,
        "packed, deferred": deferred,
    }
    times = {name: _host_times(fn, repeats, device) for name, fn in variants.items()}
    return [_row(f"read {METRICS} metrics", name, seconds) for name, seconds in times.items()]


def call_rows(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Time of the call that logs a row of 20 numbers, in the thread that trains."""
    row = {f"loss/m{i}": i + 0.5 for i in range(METRICS)}
    state = {"step": 0}

    def next_step() -> int:
        state["step"] += 1
        return state["step"]

    torchrl = CSVLogger(exp_name="torchrl", log_dir=str(folder))

    def scalars() -> None:
        step = next_step()
        for name, value in row.items():
            torchrl.log_scalar(name, value, step=step)

    variants: dict[str, Callable[[], object]] = {
        "TorchRL CSVLogger, log_scalar of each": scalars,
        "TorchRL CSVLogger, log_metrics": lambda: torchrl.log_metrics(row, step=next_step()),
    }
    groups = {name: _make(name, folder / f"call-{i}") for i, name in enumerate(_available())}
    for name, group in groups.items():
        variants[f"{name}, log_row"] = lambda group=group: group.log_row(row, {}, next_step())
    rows = [_row("log a row", name, _host_times(fn, repeats, torch.device("cpu"))) for name, fn in variants.items()]
    for name, group in groups.items():
        group.drain(60.0)
        before = time.process_time()
        for _ in range(repeats):
            group.log_row(row, {}, next_step())
        group.drain(60.0)
        work = (time.process_time() - before) / repeats
        rows.append(_row(WORK, name, [work]))
        group.close()
    return rows


class Loop:
    """One PPO trainer and several ways to log each of its iterations.

    Args:
        options: the benchmark's.
        device: where it trains.
        folder: where loggers write.
    """

    def __init__(self, options: BenchLogging, device: torch.device, folder: Path) -> None:
        num_envs, num_steps = map(int, (options.shape or _usual_shape(device)).split("x"))
        mode = "graph" if device.type == "cuda" else "eager"
        config = PPOConfig(
            num_envs=num_envs, num_steps=num_steps, total_steps=10**12, device=str(device), mode=mode, logger="none"
        )
        self.trainer = PPOTrainer(config)
        self.device = device
        self.steps = 0
        self.groups: dict[str, LoggerGroup] = {}
        self._plain = CSVLogger(exp_name="torchrl", log_dir=str(folder))
        self._values = torch.rand(METRICS, device=device).unbind()
        # The names come with the first iterations; on CUDA these also compile and record the graph.
        for _ in range(4):
            self.trainer.step()
        self.variants: dict[str, Callable[[], object]] = {
            "not read, not logged": lambda: None,
            "deferred, no logger": self._deferred,
        }
        for index, name in enumerate(_available()):
            self.groups[name] = _make(name, folder / f"run-{index}")
            self.variants[f"deferred, {name}"] = self._deferred
        self.variants[".item() of each, TorchRL CSVLogger.log_scalar"] = self._one_by_one

    def block(self, name: str, iterations: int) -> float:
        """Seconds of an iteration, over a block of them that is logged in one of the ways."""
        metrics, log = self.trainer.metrics, self.variants[name]
        metrics.logger = self.groups.get(name.removeprefix("deferred, "))
        synchronize(self.device)
        with Stopwatch("cpu") as watch:
            for _ in range(iterations):
                self.trainer.step()
                self.steps += 1
                log()
            while metrics.finish_flush(HOST_NUMBERS) is not None:
                pass
            synchronize(self.device)
        metrics.reset()
        # wait for the writers, so that they do not load the next variant
        if isinstance(metrics.logger, LoggerGroup):
            metrics.logger.drain(30.0)
        return watch.host_seconds / iterations

    def close(self) -> None:
        """End the loggers and the trainer."""
        for group in self.groups.values():
            group.close()
        self.trainer.close()

    def _deferred(self) -> None:
        # the iteration has been launched: now the row of the one before it is read
        self.trainer.metrics.finish_flush(HOST_NUMBERS)
        self.trainer.metrics.start_flush(self.steps)

    def _one_by_one(self) -> None:
        # On CUDA the first waits for the iteration, so that the next is launched only after its end.
        for index, value in enumerate(self._values):
            self._plain.log_scalar(f"loss/m{index}", value.item(), step=self.steps)


def loop_rows(options: BenchLogging, device: torch.device, folder: Path) -> list[dict[str, Any]]:
    """Time of an iteration that is logged, and its cost against one that is not, of pairs of neighbouring blocks."""
    loop = Loop(options, device, folder)
    rounds = options.rounds or (6 if options.quick else 24)
    one = max(loop.block("not read, not logged", 3) for _ in range(2))
    iterations = max(2, round(options.seconds * (0.5 if options.quick else 1.0) / one))
    times: dict[str, list[float]] = {name: [] for name in loop.variants}
    for name in loop.variants:
        loop.block(name, 2)
    for index in range(rounds):
        names = list(loop.variants)
        # back and forth, so that a drift over a round favours nobody
        for name in names if index % 2 == 0 else reversed(names):
            times[name].append(loop.block(name, iterations))
    loop.close()
    base = times["not read, not logged"]
    rows = []
    for name, seconds in times.items():
        costs = [100 * (mine / none - 1) for mine, none in zip(seconds, base, strict=True)]
        cost = statistics.median(costs)
        spread = 1.25 * statistics.stdev(costs) / len(costs) ** 0.5 if len(costs) > 1 else float("nan")
        row = _row(ITERATION, name, seconds)
        if name != "not read, not logged":
            row |= {"cost_percent": cost, "cost_error": spread, "verdict": _verdict(cost, spread)}
        rows.append(row | {"iterations": iterations, "rounds": rounds})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes ``logging.json``."""
    import tyro

    options = tyro.cli(BenchLogging, args=argv, prog="torchrl-perf bench logging")
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    repeats = 100 if options.quick else 500
    with tempfile.TemporaryDirectory() as folder, _wandb_offline():
        rows = read_rows(device, repeats)
        rows += call_rows(Path(folder) / "calls", repeats)
        rows += loop_rows(options, device, Path(folder) / "loop")
    rows = [_compared(row, rows) for row in rows]
    print(format_table(rows, COLUMNS))
    if not options.quick or options.out is not None:
        print(f"written to {write_results('logging' if device.type == 'cuda' else 'logging_cpu', rows, options.out)}")
    return 0


def _usual_shape(device: torch.device) -> str:
    return "4096x128" if device.type == "cuda" else "128x32"


def _available() -> list[str]:
    """Sets of loggers whose packages are installed."""
    return [
        names for names in LOGGERS if all(importlib.util.find_spec(n) for n in names.split(",") if n not in ("csv",))
    ]


def _make(names: str, folder: Path) -> LoggerGroup:
    group = make_loggers(names, folder, "bench", "logging", {"metrics": METRICS})
    group.drain(60.0)
    return group


@contextmanager
def _wandb_offline() -> Iterator[None]:
    """No server takes part in a measurement, and W&B prints nothing between the tables."""
    before = {name: os.environ.get(name) for name in ("WANDB_MODE", "WANDB_SILENT")}
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _host_times(fn: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds of single calls by the host clock, the device idle before each."""
    for _ in range(5):
        fn()
    times = []
    for _ in range(repeats):
        synchronize(device)
        with Stopwatch("cpu") as watch:
            fn()
        times.append(watch.host_seconds)
    return times


def _row(part: str, variant: str, seconds: list[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(seconds, n=10) if len(seconds) > 1 else seconds * 9
    return {
        "part": part,
        "variant": variant,
        "us": statistics.median(seconds) * 1e6,
        "p10_us": cuts[0] * 1e6,
        "p90_us": cuts[-1] * 1e6,
    }


def _verdict(cost: float, spread: float) -> str:
    if cost + 2 * spread < LIMIT_PERCENT:
        return f"under {LIMIT_PERCENT:g} %"
    return f"over {LIMIT_PERCENT:g} %" if cost - 2 * spread > LIMIT_PERCENT else "within the noise"


def _bound(work_us: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The most that the work of a row can cost an iteration: all of it, if nothing of it overlaps."""
    iteration = next(row["us"] for row in rows if row["part"] == ITERATION)
    bound = 100 * work_us / iteration
    return {
        "cost_percent": bound,
        "verdict": f"under {LIMIT_PERCENT:g} %" if bound < LIMIT_PERCENT else "has to overlap",
    }


def _compared(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with how it stands to the first of its part, where it has no verdict yet."""
    first = next(other for other in rows if other["part"] == row["part"])
    if row["part"] == WORK:
        return row | _bound(row["us"], rows)
    if "verdict" in row or row is first or row["part"] == ITERATION:
        return row
    ratio = first["us"] / row["us"]
    return row | {"verdict": f"{ratio:.1f} x faster" if ratio >= 1 else f"{1 / ratio:.1f} x slower"}


if __name__ == "__main__":
    sys.exit(main())
