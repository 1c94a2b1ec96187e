"""The checkpoints of a run: the newest few, and the best."""

import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from torchrl_perf.run_layout import CHECKPOINTS
from torchrl_perf.runtime.files import (
    PARTIAL,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
    sync_folder,
)
from torchrl_perf.trainers.run.state import check_format

__all__ = ["BEST", "CheckpointFolder", "load_checkpoint", "save_checkpoint"]

BEST = "best.pt"
ASIDE = ".set-aside"
NUMBERED = re.compile(r"(\d{9,})\.pt")

logger = logging.getLogger("torchrl_perf")


class CheckpointFolder:
    """A folder of the newest ``keep`` checkpoints ``<iteration>.pt`` (nine digits) and of ``best.pt``.

    Each file is written whole or not at all, and older ones are removed only after that: a process that is killed at
    any moment leaves a checkpoint that loads. ``best.pt`` is a hard link to its numbered file, if the file system
    allows.

    Args:
        path: the folder; made at the first write.
        keep: how many of the newest are kept.

    Raises:
        ValueError: for ``keep`` below 1.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(
                f"keep: expected a positive number of checkpoints, received {keep}. Remedy: keep=1 or more."
            )
        self.path = Path(path)
        self.keep = keep

    @property
    def best(self) -> Path:
        """Where the best checkpoint is, if there is one."""
        return self.path / BEST

    def files(self) -> list[Path]:
        """The numbered checkpoints, newest first; links to nothing are none."""
        found = [path for path in self.path.glob("*.pt") if NUMBERED.fullmatch(path.name) and path.is_file()]
        return sorted(found, key=iteration_of, reverse=True)

    def write(self, state: Mapping[str, Any], iteration: int) -> Path:
        """Writes a checkpoint, then removes the oldest beyond ``keep``.

        Checkpoints of later iterations belong to a run that was resumed from an earlier state: they are renamed, so
        that the highest number is always this run's.

        Args:
            state: what :meth:`TrainState.snapshot` gives.
            iteration: iterations done.

        Raises:
            OSError: for a full disk or a folder that is read-only; the earlier checkpoints are as they were.
            CheckpointError: for a state that could not be loaded.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / f"{iteration:09d}.pt"
        later = [file for file in self.files() if iteration_of(file) > iteration]
        if later:
            # written before the others are renamed: they may be the only ones, if the run resumed from the best one
            new = save_checkpoint(state, path.with_name(f"{path.name}{PARTIAL}"))
            for file in later:
                file.replace(file.with_name(file.name + ASIDE))
            new.replace(path)
            sync_folder(self.path)
        else:
            save_checkpoint(state, path)
        for old in self.files()[self.keep :]:
            old.unlink(missing_ok=True)
        return path

    def mark_best(self, iteration: int) -> None:
        """Makes ``best.pt`` the checkpoint of an iteration; does nothing if that is missing or already the best.

        Raises:
            OSError: for a full disk or a folder that is read-only; the earlier best is as it was.
        """
        source, partial = self.path / f"{iteration:09d}.pt", self.path / f"{BEST}.partial"
        if not source.is_file() or (self.best.exists() and source.samefile(self.best)):
            return
        partial.unlink(missing_ok=True)
        try:
            os.link(source, partial)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, partial)
        try:
            os.replace(partial, self.best)
        finally:
            partial.unlink(missing_ok=True)
        sync_folder(self.path)

    def load_newest(
        self, device: torch.device | str = "cpu", *, made_by: str = "", among: Collection[str] | None = None
    ) -> tuple[Path, dict[str, Any]]:
        """Reads the newest checkpoint that can be read, and says which newer ones cannot (logger ``torchrl_perf``).

        Args:
            device: where to put the tensors.
            made_by: name of the algorithm; any where it is empty.
            among: names of those that may be taken; by default all.

        Returns:
            The file and what it holds.

        Raises:
            FileNotFoundError: if there is none.
            CheckpointError: if none of them can be read, with the reason of each.
        """
        files = [path for path in self.files() if among is None or path.name in among]
        if not files:
            beside = sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else "no such folder"
            raise FileNotFoundError(
                f"checkpoint: expected files <iteration>.pt in {self.path}, received {beside}. Remedy: a run that has "
                "written one; checkpoint_interval sets how often."
            )
        problems = []
        for path in files:
            try:
                state = read_checkpoint(path, device, made_by=made_by)
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
                logger.warning("%s is left out: %s", path.name, error)
                continue
            return path, state
        raise CheckpointError(
            f"checkpoint: expected one of {[path.name for path in files]} in {self.path} to be readable, received: "
            f"{' '.join(problems)} Remedy: start a new run, or restore the files from a backup."
        )


def read_checkpoint(path: Path, device: torch.device | str = "cpu", *, made_by: str = "") -> dict[str, Any]:
    """Reads one checkpoint of a run.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointError: for a file that is cut off, damaged, foreign, of another version or algorithm, or holds code.
    """
    state = load_checkpoint(path, device)
    try:
        check_format(state, made_by)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return state


def checkpoints_of(path: Path, rank: int) -> Path:
    """The folder of a rank's checkpoints: the run's own for the first, one below it for each other."""
    return path / CHECKPOINTS / (f"rank{rank}" if rank else "")


def ranks_of_run(path: Path) -> int:
    """With how many ranks a run has written its checkpoints; 1 for one without any.

    Args:
        path: folder of the run.
    """
    return 1 + sum(1 for folder in (path / CHECKPOINTS).glob("rank*") if folder.is_dir())


def newest_common(path: Path, ranks: int) -> Path | None:
    """The newest checkpoint that all ranks of a run have, as the first rank's file; None where there is none.

    Args:
        path: folder of the run.
        ranks: number of ranks.
    """
    common = sorted(common_names(path, ranks), key=lambda name: iteration_of(Path(name)))
    return checkpoints_of(path, 0) / common[-1] if common else None


def common_names(path: Path, ranks: int) -> set[str]:
    """Names of the checkpoints that all ranks of a run have; arguments as for :func:`newest_common`."""
    names = [{file.name for file in CheckpointFolder(checkpoints_of(path, rank)).files()} for rank in range(ranks)]
    return set.intersection(*names)


def iteration_of(path: Path) -> int:
    """Iterations that were done when a numbered checkpoint was written, by its name."""
    match = NUMBERED.fullmatch(path.name)
    if match is None:
        raise ValueError(
            f"checkpoint: expected a name <iteration>.pt of nine digits, received {path.name}. Remedy: keep the name "
            "that the run gave the file."
        )
    return int(match[1])
