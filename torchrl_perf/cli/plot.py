"""``torchrl-perf plot``: the learning curve of a run, drawn from its rows."""

import argparse
import sys
from pathlib import Path

from torchrl_perf.cli.command_parser import CommandParser
from torchrl_perf.cli.finished_run import output_folder, said
from torchrl_perf.run_layout import PROGRESS

__all__ = ["main"]

RETURN_COLUMN = "episode/mean_return"


def main(argv: list[str]) -> int:
    """Draw a run; the options are those that ``torchrl-perf plot --help`` lists.

    Args:
        argv: the arguments behind ``plot``.

    Returns:
        Exit code: 0; 1 for what cannot be drawn.
    """
    options = parser().parse_args(argv)
    return said("plot", lambda: plot(options))


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = CommandParser(
        "torchrl-perf plot",
        description="Draw a metric of a run over its env steps and over its wall time. The run may still go on.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or zoo:NAME")
    made.add_argument("--metric", default=RETURN_COLUMN, help="column of progress.csv (default: %(default)s)")
    made.add_argument(
        "--out",
        type=Path,
        help="picture to write (default: learning_curve.png in the run's folder; in ./NAME of zoo:NAME)",
    )
    return made


def plot(options: argparse.Namespace) -> int:
    """Draw the picture."""
    from torchrl_perf.cli.curves import curve_of, logged_run
    from torchrl_perf.metrics.plot import save_learning_curve
    from torchrl_perf.streams import say

    run = logged_run(options.run)
    curve_of(run, options.metric)  # whether there is anything to draw
    title = f"{str(run.settings.get('algorithm', 'run')).upper()} on {run.settings.get('env', '?')}"
    out = options.out or output_folder(options.run) / "learning_curve.png"
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"out: expected a name that ends in .png, .pdf or .svg, received {out}. Remedy: .png.")
    save_learning_curve(run.path / PROGRESS, out, column=options.metric, title=title)
    say(f"{out} is written", sys.stdout)
    return 0
