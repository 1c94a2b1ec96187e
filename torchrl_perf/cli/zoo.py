"""``torchrl-perf zoo``: the trained policies that come with the package."""

import sys

from torchrl_perf.cli.command_parser import CommandParser
from torchrl_perf.cli.evaluate import as_table
from torchrl_perf.zoo import PREFIX, ZooEntry, zoo_entries

__all__ = ["main", "row_of"]

TITLES = ("name", "algorithm", "task", "parameters", "KiB", "return", "deviation", "episodes", "other figure")
USES = f"""
A name goes wherever a run does: torchrl-perf evaluate {PREFIX}NAME, play, export, compare and plot, and
torchrl_perf.trainers.load_policy("{PREFIX}NAME") from Python.
"""


def main(argv: list[str]) -> int:
    """List the entries.

    Args:
        argv: the arguments behind ``zoo``.

    Returns:
        Exit code: 0.
    """
    CommandParser(
        "torchrl-perf zoo",
        description="List the trained policies of the package: algorithm, task, number of parameters, size of the "
        "files in KiB (1,024 bytes), and the mean return of evaluated episodes with its "
        "standard deviation.",
    ).parse_args(argv)
    sys.stdout.write(f"{as_table([row_of(entry) for entry in zoo_entries().values()], TITLES)}\n{USES}")
    return 0


def row_of(entry: ZooEntry) -> tuple[str, ...]:
    """A line of the table, as text."""
    card, found = entry.card, entry.card["evaluation"]
    other = card.get("measure")
    return (
        f"{PREFIX}{entry.name}",
        card["algorithm"],
        card["task"],
        f"{card['parameters']:,}",
        f"{entry.size / 1024:.0f}",
        f"{found['mean_return']:.2f}",
        f"{found['return_deviation']:.2f}",
        str(found["episodes"]),
        f"{other['name']} {other['value']:.3f}" if other else "",
    )
