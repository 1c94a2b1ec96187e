"""Files that are written whole or not at all, checkpoints that load without executing code, and a lock of a folder."""

import contextlib
import errno
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

__all__ = [
    "CheckpointError",
    "FolderLock",
    "load_checkpoint",
    "remove_partial_files",
    "save_checkpoint",
    "write_text",
]

PARTIAL = ".partial"
FLOCK = "hhqqi0q"  # struct flock of 64-bit Linux: type, whence, start, length, process
PLAIN = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written: cut off, foreign, of another version, or holding code."""


def save_checkpoint(state: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Writes ``state`` whole or not at all: if the write or the machine fails, the old file remains.

    Args:
        state: tensors and plain values in dicts, lists and tuples.
        path: the file; its folder is made if missing.

    Raises:
        CheckpointError: for a value of another type, which could not be loaded without executing code.
        OSError: for a full disk or a folder that is read-only; no partial file is left.
    """
    _check_plain(state, "")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(path, lambda file: torch.save(state, file))
    return path


def load_checkpoint(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, Any]:
    """Reads a checkpoint onto ``device``, with ``weights_only=True``.

    Raises:
        FileNotFoundError: naming the file and what lies beside it.
        CheckpointError: a ValueError, for a file that is cut off, damaged, was never a checkpoint, or holds code.
    """
    path = Path(path)
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*")) if path.parent.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"checkpoint: expected a file at {path}, received {beside}. Remedy: pass a file of the run's checkpoints."
        )
    if not zipfile.is_zipfile(path):  # what torch.save writes
        raise CheckpointError(
            f"checkpoint: expected a whole file of torch.save at {path}, received {path.stat().st_size} bytes of "
            "something else, or of one that is cut off. Remedy: an earlier checkpoint."
        )
    _check_sums(path)
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        first = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"checkpoint: expected tensors and plain values at {path}, received something that would execute code or "
            f"that is damaged, and executed none of it ({first}). Remedy: only files that this package has saved."
        ) from None
    except Exception as error:  # unpickling damaged bytes may raise anything
        if isinstance(error, torch.OutOfMemoryError | MemoryError | OSError):
            raise
        raise CheckpointError(
            f"checkpoint: expected a file of torch.save at {path}, received one that cannot be read: "
            f"{type(error).__name__}, {error}. Remedy: an earlier checkpoint."
        ) from error


def write_text(path: str | os.PathLike[str], text: str, *, lasting: bool = True) -> None:
    """Writes a text file whole or not at all.

    Args:
        path: the file, in a folder that exists.
        text: its content, written as UTF-8.
        lasting: whether it has to survive a crash of the machine; costs a wait for the disk.

    Raises:
        OSError: if it cannot be written; an earlier file is as it was.
    """
    _write_whole(Path(path), lambda file: file.write(text.encode("utf-8")), lasting=lasting)


def remove_partial_files(folder: str | os.PathLike[str]) -> None:
    """Removes the partial files of interrupted writes from a folder, if it exists."""
    for partial in Path(folder).glob(f"*{PARTIAL}"):
        partial.unlink(missing_ok=True)


class FolderLock:
    """Keeps a second process from writing into the folder of a run; the lock ends with the process in any case.

    Where the file system or the platform has no locks, it does nothing.

    Args:
        folder: the folder; gets a file ``run.lock``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / "run.lock"
        self._file: IO[bytes] | None = None

    def acquire(self) -> bool:
        """Takes the lock; False if another process has it.

        Raises:
            OSError: if the folder cannot be written to.
        """
        try:
            import fcntl
        except ImportError:
            return True
        # a record lock rather than flock: forked processes, such as workers of envs, do not keep it alive
        file = self.path.open("ab")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            return False
        except OSError:  # a file system without locks
            file.close()
            return True
        self._file = file
        return True

    def holder(self) -> int | None:
        """Number of the process that has the lock; None if there is none, or the system does not tell."""
        try:
            import fcntl

            with self.path.open("rb") as file:
                asked = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
                kind, *_, pid = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        except (ImportError, OSError, struct.error):
            return None
        return pid if kind != fcntl.F_UNLCK and pid > 0 else None

    def take_over(self, other: "FolderLock") -> None:
        """Takes over the lock that another object holds, releasing its own."""
        self.release()
        self.path, self._file = other.path, other.hand_over()

    def hand_over(self) -> IO[bytes] | None:
        """The file that holds the lock, None where nobody does; it is no longer this object's to release."""
        file, self._file = self._file, None
        return file

    def release(self) -> None:
        """Gives the lock back; more calls do nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_whole(path: Path, write: Callable[[IO[bytes]], object], *, lasting: bool = True) -> None:
    """Write beside the file, wait for the disk, rename; the order in which each step lasts if the machine stops."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, RuntimeError):
            _raise_disk_error(error, path)
        raise
    if lasting:
        sync_folder(path.parent)


def _raise_disk_error(error: RuntimeError, path: Path) -> None:
    """Torch reports a failed write as a RuntimeError whose cause is the OSError, if there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            raise OSError(cause.errno, os.strerror(cause.errno or 0), os.fspath(path)) from error
        cause = cause.__cause__ or cause.__context__


def sync_folder(folder: Path) -> None:
    """Makes a rename in a folder durable; platforms that cannot open folders do not need it."""
    if os.name != "posix":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # from network file systems without it
            raise
    finally:
        os.close(number)


def _check_sums(path: Path) -> None:
    """Verify the file's checksums of its entries, which torch does not."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except OSError:
        raise
    except Exception as error:  # damaged files may raise anything
        damaged = f"its table ({error})"
    if damaged is not None:
        raise CheckpointError(
            f"checkpoint: expected a sound file at {path}, received one that is damaged in {damaged}. Remedy: an "
            "earlier checkpoint."
        )


def _check_plain(value: Any, where: str) -> None:
    for place, leaf in _leaves(value, where):
        if type(leaf) not in TENSORS and type(leaf) not in PLAIN:
            raise CheckpointError(
                f"checkpoint: expected tensors and plain values, received {type(leaf).__module__}."
                f"{type(leaf).__name__} at {place or 'the top'}, which could not be loaded without executing code. "
                "Remedy: a state_dict that gives it as a tensor, a number or a text."
            )


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if type(value) in (dict, OrderedDict):
        for key, entry in value.items():
            yield from _leaves(entry, f"{where}/{key}")
    elif type(value) in (list, tuple, set):
        for number, entry in enumerate(value):
            yield from _leaves(entry, f"{where}/{number}")
    else:
        yield where, value
