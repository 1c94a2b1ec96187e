"""A run that goes on with another number of ranks: what was learnt and remembered is kept, the envs begin anew."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.parallel import Ranks
from torchrl_perf.run_layout import CHECKPOINTS
from torchrl_perf.runtime.files import CheckpointError, save_checkpoint
from torchrl_perf.trainers.run.checkpoint import (
    CheckpointFolder,
    checkpoints_of,
    common_names,
    ranks_of_run,
    read_checkpoint,
)
from torchrl_perf.trainers.run.reshard import end_streams, problem_of_replay, resharded_frames, resharded_replay

__all__ = ["RESHARDED", "load_of_other_ranks", "problem_of_other_ranks"]

RESHARDED = (
    *("ppo", "hybrid-ppo", "pqn"),
    *("dqn", "qr-dqn", "iqn", "rainbow", "ddpg", "td3", "sac", "ac-iqn"),
)
"""Algorithms whose state, beside what all ranks have in common, is that of envs, exploration and replay alone."""

REPLAY, COUNTED = "replay", "policy"
"""Parts of a checkpoint: what is dealt out anew, and what counts the frames of a rank."""

OF_ENVS = ("collector", "episodes", "metrics", "micro_batches", "reward_normalization")
"""Parts of a checkpoint that are of a rank's envs, or have entries for each of them."""


def problem_of_other_ranks(config: Any, path: Path, before: int, ranks: int) -> str:
    """Why a run cannot go on with another number of ranks; empty where it can.

    Args:
        config: its settings.
        path: folder of the run.
        before: ranks that it was begun with.
        ranks: those that there are.
    """
    if before == ranks:
        return ""
    reason = problem_of_replay(config)
    if config.algorithm not in RESHARDED:
        reason = f"each has a part of the state of {config.algorithm} of its own (curriculum, options, memory)"
    if not reason:
        return ""
    return (
        f"--resume {path}: expected the {before} ranks that the run was begun with, since {reason}, received {ranks}. "
        f"Remedy: --ranks {before}; runs of {', '.join(RESHARDED)} with plain replay take any number."
    )


def load_of_other_ranks(trainer: Any, ranks: Ranks, path: Path, *, name: str = "") -> Path:
    """Loads what a run has learnt into a trainer of another number of ranks, and makes that the run's checkpoint.

    Networks, optimiser, moments of normalisation, counters and schedules are those of the checkpoint, and the rows of
    all replays with their priorities are dealt out anew. Envs, episodes and random numbers begin anew, so that the run
    is not, bit for bit, the one that was stopped; the newest row of each stream is truncated.

    Args:
        trainer: of this rank.
        ranks: the processes, which call it together.
        path: folder of the run.
        name: of a certain checkpoint; by default the newest that can be read.

    Returns:
        The first rank's checkpoint.

    Raises:
        CheckpointError: without a checkpoint that can be read.
    """
    folder, algorithm = CheckpointFolder(path / CHECKPOINTS), trainer.config.algorithm
    before = ranks_of_run(path)
    name = name or ranks.of_first(lambda: _newest_of_all(folder, path, before, algorithm))
    state = read_checkpoint(folder.path / name, trainer.device, made_by=algorithm)
    parts = state["parts"]
    if REPLAY in parts:
        config, buffer = trainer.config, trainer.buffer
        replays = [parts[REPLAY], *(_replay_of(path, rank, name, algorithm) for rank in range(1, before))]
        parts[REPLAY] = resharded_replay(replays, ranks.rank, config.num_streams, buffer.storage.max_size)
        state["counters"]["frames"] = state["counters"]["frames"] * before // ranks.size
    if COUNTED in parts:
        own = trainer.parts()[COUNTED].state_dict()
        parts[COUNTED] = resharded_frames(parts[COUNTED], own, before, ranks.size)
    trainer.train_state.load_state_dict(state, skip=[*set(parts).intersection(OF_ENVS), "random"])
    if REPLAY in parts:
        end_streams(trainer.buffer)
    _load_statistics(trainer, state["parts"].get("reward_normalization"))
    # the state of the envs at the start of a run would give the same episodes once more
    torch.manual_seed(trainer.config.seed + trainer.iterations_done)
    ranks.values(None)  # all have read what is written over now
    if ranks.rank:
        _save(trainer, checkpoints_of(path, ranks.rank) / name)
    ranks.values(None)  # all others have theirs
    if ranks.first:
        for old in folder.path.glob("rank*"):
            if old.is_dir() and int(old.name.removeprefix("rank")) >= ranks.size:
                shutil.rmtree(old)
        _save(trainer, folder.path / name)
    ranks.values(None)
    return folder.path / name


def _newest_of_all(folder: CheckpointFolder, path: Path, before: int, algorithm: str) -> str:
    """The name of the newest checkpoint that all ranks of a run have written, and that can be read.

    Raises:
        CheckpointError: where there is none.
    """
    names = common_names(path, before)
    if not names:
        raise CheckpointError(
            f"checkpoint: expected one that all {before} ranks of the run have in {folder.path}, received none. "
            "Remedy: a new run."
        )
    return folder.load_newest("cpu", made_by=algorithm, among=names)[0].name


def _replay_of(path: Path, rank: int, name: str, algorithm: str) -> Mapping[str, Any]:
    """The replay of another rank, on the host.

    Raises:
        CheckpointError: where its checkpoint cannot be read.
    """
    return read_checkpoint(checkpoints_of(path, rank) / name, "cpu", made_by=algorithm)["parts"][REPLAY]


def _load_statistics(trainer: Any, saved: Mapping[str, Tensor] | None) -> None:
    """Moments of the return; the discounted returns themselves are of envs that are gone."""
    rewards = trainer.normalization.rewards
    if rewards is None or saved is None:
        return
    rewards.load_state_dict({**saved, "returns": torch.zeros_like(rewards.returns)})


def _save(trainer: Any, path: Path) -> None:
    """Writes a checkpoint whole or not at all.

    Raises:
        CheckpointError: where it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_checkpoint(trainer.train_state.snapshot(), path)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint: expected room for {path}, received {error}. Remedy: free space, or the number of ranks that "
            "the run was begun with."
        ) from error
