"""``torchrl-perf compare``: runs beside each other, those of several seeds as one."""

import argparse
import math
import sys
from pathlib import Path

from torchrl_perf.cli.command_parser import CommandParser
from torchrl_perf.cli.finished_run import said

__all__ = ["main"]

TITLES = ("runs that differ by the seed", "seeds", "final: interquartile mean", "95% interval", "mean", "each")


def main(argv: list[str]) -> int:
    """Compare runs; the options are those that ``torchrl-perf compare --help`` lists.

    Args:
        argv: the arguments behind ``compare``.

    Returns:
        Exit code: 0; 1 for what cannot be compared.
    """
    options = parser().parse_args(argv)
    return said("compare", lambda: compare(options))


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = CommandParser(
        "torchrl-perf compare",
        description="Curves and final returns of runs: one picture and one table. Runs whose settings differ by the "
        "seed alone are one group, of which the interquartile mean and its 95% bootstrap interval over the seeds are "
        "shown (arXiv:2108.13264).",
    )
    made.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, or zoo:NAME")
    made.add_argument(
        "--metric",
        help="column of progress.csv (default: eval/mean_return if all have it, or episode/mean_return)",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("comparison.png"),
        help="picture; the table lies beside it (default: comparison.png)",
    )
    return made


def compare(options: argparse.Namespace) -> int:
    """Draw the picture, and write and print the table."""
    from torchrl_perf.cli.curves import curve_of, groups_of, logged_run, metric_of
    from torchrl_perf.metrics.comparison import save_comparison
    from torchrl_perf.runtime.files import write_text
    from torchrl_perf.streams import say

    if options.out.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"out: expected a name that ends in .png, .pdf or .svg, received {options.out}. Remedy: .png.")
    runs = [logged_run(path) for path in options.runs]
    refuse_repeated([run.path for run in runs])
    metric = metric_of(runs, options.metric)
    grouped = groups_of(runs)
    groups = {name: [curve_of(run, metric) for run in group] for name, group in grouped.items()}
    finals = {name: [curve.values[-1] for curve in curves] for name, curves in groups.items()}
    seeds = {name: len({run.settings.get("seed") for run in group}) for name, group in grouped.items()}
    rows = [row_of(name, values, seeds[name]) for name, values in finals.items()]
    save_comparison(groups, options.out, label=metric, finals=finals)
    table = as_markdown(rows, metric)
    path = options.out.with_suffix(".md")
    write_text(path, table, lasting=False)
    say(f"{table}\n{options.out} and {path} are written", sys.stdout)
    return 0


def refuse_repeated(runs: list[Path]) -> None:
    """That no run counts as two, with an interval over seeds that there are not.

    Raises:
        ValueError: naming the folders that came twice.
    """
    folders = [run.resolve() for run in runs]
    if twice := sorted({str(run) for run, folder in zip(runs, folders, strict=True) if folders.count(folder) > 1}):
        raise ValueError(f"runs: expected each once, received {', '.join(twice)} more than once. Remedy: name it once.")


def row_of(name: str, values: list[float], seeds: int) -> tuple[str, ...]:
    """A line of the table, as text; ``seeds`` are those that differ, of which there may be fewer than runs."""
    from torchrl_perf.metrics.aggregates import bootstrap_interval, interquartile_mean, mean

    low, high = bootstrap_interval(values, interquartile_mean)
    interval = "needs two seeds" if math.isnan(low) else f"{low:.2f} to {high:.2f}"
    each = ", ".join(f"{value:.1f}" for value in values)
    middle, usual = (f"{float(statistic(values)):.2f}" for statistic in (interquartile_mean, mean))
    count = str(seeds) if seeds == len(values) else f"{seeds} in {len(values)} runs"
    return name, count, middle, interval, usual, each


def as_markdown(rows: list[tuple[str, ...]], metric: str) -> str:
    """A table in Markdown that can be read as text, too.

    Args:
        rows: texts, as many in each as there are titles.
        metric: what the figures are of.
    """
    lines = [TITLES, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    written = (f"| {' | '.join(cells)} |" for cells in padded)
    return "\n".join([f"`{metric}` at the last row of each run:", "", *written, ""])
