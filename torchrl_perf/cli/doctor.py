"""``torchrl-perf doctor``: is the machine fit for a run, and was a finished run sound?"""

import argparse
import json
import re
import sys
from pathlib import Path

from torchrl_perf.cli.command_parser import CommandParser

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Check the machine, or judge a run; see ``torchrl-perf doctor --help``.

    Args:
        argv: the arguments behind ``doctor``.

    Returns:
        Exit code: 0; 1 if a check failed; 2 for a folder that holds no run, and for --kernels without CUDA or with
        --json or --after.
    """
    options = parser().parse_args(argv)
    try:
        from torchrl_perf.cli.run_report import check_run
        from torchrl_perf.runtime.doctor import check_machine
        from torchrl_perf.runtime.doctor.checks import format_checks, worst
    except Exception as error:  # a broken torch raises anything from ImportError to OSError
        return _broken(error, as_json=options.json)
    try:
        if options.kernels:
            if options.json or options.after is not None:
                raise ValueError(
                    "--kernels: expected without --json and --after, received one of them. Remedy: --kernels alone, or "
                    "with --device."
                )
            from torchrl_perf.cli.kernel_table import kernel_table

            for line in kernel_table(options.device):
                print(line, flush=True)
            return 0
        checks = check_machine(options.run_dir, options.device) if options.after is None else check_run(options.after)
    except (OSError, ValueError) as error:
        print(f"torchrl-perf doctor: {error}", file=sys.stderr)
        return 2
    verdict = worst(checks)
    if options.json:
        print(json.dumps({"verdict": verdict, "checks": [check.to_dict() for check in checks]}, indent=2))
    else:
        print(format_checks(checks))
    return 1 if verdict == "fail" else 0


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = CommandParser(
        "torchrl-perf doctor",
        description="Check the machine before a run: a line with verdict, finding and remedy for each check. With "
        "--after, judge a run that is over; with --kernels, time kernels of networks. The exit code is 1 if a check "
        "failed.",
    )
    made.add_argument("--after", type=Path, metavar="RUN", help="folder of a run to judge")
    made.add_argument("--kernels", action="store_true", help="time the kernels of perceptrons, and print their tiles")
    made.add_argument("--run-dir", default="runs", help="folder that runs will be written to (default: runs)")
    made.add_argument("--device", default="cuda", type=_cuda_name, help="CUDA device to look at (default: cuda)")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def _cuda_name(text: str) -> str:
    if re.fullmatch(r"cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(
            f"expected cuda or cuda:<number>, received {text!r}. Remedy: cuda, or cuda:0 for the first GPU"
        )
    return text


def _broken(error: Exception, *, as_json: bool) -> int:
    """Say that not even torch can be imported, which the checks themselves need."""
    found = f"cannot be imported: {type(error).__name__}: {error}"
    remedy = "install torch, torchrl and tensordict again, in the releases that torchrl_perf asks for."
    if as_json:
        check = {"name": "torch", "verdict": "fail", "found": found, "remedy": remedy}
        print(json.dumps({"verdict": "fail", "checks": [check]}, indent=2))
    else:
        print(f"fail  torch  {found}. Remedy: {remedy}")
    return 1
