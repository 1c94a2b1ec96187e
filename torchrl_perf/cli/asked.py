"""``--gpus`` and ``--ranks``: starts the processes of a run before what only they need is imported."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from torchrl_perf.cli.backend import named_by_backend
from torchrl_perf.launch import launch_ranks
from torchrl_perf.streams import keep_standard_files

__all__ = ["asked_for", "given", "launch", "launched"]

HELP = ("-h", "--help")


def launched(name: str, argv: Sequence[str]) -> int | None:
    """The exit code of the ranks that a command line asks for; None where there are none to be started.

    Also None for numbers that are to be refused: the command itself refuses them, after it has imported the rest.

    Args:
        name: of the algorithm.
        argv: options behind it.
    """
    keep_standard_files()
    try:
        argv = named_by_backend(argv)
        number = asked_for(argv)
    except ValueError:
        return None
    return launch(name, argv, number) if number > 1 else None


def asked_for(argv: Sequence[str]) -> int:
    """The processes that a command line asks for and that are still to be started; 1 for none.

    Args:
        argv: options.

    Raises:
        RankError: for numbers below 1, two that differ, and GPUs that are not there.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or any(word in HELP for word in argv):
        return 1
    numbers = given(argv)
    ranks, gpus = numbers["ranks"], numbers["gpus"]
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise _refused(f"--{name}: expected a positive integer, received {number}. Remedy: --{name} 2.")
    if ranks is not None and gpus is not None and ranks != gpus:
        raise _refused(f"--ranks: expected the number of --gpus, {gpus}, received {ranks}. Remedy: one of the two.")
    if gpus is not None:
        _check_gpus(gpus)
    return ranks or gpus or 1


def launch(name: str, argv: Sequence[str], ranks: int) -> int:
    """Starts ``torchrl-perf train`` once for each rank on this host, as ``torchrun`` does, and waits for all.

    Args:
        name: of the algorithm.
        argv: options behind it.
        ranks: processes.

    Returns:
        Exit code of the run: that of the rank that ended it.
    """
    return launch_ranks(("-m", "torchrl_perf", "train", name, *argv), ranks)


def given(argv: Sequence[str], names: Sequence[str] = ("ranks", "gpus"), kind: Any = int) -> dict[str, Any]:
    """Options of these names, None where they are left out or cannot be read, which the whole parser refuses.

    Args:
        argv: options.
        names: of the fields.
        kind: of their values.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}")
    found = vars(parser.parse_known_args(list(argv))[0])
    values = {}
    for name, text in found.items():
        try:
            values[name] = None if text is None else kind(text)
        except ValueError:
            values[name] = None
    return values


def _check_gpus(gpus: int) -> None:
    """Refuse more GPUs than this host has."""
    import torch

    there = torch.cuda.device_count()
    if gpus > there:
        raise _refused(
            f"--gpus: expected at most {there}, the GPUs that PyTorch sees, received {gpus}. Remedy: --gpus {there}"
            if there
            else f"--gpus: expected a machine with GPUs that PyTorch sees, received {gpus} on one without. Remedy: "
            f"--ranks {gpus} --device cpu."
        )


def _refused(problem: str) -> ValueError:
    from torchrl_perf.parallel.join import RankError

    return RankError(problem)
