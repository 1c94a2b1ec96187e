"""``torchrl-perf sweep``: many settings and seeds on one machine or a Ray cluster; bad runs are stopped early."""

import argparse
import dataclasses
import importlib.util
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrl_perf.cli.command_parser import CommandParser
from torchrl_perf.cli.finished_run import said
from torchrl_perf.cli.sweep_plan import Run, runs_of, space_of
from torchrl_perf.cli.sweep_table import row_of, table, write_rows
from torchrl_perf.run_layout import read_json
from torchrl_perf.runtime.files import write_text

__all__ = ["main"]

PLAN, ROWS, TUNE = "sweep.json", "sweep.csv", "tune"


def main(argv: list[str]) -> int:
    """Run a sweep; the options are those that ``torchrl-perf sweep --help`` lists.

    Args:
        argv: the arguments behind ``sweep``; those behind ``--`` are options of each run.

    Returns:
        Exit code: 0; 1 for what cannot be run, and where every run failed.
    """
    own, given = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = parser().parse_args(own)
    return said("sweep", lambda: sweep(options, given))


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = CommandParser(
        "torchrl-perf sweep",
        description="Train with many settings and seeds on Ray Tune (pip install 'torchrl_perf[ray]'), and stop those "
        "that fall behind: successive halving, asynchronously. Options behind -- are those of each run.",
        epilog="torchrl-perf sweep ppo --set learning_rate=3e-4..3e-3:log --set epochs=4,8 --samples 4 --seeds 3 -- "
        "--env CartPole --total-steps 200000",
    )
    made.add_argument("algorithm", help="as of torchrl-perf train")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help="a setting: A,B,C runs each; LOW..HIGH draws between, LOW..HIGH:log on the scale of the logarithm",
    )
    made.add_argument("--seeds", type=int, default=1, help="runs of each combination (default: %(default)s)")
    made.add_argument("--samples", type=int, default=1, help="draws from ranges (default: %(default)s)")
    made.add_argument(
        "--metric",
        default="episode/mean_return",
        help="column that runs are compared by; a leading - asks for the lowest (default: %(default)s)",
    )
    made.add_argument(
        "--halving", type=int, default=3, help="only one in so many goes on at each rung; 0 stops none (default: 3)"
    )
    made.add_argument(
        "--first-rung", type=float, default=1 / 9, help="share of a run before the first rung (default: a ninth)"
    )
    made.add_argument("--cpus", type=float, default=1.0, help="cores of a run, a fraction too (default: 1)")
    made.add_argument("--gpus", type=float, default=0.0, help="GPUs of a run; 0.25 lets four share one (default: 0)")
    made.add_argument("--at-once", type=int, help="runs at once, at most (default: what the resources allow)")
    made.add_argument("--address", help="of a Ray cluster, such as auto; this machine alone by default")
    made.add_argument("--dir", type=Path, default=Path("sweeps"), help="where folders of sweeps are (default: sweeps)")
    made.add_argument("--name", help="folder of this sweep (default: the algorithm); one that is there is gone on with")
    return made


def sweep(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Runs what is left of a sweep, and prints its table.

    Raises:
        ValueError: for settings that cannot be run, and a folder with another sweep.
        ImportError: without Ray.
    """
    if importlib.util.find_spec("ray") is None:
        raise ImportError("sweep: expected Ray, received none. Remedy: pip install 'torchrl_perf[ray]'.")
    folder = (options.dir / (options.name or options.algorithm)).absolute()
    spaces = [space_of(text) for text in options.set]
    if twice := {space.name for space in spaces if sum(other.name == space.name for other in spaces) > 1}:
        raise ValueError(f"--set: expected each name once, received {', '.join(sorted(twice))} twice. Remedy: one.")
    numbers = {"seeds": options.seeds, "samples": options.samples}
    if low := [name for name, value in numbers.items() if value < 1]:
        raise ValueError(f"--{low[0]}: expected at least 1, received {numbers[low[0]]}. Remedy: --{low[0]} 1.")
    runs = runs_of(options.algorithm, spaces, given, **numbers, folder=folder)
    steps = max(_checked(run) for run in runs)
    _keep_plan(folder, runs)
    metric, lowest = options.metric.removeprefix("-"), options.metric.startswith("-")
    failed = _tuned(options, runs, folder, steps, -1.0 if lowest else 1.0)
    rows = [row_of(run, metric, lowest=lowest) for run in runs]
    write_rows(rows, folder / ROWS)
    print(table(rows, [space.name for space in spaces], lowest=lowest))
    print(f"{len(runs)} runs, {metric}; rows in {folder / ROWS}", flush=True)
    return 1 if failed == len(runs) else 0


def _checked(run: Run) -> int:
    """Env steps of a run, whose settings are checked as ``train`` would.

    Raises:
        ValueError: for settings that cannot be run.
    """
    from torchrl_perf.cli.train import algorithm_of, parse

    arguments, _ = parse(run.algorithm, run.options)
    config = algorithm_of(run.algorithm, run.options).load("config")(**dataclasses.asdict(arguments.settings))
    return config.iterations * config.batch_size


def _keep_plan(folder: Path, runs: Sequence[Run]) -> None:
    """Writes what the sweep consists of, or compares it with what is there."""
    plan = {"runs": [run.as_dict() for run in runs]}
    before = read_json(folder / PLAN)
    if before and before != plan:
        raise ValueError(
            f"{folder}: expected no sweep there, or this one, received another. Remedy: --name of a new folder, or the "
            "same options as before to go on."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / PLAN, json.dumps(plan, indent=1) + "\n", lasting=False)


def _tuned(options: argparse.Namespace, runs: Sequence[Run], folder: Path, steps: int, sign: float) -> int:
    """Has Ray Tune do the runs; how many failed.

    Args:
        options: of the command.
        runs: all of them; those that are finished are only read.
        folder: of the sweep.
        steps: env steps of the longest.
        sign: -1 where small values are good.
    """
    import ray
    from ray import tune

    from torchrl_perf.cli.sweep_trial import Halving, SweepTrial, Tell

    _start_ray(ray, options.address)
    # the trace of a run that failed: its own words are in its folder
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    scheduler = None
    if options.halving > 1:
        first = max(1, round(steps * options.first_rung))
        scheduler = Halving(first, steps, options.halving)
    metric = options.metric.removeprefix("-")
    each = [{"run": run.as_dict(), "metric": metric, "sign": sign} for run in runs]
    trial = tune.with_resources(SweepTrial, {"cpu": options.cpus, "gpu": options.gpus})
    try:
        tuner = tune.Tuner(
            trial,
            param_space={"case": tune.grid_search(each)},
            tune_config=tune.TuneConfig(scheduler=scheduler, max_concurrent_trials=options.at_once),
            run_config=tune.RunConfig(name=TUNE, storage_path=str(folder), verbose=0, callbacks=[Tell()]),
        )
        found = tuner.fit()
    finally:
        ray.shutdown()
    return len(found.errors)


def _start_ray(ray: Any, address: str | None) -> None:
    """Joins a cluster, or starts Ray on this machine."""
    usual: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        ray.init(include_dashboard=False, **usual)
    else:
        ray.init(address=address, **usual)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
