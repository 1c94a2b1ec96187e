"""``--gpus``, ``--ranks`` and ``torchrun``: starts the processes of a run, and what each of them is to do."""

import argparse
import dataclasses
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from torchrl_perf.parallel import Ranks, join
from torchrl_perf.parallel.join import RankError, compare, world_size
from torchrl_perf.parallel.launch import launch_ranks
from torchrl_perf.parallel.ranks import HANG_SECONDS
from torchrl_perf.parallel.watch import beginning
from torchrl_perf.runtime.streams import say
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.config_checks import ConfigError
from torchrl_perf.trainers.shards import config_per_rank, shard_problems

__all__ = ["asked_for", "asks_for_one", "fitted_to_ranks", "joined_ranks", "launch", "print_batch"]

HELP = ("-h", "--help")
MOST_SECONDS = 1e6
"""For which ranks may wait for each other."""


def asked_for(argv: Sequence[str]) -> int:
    """The processes that a command line asks for and that are still to be started; 1 for none.

    Args:
        argv: options.

    Raises:
        RankError: for numbers below 1, two that differ, and GPUs that are not there.
    """
    if world_size() > 1 or any(word in HELP for word in argv):
        return 1
    given = _given(argv)
    ranks, gpus = given["ranks"], given["gpus"]
    for name, number in given.items():
        if number is not None and number < 1:
            raise RankError(f"--{name}: expected a positive integer, received {number}. Remedy: --{name} 2.")
    if ranks is not None and gpus is not None and ranks != gpus:
        raise RankError(f"--ranks: expected the number of --gpus, {gpus}, received {ranks}. Remedy: one of the two.")
    if gpus is not None:
        _check_gpus(gpus)
    return ranks or gpus or 1


def asks_for_one(argv: Sequence[str]) -> bool:
    """Whether a command line asks for one process, whatever a run that it goes on with had.

    Args:
        argv: options.
    """
    return 1 in _given(argv).values()


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


def joined_ranks(argv: Sequence[str]) -> Ranks:
    """The processes of the run, with what they have to have in common compared; those but the first stay silent.

    Args:
        argv: options.

    Raises:
        RankError: for ranks that cannot find each other or differ, and GPUs that are not there.
        ValueError: for --by-host where hosts do not have as many ranks each.
        RankStoppedError: on the ranks but the first, where ranks differ.
    """
    if world_size() == 1:
        return Ranks.alone()
    device = _given(argv, ("device",), str)["device"] or "auto"
    gpus = _given(argv)["gpus"]
    place = "cpu" if device.startswith("cpu") and gpus is None else "auto" if device == "auto" else "cuda"
    with beginning():
        ranks = join(place, seconds=_patience(argv), by_host=_by_host(argv))
        if not ranks.first:
            logging.getLogger("torchrl_perf").setLevel(logging.CRITICAL)
            warnings.simplefilter("ignore")
        compare(ranks, argv)
    return ranks


def fitted_to_ranks(config: RunConfig, arguments: Any, ranks: int) -> RunConfig:
    """The settings of the whole run, for so many ranks.

    Args:
        config: as the options have it.
        arguments: with ``ranks``, ``gpus``, ``per_rank``.
        ranks: that there are, or will be.

    Raises:
        ConfigError: for numbers that the ranks do not divide, and algorithms that one process learns.
        RankError: for another number of ranks than was asked for.
    """
    asked = arguments.ranks or arguments.gpus or ranks
    if asked != ranks:
        raise RankError(f"--ranks: expected {ranks}, as torchrun has started, received {asked}. Remedy: leave it out.")
    if arguments.gpus and config.device == "auto":
        config = dataclasses.replace(config, device="cuda")
    if ranks == 1 and arguments.by_host:
        raise RankError("--by-host: expected ranks on several hosts, received one process. Remedy: leave it out.")
    if ranks == 1:
        return config
    if arguments.per_rank:
        config = config_per_rank(config, ranks)
    if problems := shard_problems(config, ranks):
        raise ConfigError(problems)
    return config


def print_batch(config: RunConfig, ranks: Ranks) -> None:
    """Says on standard error how large the joint batch is, and what it is learnt with.

    Args:
        config: of the whole run.
        ranks: the processes.
    """
    if not ranks.several or not ranks.first:
        return
    parts = getattr(config, "minibatches", None)
    size = config.batch_size // parts if parts else getattr(config, "minibatch_size", config.batch_size)
    rates = [name for name in ("learning_rate", "actor_learning_rate", "critic_learning_rate") if hasattr(config, name)]
    listed = ", ".join(f"{name} {getattr(config, name):g}" for name in rates)
    say(
        f"{ranks.size} ranks on {ranks.device.type}: {config.num_envs} envs ({config.num_envs // ranks.size} of each), "
        f"{config.batch_size} env steps an iteration, minibatches of {size} rows ({size // ranks.size} of each), "
        f"{listed}"
    )


def _by_host(argv: Sequence[str]) -> bool:
    """Whether sums are to be made in two levels, as the last of the two switches says."""
    asked = [word for word in argv if word in ("--by-host", "--no-by-host")]
    return bool(asked) and asked[-1] == "--by-host"


def _patience(argv: Sequence[str]) -> float:
    """Seconds for which ranks wait for each other.

    Raises:
        RankError: for less than one.
    """
    given = _given(argv, ("rank_timeout",), float)["rank_timeout"]
    seconds = HANG_SECONDS if given is None else given
    if not 1.0 <= seconds <= MOST_SECONDS:
        raise RankError(
            f"--rank-timeout: expected seconds from 1 to {MOST_SECONDS:,.0f}, received {seconds:g}. Remedy: "
            f"--rank-timeout {HANG_SECONDS:g}."
        )
    return seconds


def _given(argv: Sequence[str], names: Sequence[str] = ("ranks", "gpus"), kind: Any = int) -> dict[str, Any]:
    """Options of these names, None where they are left out or cannot be read, which the whole parser refuses."""
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
    there = torch.cuda.device_count()
    if gpus > there:
        raise RankError(
            f"--gpus: expected at most {there}, the GPUs that PyTorch sees, received {gpus}. Remedy: --gpus {there}"
            if there
            else f"--gpus: expected a machine with GPUs that PyTorch sees, received {gpus} on one without. Remedy: "
            f"--ranks {gpus} --device cpu."
        )
