"""A rank's part of the settings of a run: its envs, its share of minibatch and replay, and a seed of its own."""

import copy
from typing import TypeVar

import numpy as np

from torchrl_perf.parallel import Ranks
from torchrl_perf.parallel.ranks import share
from torchrl_perf.registry import ALGORITHMS, SYSTEMS
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.config_checks import Checks, ConfigError

__all__ = ["ON_RANKS", "SHARED", "config_of_rank", "config_per_rank", "shard_problems"]

C = TypeVar("C", bound=RunConfig)

ON_RANKS = (*ALGORITHMS, *SYSTEMS)
"""What several ranks can learn together: the algorithms and systems of the package, whose loops agree on gradients."""

SHARED = ("num_envs", "minibatch_size")
"""Settings that the number of ranks has to divide."""

SPREAD = (
    *("total_steps", "schedule_steps", "learning_starts", "capacity"),
    *("eps_frames", "noise_frames", "entropy_frames", "option_capacity", "option_temperature_frames"),
    *("stage_one_frames", "demonstrations", "random_steps"),
)
"""Settings in env steps, rows or episodes of all envs, of which each rank has a part, rounded up."""

SPREAD_LISTS = ("stage_frames",)
"""The same, several numbers with commas between them."""

OF_ONE_BATCH = ("standardize_components",)
"""Settings that compute something of a whole batch which ranks do not tell each other."""

USUAL_SEEDS, SEEDS = 1_000, 45_000


def config_of_rank(config: C, ranks: Ranks) -> C:
    """The settings that a rank's trainer works with; ``whole`` of them are those that are given.

    Numbers of envs, rows and env steps are divided by the number of ranks. So the number of iterations, and what is
    annealed over them, are those of the whole run. Ranks but the first have another seed.

    Args:
        config: of the whole run.
        ranks: the processes.

    Raises:
        ConfigError: for an algorithm that does not run on several ranks, and numbers that they do not divide.
    """
    if not ranks.several:
        return config
    if problems := shard_problems(config, ranks.size):
        raise ConfigError(problems)
    own = copy.copy(config)
    for name in SHARED:
        if hasattr(config, name):
            object.__setattr__(own, name, getattr(config, name) // ranks.size)
    for name in SPREAD:
        if getattr(config, name, None) is not None:
            object.__setattr__(own, name, share(getattr(config, name), ranks.size))
    for name in SPREAD_LISTS:
        if hasattr(config, name):
            parts = [share(int(float(number)), ranks.size) for number in getattr(config, name).split(",")]
            object.__setattr__(own, name, ", ".join(map(str, parts)))
    object.__setattr__(own, "seed", seeds_of(config.seed, ranks.size)[ranks.rank])
    object.__setattr__(own, "_whole", config)
    return own


def config_per_rank(config: C, ranks: int) -> C:
    """The settings of a whole run of which each rank has as many envs and rows as these settings say.

    Lengths in env steps, such as ``total_steps``, are those of the whole run as they are.

    Args:
        config: of one rank.
        ranks: number of ranks.
    """
    whole = copy.copy(config)
    for name in (*SHARED, "capacity"):
        if hasattr(config, name):
            object.__setattr__(whole, name, getattr(config, name) * ranks)
    return whole


def shard_problems(config: RunConfig, ranks: int) -> list[str]:
    """Why so many ranks cannot share a run: a sentence for each setting that is in the way.

    Args:
        config: of the whole run.
        ranks: number of ranks.
    """
    if config.algorithm not in ON_RANKS:
        return [
            f"ranks: expected 1 for {config.algorithm or type(config).__name__}, whose loop is not known to agree on "
            f"gradients, received {ranks}. Remedy: one process, or one of {', '.join(ON_RANKS)}."
        ]
    remembers = getattr(config, "memory", "none") != "none"
    if remembers and hasattr(config, "slice_length"):
        return [
            f"memory: expected 'none' on several ranks for {config.algorithm}, whose slices are drawn by one, received "
            f"{config.memory!r}. Remedy: one process, or ppo."  # pyright: ignore[reportAttributeAccessIssue]
        ]
    checks = Checks(config)
    for name in OF_ONE_BATCH:
        if getattr(config, name, False):
            checks.add(
                name,
                f"{name}: expected False with {ranks} ranks, each of which would take the mean and deviation of its own"
                f" rows, received True. Remedy: {name}=False, or one process.",
            )
    for name in SHARED:
        value = getattr(config, name, None)
        if value is not None and value % ranks:
            below = value // ranks * ranks
            checks.add(
                name,
                f"{name}: expected a multiple of the {ranks} ranks, received {value}. Remedy: {name}="
                f"{below + ranks if below == 0 else below}, or --per-rank with the number of each.",
            )
    parts = getattr(config, "minibatches", 1)
    if remembers and checks.sound("num_envs") and config.num_envs // ranks % parts:
        checks.add(
            "num_envs",
            f"num_envs: expected a multiple of minibatches = {parts} on each of the {ranks} ranks, where minibatches "
            f"are whole streams with a memory, received {config.num_envs}. Remedy: num_envs={ranks * parts}.",
        )
    if checks.sound("num_envs") and config.batch_size // ranks % parts:
        checks.add(
            "num_envs",
            f"num_envs: expected num_envs * num_steps of each of the {ranks} ranks, {config.batch_size // ranks}, "
            f"to be a multiple of minibatches = {parts}, received {config.num_envs}. Remedy: num_envs={ranks * parts} "
            "or a multiple of that.",
        )
    groups = config.num_envs // ranks % config.env_groups
    if checks.sound("num_envs") and groups:
        checks.add("env_groups", f"env_groups: expected a divisor of each rank's {config.num_envs // ranks} envs, "
                   f"received {config.env_groups}. Remedy: env_groups=1.")  # fmt: skip
    return checks.problems()


def seeds_of(seed: int, ranks: int) -> list[int]:
    """A seed for each rank, no two alike: the run's for the first, words of a hash of it for the others.

    Args:
        seed: of the run.
        ranks: number of ranks.
    """
    found = [seed]
    # beyond the numbers that runs usually have, and small enough for the seeds of envs that follow from them
    for number in np.random.SeedSequence(seed, spawn_key=(ranks,)).generate_state(4 * ranks, np.uint32).tolist():
        own = USUAL_SEEDS + number % SEEDS
        if own not in found:
            found.append(own)
    return found[:ranks]
