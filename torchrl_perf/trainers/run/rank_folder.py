"""The folder of a run that several ranks share: the first has all of it, each other one a folder of checkpoints."""

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from torchrl_perf.parallel import Ranks
from torchrl_perf.run_layout import CHECKPOINTS, RunState
from torchrl_perf.runtime.files import CheckpointError, remove_partial_files, save_checkpoint
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.run.checkpoint import (
    CheckpointFolder,
    checkpoints_of,
    iteration_of,
    newest_common,
    ranks_of_run,
    read_checkpoint,
)
from torchrl_perf.trainers.run.files import RunFolder

__all__ = [
    "RESCUED",
    "RankFolder",
    "common_checkpoint",
    "newest_common",
    "open_folder",
    "ranks_of_run",
    "save_rescued",
]

RESCUED = "rescued.pt"
"""What a rank saves of an iteration that is not whole, after another one was lost: the policy can be used."""

logger = logging.getLogger("torchrl_perf")


class RankFolder:
    """What a rank but the first writes of a run: its checkpoints, in a folder of its own below the run's.

    Args:
        path: folder of the run, which the first rank holds.
        config: settings of the run.
        rank: from 1.
    """

    def __init__(self, path: Path, config: RunConfig, rank: int) -> None:
        self.path = path
        self.checkpoints = CheckpointFolder(checkpoints_of(path, rank), keep=config.keep_checkpoints)
        # there from the start, so that a run is known to be of several ranks before all have a checkpoint
        self.checkpoints.path.mkdir(parents=True, exist_ok=True)
        remove_partial_files(self.checkpoints.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def write_status(self, state: RunState, step: int) -> None:
        """Nothing: the first rank writes the status."""

    def check(self) -> None:
        """Nothing: the first rank holds the folder."""


def open_folder(ranks: Ranks, path: Path, config: RunConfig, env: str) -> AbstractContextManager[Any]:
    """The folder of a run as this rank writes to it.

    Args:
        ranks: the processes.
        path: the folder.
        config: settings of the whole run.
        env: true name of its env.

    Raises:
        RunFolderError: on the first rank, as :class:`RunFolder`.
        RankStoppedError: on the others then.
    """
    held: list[RunFolder] = []
    ranks.of_first(lambda: held.append(RunFolder(path, config, env)))
    return held[0] if held else RankFolder(path, config, ranks.rank)


def common_checkpoint(ranks: Ranks, path: Path, device: Any, *, made_by: str, name: str = "") -> tuple[Path, Any]:
    """The newest checkpoint that all ranks have and can read; all of them ask at once.

    Args:
        ranks: the processes.
        path: folder of the run.
        device: where to put the tensors.
        made_by: name of the algorithm.
        name: of the file, where a certain one is asked for.

    Returns:
        This rank's file, and what it holds.

    Raises:
        CheckpointError: if there is none.
    """
    folder = CheckpointFolder(checkpoints_of(path, ranks.rank))
    own = [name] if name and (folder.path / name).is_file() else []
    own = own if name else [file.name for file in folder.files()]
    each = ranks.values(own)
    common = sorted(set.intersection(*map(set, each)), key=lambda one: iteration_of(Path(one)) if not name else 0)
    for file in reversed(common):
        try:
            state = read_checkpoint(folder.path / file, device, made_by=made_by)
        except (CheckpointError, OSError) as error:
            logger.warning("%s is left out: %s", file, error)
            state = None
        if ranks.all(state is not None):
            return folder.path / file, state
    received = "; ".join(f"rank {rank}: {files[:3]}" for rank, files in enumerate(each))
    raise CheckpointError(
        f"checkpoint: expected one that all {ranks.size} ranks have in {path / CHECKPOINTS}, received {received}. "
        "Remedy: as many ranks as the run was begun with, on a file system that all hosts share; or a new run."
    )


def save_rescued(trainer: Any, path: Path) -> None:
    """Saves what a rank has, within an iteration, after another one was lost; the disk may refuse.

    On CUDA nothing is saved: a collective that waits for the lost rank would be waited for.

    Args:
        trainer: of this rank.
        path: folder of the run.
    """
    if trainer.device.type == "cuda":
        return
    try:
        folder = checkpoints_of(path, 0)
        folder.mkdir(parents=True, exist_ok=True)
        save_checkpoint(trainer.train_state.snapshot(), folder / RESCUED)
    except (OSError, CheckpointError) as error:
        logger.warning("%s cannot be written: %s", RESCUED, error)
