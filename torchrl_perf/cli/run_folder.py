"""The state of a run from its folder, while it goes on. Reads little of a few files; does not load torch."""

import csv
import math
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from torchrl_perf.run_layout import CHECKPOINTS, CONFIG, PROGRESS, STATUS, RunState, read_json

__all__ = ["Checkpoint", "ProgressTail", "RunStatus", "find_run", "newest_checkpoint", "read_status"]

LATEST_BYTES = 64 * 1024
MOST_BYTES = 1024 * 1024
QUIET_SECONDS = 10.0


@dataclass(frozen=True)
class RunStatus:
    """The state of a run."""

    state: str
    """running, finished, stopped (by a signal), failed, killed (it says running, its process is gone), or unknown."""
    pid: int | None = None
    """Process of the run."""
    step: int | None = None
    """Env steps at the last time that the run wrote its status."""

    @property
    def is_over(self) -> bool:
        """Whether no more rows will come."""
        return self.state not in ("running", "unknown")


@dataclass(frozen=True)
class Checkpoint:
    """The newest checkpoint of a run."""

    name: str
    age: float
    """Seconds since it was written."""


def find_run(run: Path | None, root: Path) -> Path:
    """The folder of a run: the one that is named, or the one below ``root`` that was written to last.

    Args:
        run: folder of the run, or None.
        root: folder of runs.

    Raises:
        FileNotFoundError: if there is no such folder, or no run in it.
    """
    if run is not None:
        if not run.is_dir():
            raise FileNotFoundError(
                f"run: expected the folder of a run, received {run}, which is not there. Remedy: the run_dir that the "
                "run printed."
            )
        if not any((run / name).is_file() for name in (PROGRESS, CONFIG, STATUS)):
            raise FileNotFoundError(
                f"run: expected {PROGRESS} or {CONFIG} in {run}, received {_listing(run)}. Remedy: the folder that "
                "holds them."
            )
        return run
    runs = [(max(times), path) for path in _folders(root) if (times := _written(path))]
    if not runs:
        raise FileNotFoundError(
            f"run: expected a run below {root}, received {_listing(root)}. Remedy: name its folder, or --run-dir."
        )
    return max(runs)[1]


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _written(run: Path) -> list[float]:
    """Times at which the files of a run were written to last."""
    times = [_modified(run / name) for name in (PROGRESS, CONFIG, STATUS)]
    return [written for written in times if written is not None]


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if names[8:] else "") if names else "an empty folder"


def read_status(run: Path) -> RunStatus:
    """The state of the run, by its ``status.json`` and by whether its process lives.

    A run whose process is not found counts as killed only once its rows have stopped for ten seconds: the folder may be
    one of another machine.

    Args:
        run: folder of the run.
    """
    values = read_json(run / STATUS)
    pid, step, state = (values.get(name) for name in ("pid", "step", "state"))
    pid = pid if isinstance(pid, int) and pid > 0 else None
    step = int(step) if isinstance(step, int | float) else None
    if not isinstance(state, str) or state not in get_args(RunState):
        return RunStatus("unknown", pid, step)
    if state == "running" and pid is not None and not _is_alive(pid):
        quiet = time.time() - max(_written(run), default=0.0)
        state = "killed" if quiet > QUIET_SECONDS else state
    return RunStatus(state, pid, step)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return False
    if os.name == "nt":
        return True  # signal 0 would end a process there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """The checkpoint that was written last, or None."""
    try:
        with os.scandir(run / CHECKPOINTS) as entries:
            # best.pt is a link to a numbered file, whose name says more
            found = [(e.stat().st_mtime, e.name != "best.pt", e.name) for e in entries if e.name.endswith(".pt")]
    except OSError:
        return None
    if not found:
        return None
    written, _, name = max(found)
    return Checkpoint(name, max(0.0, time.time() - written))


@dataclass
class ProgressTail:
    """Follows a ``progress.csv`` that is being written, however long it has become.

    A poll reads what was appended since the last one, a megabyte at most; the first one, and one after the file was
    rewritten (a column was added, a resumed run cut rows off), reads the header and the last 64 KiB. A row without its
    end of line is left for later.
    """

    path: Path
    """The file; it need not exist yet."""
    history: int = 128
    """Rows kept."""
    columns: list[str] = field(default_factory=list, init=False)
    """Names of the columns."""
    rows: deque[dict[str, float]] = field(init=False)
    """Newest rows, oldest first: the cells that hold numbers, NaN included."""
    _header: bytes = field(default=b"", init=False)
    _file: tuple[int, int] = field(default=(0, 0), init=False)
    _offset: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.rows = deque(maxlen=self.history)

    def poll(self) -> bool:
        """Read what is new; returns whether there was anything."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if (stat.st_dev, stat.st_ino) == self._file and stat.st_size == self._offset:
                    return False
                is_same = (stat.st_dev, stat.st_ino) == self._file and stat.st_size > self._offset
                # A replaced file may get the same inode number, but hardly with the same header.
                if not is_same or not self._header or file.read(len(self._header)) != self._header:
                    file.seek(0)
                    if not self._start(file.readline(), (stat.st_dev, stat.st_ino)):
                        return False
                    is_same = False
                most = MOST_BYTES if is_same else LATEST_BYTES
                start = max(self._offset, stat.st_size - most)
                file.seek(start)
                return self._take(file.read(most), start, is_cut=start > self._offset)
        except OSError:
            return False

    def _start(self, header: bytes, file: tuple[int, int]) -> bool:
        """Begin with a new file; returns whether its header is complete."""
        self._file, self._header, self._offset = (0, 0), b"", 0
        if not header.endswith(b"\n"):
            return False
        self.columns = next(csv.reader([header.decode("utf-8", "replace")]), [])
        self.rows.clear()
        self._file, self._header, self._offset = file, header, len(header)
        return True

    def _take(self, block: bytes, start: int, *, is_cut: bool) -> bool:
        """Keep the whole rows of a block that begins at ``start``, in the middle of a row if it is cut."""
        first = block.find(b"\n") + 1 if is_cut else 0
        end = block.rfind(b"\n") + 1
        self._offset = start + max(end, first)
        rows = csv.reader(block[first:end].decode("utf-8", "replace").splitlines())
        taken = [self._numbers(cells) for cells in rows if len(cells) == len(self.columns)]
        self.rows.extend(taken)
        return bool(taken)

    def _numbers(self, cells: list[str]) -> dict[str, float]:
        row: dict[str, float] = {}
        for name, cell in zip(self.columns, cells, strict=True):
            try:
                row[name] = float(cell)
            except ValueError:
                continue
        return row


def finite(value: float | None) -> float | None:
    """The number, or None if there is none or it is not finite; JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
