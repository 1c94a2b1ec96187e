"""``torchrl-perf export``: the policy of a run as ONNX and for ``torch.export``."""

import argparse
import sys
from pathlib import Path

from torchrl_perf.cli.command_parser import CommandParser
from torchrl_perf.cli.finished_run import add_run_arguments, output_folder, said

__all__ = ["main"]

ROWS = 1_000


def main(argv: list[str]) -> int:
    """Export a run; the options are those that ``torchrl-perf export --help`` lists.

    Args:
        argv: the arguments behind ``export``.

    Returns:
        Exit code: 0; 1 for what cannot be exported.
    """
    options = parser().parse_args(argv)
    return said("export", lambda: export(options))


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = CommandParser(
        "torchrl-perf export",
        description="Write the policy of a run, which does not explore, as policy.onnx and policy.pt2 (torch.export), "
        "with policy.md, which says what goes in and comes out. Both are compared with the policy on random inputs.",
    )
    add_run_arguments(made, envs=False)
    made.add_argument("--out", type=Path, help="folder to write to (default: the run's; ./NAME of zoo:NAME)")
    made.add_argument(
        "--format", choices=("both", "onnx", "torch"), default="both", help="what to write (default: both)"
    )
    made.add_argument("--rows", type=int, default=ROWS, help=f"random inputs to compare (default: {ROWS})")
    return made


def export(options: argparse.Namespace) -> int:
    """Write the files."""
    from torchrl_perf.streams import say
    from torchrl_perf.trainers.export import export_policy
    from torchrl_perf.trainers.policies import policy_of, read_run

    if options.rows < 1:
        raise ValueError(f"rows: expected a positive integer, received {options.rows}. Remedy: rows={ROWS}.")
    folder = options.out or output_folder(options.run)
    policy = policy_of(read_run(options.run, which=options.checkpoint))
    folder.mkdir(parents=True, exist_ok=True)
    made = export_policy(policy, folder, form=options.format, rows=options.rows)
    names = ", ".join(str(path) for path in made.files)
    equal = f"equal to the policy within {made.difference:.1e}" if made.difference else "the same actions as the policy"
    say(f"{names}: {equal} on {made.rows} random inputs", sys.stdout)
    return 0
