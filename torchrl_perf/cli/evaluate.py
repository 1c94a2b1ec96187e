"""``torchrl-perf evaluate``: what the policy of a run is worth, in its own task and in variants of it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from torchrl_perf.cli.command_parser import CommandParser
from torchrl_perf.cli.finished_run import add_run_arguments, said, seed_of, variant

if TYPE_CHECKING:
    from torchrl_perf.trainers.evaluation import Episodes

__all__ = ["main"]

TITLES = ("task", "episodes", "mean return", "deviation", "95% interval", "mean length")


def main(argv: list[str]) -> int:
    """Evaluate a run; the options are those that ``torchrl-perf evaluate --help`` lists.

    Args:
        argv: the arguments behind ``evaluate``.

    Returns:
        Exit code: 0; 1 for what cannot be evaluated.
    """
    options = parser().parse_args(argv)
    return said("evaluate", lambda: evaluate(options))


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = CommandParser(
        "torchrl-perf evaluate",
        description="Whole episodes of a run's policy, which does not explore, in envs with seeds that the run has not "
        "seen: returns, their deviation, a bootstrap interval of their mean, lengths. Of a system with several agents "
        "each agent's episode counts.",
    )
    add_run_arguments(made)
    made.add_argument("--episodes", type=int, default=100, help="envs, each for one episode (default: 100)")
    made.add_argument("--max-steps", type=int, help="cut episodes off here (default: the env's own limit, else 1000)")
    made.add_argument(
        "--variant",
        type=variant,
        action="append",
        default=[],
        metavar="NAME=VALUE[,...]",
        help="evaluate in this variant of the task too: arguments of the env, or settings of a system's world; may be "
        "given several times",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object, with each return and length")
    return made


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate the task and its variants, and print a table."""
    from torchrl_perf.streams import say
    from torchrl_perf.trainers.mujoco_c import task_in_c
    from torchrl_perf.trainers.policies import policy_of, read_run
    from torchrl_perf.trainers.variants import evaluate_run

    for name in ("episodes", "max_steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected a positive integer, received {value}. Remedy: {name}=1 or more.")
    run = read_run(options.run, options.device, which=options.checkpoint)
    policy = policy_of(run)
    found: list[tuple[dict[str, Any], Episodes]] = []
    for changes in ({}, *options.variant):
        limits: dict[str, Any] = {"seed": seed_of(options, run.config), "max_steps": options.max_steps}
        found.append((changes, evaluate_run(run, policy, options.episodes, changes=changes, **limits)))
    if options.json:
        say(json.dumps(as_json(run.path, run.steps, found), indent=2), sys.stdout)
    else:
        place = " in MuJoCo's C code" if task_in_c(run.robot) else ""
        say(f"{run.config.algorithm} on {run.env}{place}, {run.steps} steps, {run.path}", sys.stdout)
        say(as_table([row_of(run.env, changes, episodes) for changes, episodes in found]), sys.stdout)
    return 0


def name_of(env: str, changes: dict[str, Any]) -> str:
    """A task in words."""
    return ", ".join([env, *(f"{name}={value}" for name, value in changes.items())])


def row_of(env: str, changes: dict[str, Any], episodes: Episodes) -> tuple[str, ...]:
    """A line of the table, as text."""
    low, high = episodes.interval()
    count = f"{len(episodes.returns)}" + (f" ({episodes.unfinished} cut off)" if episodes.unfinished else "")
    return (
        name_of(env, changes),
        count,
        f"{episodes.mean_return:.2f}",
        f"{episodes.return_deviation:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{episodes.mean_length:.1f}",
    )


def as_table(rows: list[tuple[str, ...]], titles: tuple[str, ...] = TITLES) -> str:
    """Lines whose columns begin at the same place.

    Args:
        rows: texts, as many in each as there are titles.
        titles: of the columns.
    """
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def as_json(path: Any, steps: int, found: list[tuple[dict[str, Any], Episodes]]) -> dict[str, Any]:
    """The figures as plain values."""
    entries = []
    for changes, episodes in found:
        low, high = episodes.interval()
        entries.append(
            {
                "variant": changes,
                "episodes": len(episodes.returns),
                "unfinished": episodes.unfinished,
                "mean_return": episodes.mean_return,
                "return_deviation": episodes.return_deviation,
                "interval": [low, high],
                "mean_length": episodes.mean_length,
                "returns": episodes.returns,
                "lengths": episodes.lengths,
            }
        )
    return {"checkpoint": str(path), "steps": steps, "tasks": entries}
