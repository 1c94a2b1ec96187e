"""The claims of the original programs, each as an experiment: before and after on the same inputs, and a verdict.

``before`` is the original's pattern, written anew in :mod:`studies.originals`; ``after`` what the original
made of it, and what this package does instead. Outputs are compared before anything is timed, and where they differ
nothing is. Slower rows are printed like any other. Rows are written as they come.
"""

import importlib
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from studies.sitting import ROW_COLUMNS, VERDICT_COLUMNS, Sitting
from torchrl_perf.bench.report import format_table, write_results
from torchrl_perf.runtime import machine_card

SYSTEMS: dict[str, tuple[str, ...]] = {
    "active_dynamics": ("claims", "agent"),
    "durotaxis": ("claims", "colony"),
    "fuel_breaks": ("claims", "fire"),
    "options_market": ("claims", "loops"),
    "marine": ("claims", "env", "loops"),
}
"""Modules of each system's experiments, in the folder of its name, each with ``EXPERIMENTS``."""
RESULTS = Path(__file__).parent / "results"
"""The committed measurements, a file for each system and device."""
MORE_TABLES = {"entropy": ("divergence",)}
SAME_MACHINE = ("gpu", "cpu", "cores")


@dataclass(frozen=True)
class BenchClaims:
    """Options of ``torchrl-perf bench claims``."""

    system: tuple[str, ...] = tuple(SYSTEMS)
    """Systems whose claims are measured: active_dynamics (a latent model), durotaxis (a colony, PPO), fuel_breaks
    (DQN), options_market (SAC with options), marine (navigation, six agents)."""
    only: tuple[str, ...] = ()
    """Experiments to run; all by default. Rows of others that were written on the same machine are kept."""
    quick: bool = False
    """Small sizes and few turns, written only where --out says so."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Whether to measure the variants that need the compiler, which takes minutes: on a CPU unless --quick."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for colony_claims.json and so on; the package's bench/results by default."""


def experiments(system: str) -> dict[str, Callable[[Sitting], None]]:
    """Experiments of a system by name, in order."""
    found: dict[str, Callable[[Sitting], None]] = {}
    for module in SYSTEMS[system]:
        found |= importlib.import_module(f"studies.{system}.{module}").EXPERIMENTS
    return found


def run(sitting: Sitting, chosen: dict[str, Callable[[Sitting], None]]) -> None:
    """Runs experiments; one that fails leaves a row that says so, and the others are worth a figure."""
    for name, experiment in chosen.items():
        print(f"-- {sitting.system} {name}", flush=True)
        seed_all()
        try:
            experiment(sitting)
        except Exception as error:
            traceback.print_exc()
            note = f"failed: {type(error).__name__}: {str(error)[:200]}"
            sitting.add(name, "", "", ok=False, note=note)


def seed_all() -> None:
    """The same random numbers for each experiment, whichever run before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def kept_rows(path: Path, replaced: set[str]) -> list[dict[str, Any]]:
    """Rows of the file's other experiments, if it was written on a machine like this one."""
    if not path.exists():
        return []
    stored, card = json.loads(path.read_text()), machine_card()
    if any(stored["machine"].get(key) != card.get(key) for key in SAME_MACHINE):
        return []
    if stored["machine"]["packages"].get("torch") != card["packages"].get("torch"):
        return []
    return [row for row in stored["rows"] if row.get("experiment") not in replaced]


def tables_of(chosen: Iterable[str]) -> set[str]:
    """Names in the column "experiment" of what is chosen: one experiment may fill two."""
    return {table for name in chosen for table in (name, *MORE_TABLES.get(name, ()))}


def file_name(system: str, device: torch.device) -> str:
    """Name of a system's results, without the ending."""
    return system if device.type == "cuda" else f"{system}_cpu"


def measure(system: str, options: BenchClaims, device: torch.device) -> Sitting:
    """All chosen experiments of one system."""
    available = experiments(system)
    chosen = {name: fn for name, fn in available.items() if not options.only or name in options.only}
    compile_too = options.compile == "yes" or (options.compile == "auto" and device.type == "cpu" and not options.quick)
    sitting = Sitting(system, device, options.quick, compile_too)
    writes = not options.quick or options.out is not None
    if writes:
        folder = Path(options.out) if options.out is not None else RESULTS
        name = file_name(system, device)
        kept = kept_rows(folder / f"{name}.json", tables_of(chosen)) if options.only else []
        sitting.save = partial(_write, sitting, name, kept, (options.out, machine_card()))
    run(sitting, chosen)
    return sitting


def _write(sitting: Sitting, name: str, kept: list[dict[str, Any]], where: tuple[str | None, dict[str, Any]]) -> None:
    out, card = where
    write_results(name, [*kept, *sitting.rows, *sitting.verdicts], out or str(RESULTS), card)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the tables and writes one file for each system.

    Returns:
        1 where an output was not what it has to equal, or an experiment failed; 2 for an unknown system or experiment.
    """
    import tyro

    options = tyro.cli(BenchClaims, args=argv, prog="torchrl-perf bench claims")
    if wrong := [name for name in options.system if name not in SYSTEMS]:
        print(f"system: expected names among {', '.join(SYSTEMS)}, received {', '.join(wrong)}", file=sys.stderr)
        return 2
    known = [name for system in options.system for name in experiments(system)]
    if wrong := [name for name in options.only if name not in known]:
        print(f"only: expected names among {', '.join(known)}, received {', '.join(wrong)}", file=sys.stderr)
        return 2
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.empty(0, device=name).device
    rows: list[dict[str, Any]] = []
    for system in options.system:
        sitting = measure(system, options, device)
        rows += sitting.rows
        print()
        print(format_table(sitting.rows, ROW_COLUMNS))
        print()
        print(format_table(sitting.verdicts, VERDICT_COLUMNS), flush=True)
        if not options.quick or options.out is not None:
            print(f"written to {file_name(system, device)}.json")
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
