"""TorchRL's PPO, DQN and SAC scripts with one part replaced at a time, then all, in one graph, and as our trainer.

Each variant runs in a process of its own with empty compiler caches, as the first run of a user does, and is timed from
the making of its parts on: ``first_per_second`` is the speed until the first frames are through, compilation and the
recording of graphs included; ``frames_per_second`` and ``updates_per_second`` are those of the last half of the run;
``run_s`` is the time of the whole run of the example, reckoned from these where the run is cut at ``--limit``.
``times_...`` are the same as multiples of TorchRL's.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrl_perf.bench.dropin_loops import LOOPS
from torchrl_perf.bench.dropin_run import ALL, CAPTURED, FIRST, THEIRS, TRAINER, variants_of
from torchrl_perf.bench.report import Sheet, format_table
from torchrl_perf.runtime import Stopwatch

COLUMNS = ("algorithm", "variant", "lines", "first_per_second", "times_first", "frames_per_second")
COLUMNS += ("updates_per_second", "times_steady", "start_s", "run_s", "times_run", "mean_return", "note")
LINES_OF_GRAPH = 9
"""Lines beside those of the parts that change for an iteration in one graph, as in ``docs/drop_in.md``."""
PATIENCE = 240.0
"""Seconds beyond its limit after which a process is ended."""
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables of the compilers' caches, and their folders."""


@dataclass(frozen=True)
class BenchDropIn:
    """Options of ``torchrl-perf bench dropin``."""

    only: tuple[str, ...] = tuple(LOOPS)
    """Algorithms."""
    parts: tuple[str, ...] = ()
    """Variants: torchrl, which all are compared with, parts by name, first (the first three lines of PPO), all,
    captured, trainer; all by default."""
    frames: int = 0
    """Frames of each run; 0 is the example's number."""
    limit: float = 5.0
    """Seconds after which a run is cut, once its first frames are through."""
    rounds: int = 1
    """Runs of each variant, of which the fastest counts."""
    budget: float = 350.0
    """Seconds after which no variant is begun; 0 is without end."""
    warm: bool = False
    """Use the compiler caches that are there, instead of empty ones."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for dropin.json, dropin_cpu.json on a CPU; the package's bench/results by default."""


def jobs_of(options: BenchDropIn) -> list[tuple[str, str]]:
    """Algorithms and variants to run, in order: what says most first, in case the budget ends."""

    def rank(job: tuple[str, str]) -> int:
        algorithm, variant = job
        if variant == TRAINER:
            return 0 if algorithm == "ppo" else 2
        return 0 if variant in (THEIRS, ALL, CAPTURED, FIRST) else 1

    wanted = [
        (algorithm, variant)
        for algorithm in options.only
        for variant in variants_of(algorithm)
        if not options.parts or variant in (*options.parts, THEIRS)
    ]
    return sorted(wanted, key=rank)


def problems_of(options: BenchDropIn) -> Iterator[str]:
    """What is wrong with the names in the options."""
    known = {"only": list(LOOPS), "parts": list(dict.fromkeys(name for each in LOOPS for name in variants_of(each)))}
    for option, names in known.items():
        unknown = [name for name in getattr(options, option) if name not in names]
        if unknown:
            yield f"{option}: expected names among {', '.join(names)}, received {', '.join(unknown)}. Remedy: these."


def run_apart(algorithm: str, variant: str, device: torch.device, options: BenchDropIn) -> dict[str, Any]:
    """The row of one variant, from a process of its own.

    Returns:
        The row of :func:`torchrl_perf.bench.dropin_run.measure`; one with ``ok`` False and a ``note`` where the process
        failed, with its last line.
    """
    command = [sys.executable, "-m", "torchrl_perf.bench.dropin_run", "--algorithm", algorithm, "--variant", variant]
    command += ["--device", str(device), "--limit", str(options.limit), "--frames", str(options.frames)]
    failed = {"algorithm": algorithm, "variant": variant, "ok": False}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with tempfile.TemporaryDirectory() as folder:
        cold = {} if options.warm else {name: str(Path(folder) / cache) for name, cache in CACHES.items()}
        patience = PATIENCE + options.limit
        try:
            done = subprocess.run(
                command, env=os.environ | cold, capture_output=True, text=True, timeout=patience, check=False
            )
        except subprocess.TimeoutExpired:
            return {**failed, "note": f"ended after {patience:.0f} s"}
    if done.returncode:
        return {**failed, "note": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return {**json.loads(done.stdout.splitlines()[-1]), "load": load}


def lines_of(row: dict[str, Any]) -> int | None:
    """Lines of the script that a variant changes; None for the trainer, which takes the place of the script."""
    if row["variant"] == TRAINER:
        return None
    return len(row["replaced"]) + (LINES_OF_GRAPH if row["variant"] == CAPTURED else 0)


def compared(row: dict[str, Any], theirs: dict[str, Any] | None) -> dict[str, Any]:
    """A row with its speed as multiples of TorchRL's, and the lines that it changes."""
    if "frames_per_second" not in row:
        return row
    times = {}
    if theirs is not None and "frames_per_second" in theirs:
        times = {
            "times_first": row["first_per_second"] / theirs["first_per_second"],
            "times_steady": row["frames_per_second"] / theirs["frames_per_second"],
            "times_run": theirs["run_s"] / row["run_s"],
        }
    return {**row, "lines": lines_of(row), **times}


def faster(row: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """The faster of two rows of one variant."""
    if before is None or "run_s" not in before:
        return row
    return row if "run_s" in row and row["run_s"] < before["run_s"] else before


def with_comparison(found: dict[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, compared, in the order of the variants."""
    order = [(algorithm, variant) for algorithm in LOOPS for variant in variants_of(algorithm)]
    return [compared(found[job], found.get((job[0], THEIRS))) for job in order if job in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes ``dropin.json`` (``dropin_cpu.json`` on a CPU)."""
    import tyro

    options = tyro.cli(BenchDropIn, args=argv, prog="torchrl-perf bench dropin")
    if problems := list(problems_of(options)):
        print("\n".join(problems), file=sys.stderr)
        return 2
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    sheet = Sheet(COLUMNS, "dropin" if device.type == "cuda" else "dropin_cpu", options.out)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    left_out = []
    watch = Stopwatch("cpu").start()
    for number in range(options.rounds):
        for algorithm, variant in jobs_of(options):
            watch.stop()
            if 0 < options.budget < watch.seconds:
                left_out.append(f"{algorithm} {variant}, round {number + 1}")
                continue
            row = run_apart(algorithm, variant, device, options)
            found[algorithm, variant] = {**faster(row, found.get((algorithm, variant))), "rounds": number + 1}
            sheet.rows = with_comparison(found)
            sheet.show(compared(row, found.get((algorithm, THEIRS))))
    print(f"\n{format_table(sheet.rows, COLUMNS)}")
    if left_out:
        print(f"left out, since --budget {options.budget:g} had run out: {'; '.join(left_out)}")
    if sheet.path is not None:
        print(f"written to {sheet.path}")
    return 0 if all(row.get("ok", True) for row in sheet.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
