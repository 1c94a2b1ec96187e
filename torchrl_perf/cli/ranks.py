"""``--gpus``, ``--ranks`` and ``torchrun``: what each of the processes of a run is to do."""

import dataclasses
import logging
import warnings
from collections.abc import Sequence
from typing import Any

from torchrl_perf.cli.asked import given
from torchrl_perf.parallel import Ranks, join
from torchrl_perf.parallel.join import RankError, compare, world_size
from torchrl_perf.parallel.ranks import HANG_SECONDS
from torchrl_perf.parallel.watch import beginning
from torchrl_perf.streams import say
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.config_checks import ConfigError
from torchrl_perf.trainers.shards import config_per_rank, shard_problems

__all__ = ["asks_for_one", "fitted_to_ranks", "joined_ranks", "print_batch"]

MOST_SECONDS = 1e6
"""For which ranks may wait for each other."""


def asks_for_one(argv: Sequence[str]) -> bool:
    """Whether a command line asks for one process, whatever a run that it goes on with had.

    Args:
        argv: options.
    """
    return 1 in given(argv).values()


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
    device = given(argv, ("device",), str)["device"] or "auto"
    gpus = given(argv)["gpus"]
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
    asked = given(argv, ("rank_timeout",), float)["rank_timeout"]
    seconds = HANG_SECONDS if asked is None else asked
    if not 1.0 <= seconds <= MOST_SECONDS:
        raise RankError(
            f"--rank-timeout: expected seconds from 1 to {MOST_SECONDS:,.0f}, received {seconds:g}. Remedy: "
            f"--rank-timeout {HANG_SECONDS:g}."
        )
    return seconds
