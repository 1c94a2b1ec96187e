"""What the commands for a finished run share: the arguments that name it, variants of its env, errors as sentences.

These commands load torch where they begin to work: ``--help`` does not wait for it.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrl_perf.run_layout import CHECKPOINTS

__all__ = ["add_run_arguments", "folder_of", "said", "seed_of", "variant"]

FRESH_SEEDS = 20_000
"""Added to a run's seed: neither its own envs nor those of the evaluations during the run have such a seed."""


def add_run_arguments(parser: argparse.ArgumentParser, *, envs: bool = True) -> None:
    """The run, which of its checkpoints, and where to compute.

    Args:
        parser: gets the arguments.
        envs: whether envs are made, which have a device and a seed.
    """
    parser.add_argument("run", metavar="RUN", help="folder of a run, or one of its checkpoints")
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


def folder_of(path: Path) -> Path:
    """The folder of a run, of which a path names the folder itself or a checkpoint."""
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
        from torchrl_perf.runtime.streams import say

        say(f"torchrl-perf {command}: {error}")
        return 1
