"""One tidy CSV file per run: a row per flush, a column per metric."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.record.loggers import Logger

from torchrl_perf.metrics.histogram import Histogram
from torchrl_perf.run_layout import PROGRESS
from torchrl_perf.runtime.files import write_text
from torchrl_perf.runtime.timing import Stopwatch

_FIXED = ["step", "wall_time"]
_FIRST = ("episode/mean_return", "eval/mean_return", "time/steps_per_second", "episode/", "eval/")
"""What a reader looks for first, as names or beginnings of names."""
_LAST = ("nonfinite/", "fault/", "train/first_bad_iteration")
"""Counts of faults, which are 0 in a sound run."""

logger = logging.getLogger("torchrl_perf")


class ProgressCSVLogger(Logger):
    """A TorchRL logger that writes ``progress.csv``, with one row per step and rising steps.

    TorchRL's ``CSVLogger`` writes one file per scalar and keeps every value in memory; here a row is on disk as soon
    as it is logged, in one write, and nothing is kept. Columns are ``step``, ``wall_time`` (seconds of logging so far,
    continued after a resume) and the metrics: returns and speed first, counts of faults last, between them the others
    in the order of their first row. A metric that first comes later gets a column in that order: the file is rewritten
    once, with empty cells in the earlier rows. A file with another order keeps it until then.

    An existing file is continued. A last line that a kill has left incomplete is dropped, and so are the rows from the
    first new step on: a run that went on after its checkpoint and then died has left rows that the resumed run writes
    again. After that first row, metrics of the last step or of an earlier one join the row of their step, in cells that
    are still empty. After an ``OSError``, as on a full disk, the file is as before, and the row can be logged again.

    Args:
        exp_name: name of the run, kept for TorchRL's interface.
        log_dir: folder of the run; ``progress.csv`` and ``hparams.json`` lie directly in it.
    """

    def __init__(self, exp_name: str, log_dir: str | os.PathLike[str]) -> None:
        self.path = Path(log_dir) / PROGRESS
        self._columns: list[str] = []
        self._last: dict[str, Any] | None = None
        self._last_start = 0
        super().__init__(exp_name=exp_name, log_dir=os.fspath(log_dir))
        self._continues = self._last is not None
        self._seconds_before = self._wall_time()
        self._clock = Stopwatch("cpu").start()

    @property
    def last_step(self) -> int | None:
        """Step of the last row, ``None`` without one."""
        return None if self._last is None else round(float(self._last["step"]))

    def log_metrics(self, metrics: Any, step: int | None = None, *, keys_sep: str = "/") -> dict[str, Any]:
        """Write one row, or join the row that the step has.

        Args:
            metrics: mapping of names to numbers or one-element tensors, or a TensorDict.
            step: environment steps so far; required.
            keys_sep: separator of nested TensorDict keys.

        Returns:
            The names and numbers that were given.

        Raises:
            ValueError: if ``step`` is missing, or a metric has the name of a fixed column.
            OSError: if the file cannot be written; it is as before then.
        """
        if isinstance(metrics, TensorDictBase):
            metrics = dict(metrics.flatten_keys(keys_sep).items())
        row = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        if step is None or any(name in row for name in _FIXED):
            raise ValueError(
                f"ProgressCSVLogger.log_metrics: expected a step and metrics not named {_FIXED}, received step={step} "
                f"and {sorted(row)}. Remedy: pass step= and rename the metric."
            )
        last = self.last_step
        if self._continues and last is not None and step <= last:
            self._keep_rows_below(step)
            last = self.last_step
        self._continues = False
        if new := [name for name in row if name not in self._columns]:
            columns = _in_order([*(self._columns or _FIXED), *new])
            if self.path.exists():
                self._rewrite(columns, self._read_rows())
            self._columns = columns
        self._clock.stop()
        seconds = self._seconds_before + self._clock.host_seconds
        cells = {"step": step, "wall_time": f"{seconds:.3f}", **row}
        if last is None or step > last:
            self._append(cells)
        elif step == last:
            self._extend_last(cells)
        else:
            self._insert(cells)
        return row

    def log_row(self, row: Mapping[str, float], histograms: Mapping[str, Histogram], step: int) -> None:
        """Write the numbers of an interval; histograms have no cell in a CSV file."""
        if row:
            self.log_metrics(row, step=step)

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Write one metric; prefer ``log_metrics``, which writes many in one row."""
        self.log_metrics({name: value}, step=step)

    def log_hparams(self, cfg: Mapping[str, Any]) -> None:
        """Write the configuration to ``hparams.json``; values that JSON lacks are written as their text."""
        text = json.dumps(dict(cfg), indent=2, sort_keys=True, default=str)
        write_text(self.path.with_name("hparams.json"), text + "\n")

    def log_histogram(self, name: str, data: Sequence[float], **kwargs: Any) -> NoReturn:
        """Refuse: a histogram has no cell in a CSV file.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"progress.csv: expected numbers, received the histogram {name!r}, which no cell can hold. Remedy: log it "
            "to W&B or TensorBoard."
        )

    def log_video(self, name: str, video: Tensor, step: int | None = None, **kwargs: Any) -> NoReturn:
        """Refuse: a video has no cell in a CSV file.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"progress.csv: expected numbers, received the video {name!r}, which no cell can hold. Remedy: log it to "
            "W&B or TensorBoard."
        )

    def __repr__(self) -> str:
        return f"ProgressCSVLogger(path={os.fspath(self.path)!r})"

    def _create_experiment(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._repair()
            self._tell_torn()
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), [])
            self._remember(self._read_rows())
        return self.path

    def _checkpoint_state(self) -> dict[str, Any]:
        return {"last_step": self.last_step}

    def _load_checkpoint_state(self, state_dict: Mapping[str, Any]) -> None:
        if self._columns and "last_step" in state_dict:
            last = state_dict["last_step"]
            self._keep_rows_below(float("-inf") if last is None else last + 1)

    # Reading

    def _repair(self) -> None:
        """Drop a last line without its end, which a kill in the middle of a write leaves."""
        with self.path.open("rb+") as file:
            content = file.read()
            if content and not content.endswith(b"\n"):
                kept = content.rfind(b"\n") + 1
                file.truncate(kept)
                logger.warning(
                    "%s ended in the middle of a row: its last %d bytes are dropped.", self.path, len(content) - kept
                )

    def _tell_torn(self) -> None:
        """Report how many lines are no rows of the table, as in a file that was cut or mixed with another."""
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            lines = list(csv.reader(file))
        if lines and lines[0][: len(_FIXED)] != _FIXED:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            self.path.replace(aside)
            logger.warning("%s is damaged: its first line names no columns. It is kept as %s.", self.path, aside.name)
            return
        if lost := max(0, len(lines) - 1) - len(self._read_rows()):
            logger.warning(
                "%s is damaged: %d of its lines are no rows of the columns in its first line. They are left out.",
                *(self.path, lost),
            )

    def _read_rows(self) -> list[dict[str, Any]]:
        """All rows so far, from the disk; lines that are no rows are left out."""
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return [row for row in csv.DictReader(file, restval="") if None not in row and _is_number(row.get("step"))]

    def _remember(self, rows: Sequence[dict[str, Any]]) -> None:
        """Keep the last of the rows that the file ends with, and where it starts."""
        self._last = dict(rows[-1]) if rows else None
        if self._last is not None:
            self._last_start = self.path.stat().st_size - len(self._line(self._last))

    def _wall_time(self) -> float:
        return float(self._last["wall_time"]) if self._last is not None and _is_number(self._last["wall_time"]) else 0.0

    # Writing

    def _line(self, cells: Mapping[str, Any]) -> bytes:
        return _lines(self._columns, [cells])

    def _append(self, cells: dict[str, Any]) -> None:
        # Opened for each row: a row per interval is rare, and then no exit, clean or not, can lose one.
        self._tell_changed()
        with self.path.open("ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            header = b"" if start else _lines(self._columns, [dict(zip(self._columns, self._columns, strict=True))])
            _write_all(file, header + self._line(cells), start, before=b"")
        self._last, self._last_start = cells, start + len(header)

    def _tell_changed(self) -> None:
        """Notice that the file was deleted or cut since the last row, and say so; the end of a cut row is dropped."""
        if self._last is None:
            return
        expected = self._last_start + len(self._line(self._last))
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            logger.warning(
                "%s was deleted: the rows up to step %s are lost, later ones go to a new file.",
                self.path,
                self.last_step,
            )
            return
        if size < expected:
            logger.warning(
                "%s was cut from %d to %d bytes: rows are lost, later ones are added.", self.path, expected, size
            )
            self._repair()

    def _extend_last(self, cells: dict[str, Any]) -> None:
        """Fill empty cells of the last row in place: the line can only grow."""
        assert self._last is not None
        merged = _merge(self._last, cells)
        if not self.path.exists():
            self._tell_changed()
            self._insert(merged)
            return
        with self.path.open("rb+", buffering=0) as file:
            file.seek(self._last_start)
            before = file.read()
            if before != self._line(self._last):  # a file of another writer, with other line ends or quotes
                self._insert(cells)
                return
            file.seek(self._last_start)
            _write_all(file, self._line(merged), self._last_start, before=before)
        self._last = merged

    def _insert(self, cells: dict[str, Any]) -> None:
        """Give late metrics the row of their own step."""
        rows, step = self._read_rows(), float(cells["step"])
        same = [row for row in rows if float(row["step"]) == step]
        if same:
            same[0].update(_merge(same[0], cells))
        else:
            # its time is that of its neighbour, so that times rise with the steps
            later = next((row for row in rows if float(row["step"]) > step), None)
            rows.append({**cells, "wall_time": later["wall_time"]} if later is not None else cells)
            rows.sort(key=lambda row: float(row["step"]))
        self._rewrite(self._columns, rows)

    def _keep_rows_below(self, step: float) -> None:
        self._rewrite(self._columns, [row for row in self._read_rows() if float(row["step"]) < step])
        self._seconds_before = self._wall_time()

    def _rewrite(self, columns: list[str], rows: list[dict[str, Any]]) -> None:
        """Replace the file by one with these columns and rows; readers never see half of it."""
        header = dict(zip(columns, columns, strict=True))
        write_text(self.path, _lines(columns, [header, *rows]).decode())
        self._columns = columns
        self._remember(rows)


def read_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """The whole rows of a ``progress.csv``, which may be written to meanwhile; none where it cannot be read.

    Args:
        path: the file.

    Yields:
        The step of a row, and its other cells that are filled, by name.
    """
    with suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        for cells in csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])):
            with suppress(ValueError, TypeError, KeyError):  # a line that is no row
                step = round(float(cells.pop("step")))
                yield step, {name: float(cell) for name, cell in cells.items() if cell}


def _in_order(columns: Sequence[str]) -> list[str]:
    """Columns with the fixed ones and those of ``_FIRST`` at the start, and those of ``_LAST`` at the end."""

    def rank(name: str) -> int:
        if name.startswith(_LAST):
            return len(_FIRST) + 1
        return next((place for place, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))

    return [*_FIXED, *sorted((name for name in columns if name not in _FIXED), key=rank)]


def _lines(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _merge(row: Mapping[str, Any], late: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its empty cells filled; filled cells are kept."""
    return {**late, **{name: value for name, value in row.items() if value not in ("", None)}}


def _write_all(file: io.FileIO, data: bytes, start: int, *, before: bytes) -> None:
    """Write at the file's position, or leave the file with ``before`` from ``start`` on, where its end was."""
    try:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
    except OSError:
        with suppress(OSError):
            file.seek(start)
            file.write(before)
            file.truncate(start + len(before))
        raise


def _is_number(text: str | None) -> bool:
    try:
        float(text or "")
    except ValueError:
        return False
    return True
