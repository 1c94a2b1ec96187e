"""What the commands for a finished run share: the arguments that name it, variants of its env, errors as sentences.

These commands load torch where they begin to work: ``--help`` does not wait for it.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrl_perf.run_layout import CHECKPOINTS, FRESH_SEEDS
from torchrl_perf.zoo import zoo_name

__all__ = ["add_run_arguments", "output_folder", "said", "seed_of", "variant"]


def add_run_arguments(parser: argparse.ArgumentParser, *, envs: bool = True) -> None:
    """The run, which of its checkpoints, and where to compute.

    Args:
        parser: gets the arguments.
        envs: whether envs are made, which have a device and a seed.
    """
    parser.add_argument("run", metavar="RUN", help="folder of a run, one of its checkpoints, or zoo:NAME")
    parser.add_argument(
        "--checkpoint", choices=("newest", "best"), default="newest", help="which one of a folder (default: newest)"
    )
    if envs:
        parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:<number> or auto (default: cpu)")
        parser.add_argument(
            "--seed",
            type=int,
            help=f"of the envs (default: the run's seed + {FRESH_SEEDS}, which it has not seen)",
        )


def seed_of(options: argparse.Namespace, config: Any) -> int:
    """The seed of the envs: the one that was asked for, or one that the run has not seen."""
    return config.seed + FRESH_SEEDS if options.seed is None else options.seed


def output_folder(run: str | os.PathLike[str]) -> Path:
    """Where the files that a command makes of a run go by default.

    That is the run's folder. Nothing is written into the package: files of ``zoo:NAME`` go to a folder ``NAME`` below
    the current one.

    Args:
        run: path of a run's folder or checkpoint, or the name of an entry of the zoo.
    """
    if (name := zoo_name(run)) is not None:
        return Path(name)
    path = Path(run)
    if path.is_dir():
        return path
    inside = path.absolute().parent
    return inside.parent if inside.name == CHECKPOINTS else inside


def variant(text: str) -> dict[str, Any]:
    """The changes of a text such as ``max_episode_steps=1000,slope=0.02``; numbers and true, false, null are read.

    Raises:
        argparse.ArgumentTypeError: for text of another form.
    """
    changes: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise argparse.ArgumentTypeError(
                f"expected NAME=VALUE, several with commas, received {text!r}. Remedy: such as max_episode_steps=1000"
            )
        try:
            changes[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            changes[name.replace("-", "_")] = value
    return changes


def said(command: str, work: Callable[[], int]) -> int:
    """The exit code of a command's work; 1 after a sentence for what is refused.

    Args:
        command: its name.
        work: does it.
    """
    try:
        return work()
    except (ValueError, OSError, ImportError) as error:
        from torchrl_perf.streams import say

        say(f"torchrl-perf {command}: {error}")
        return 1
