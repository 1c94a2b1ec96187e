"""One tidy CSV file per run: a row per flush, a column per metric."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.record.loggers import Logger

from torchrl_perf.runtime.timing import Stopwatch

FILE_NAME = "progress.csv"
_FIXED = ["step", "wall_time"]


class ProgressCSVLogger(Logger):
    """A TorchRL logger that writes ``progress.csv``, with one row per ``log_metrics`` call.

    TorchRL's ``CSVLogger`` writes one file per scalar and keeps every value in memory; here a row is on disk as soon
    as it is logged and nothing is kept. Columns are ``step``, ``wall_time`` (seconds of logging so far, continued after
    a resume) and the metrics in the order of their first row. A metric that first comes later gets a new last column:
    the file is rewritten once, with empty cells in the earlier rows. An existing file is continued.

    Args:
        exp_name: name of the run, kept for TorchRL's interface.
        log_dir: folder of the run; ``progress.csv`` and ``hparams.json`` lie directly in it.
    """

    def __init__(self, exp_name: str, log_dir: str | os.PathLike[str]) -> None:
        self.path = Path(log_dir) / FILE_NAME
        self._columns: list[str] = []
        super().__init__(exp_name=exp_name, log_dir=os.fspath(log_dir))
        rows = self._read_rows()
        self._seconds_before = float(rows[-1]["wall_time"]) if rows else 0.0
        self._clock = Stopwatch("cpu").start()

    def log_metrics(self, metrics: Any, step: int | None = None, *, keys_sep: str = "/") -> dict[str, Any]:
        """Write one row.

        Args:
            metrics: mapping of names to numbers or one-element tensors, or a TensorDict.
            step: environment steps so far; required.
            keys_sep: separator of nested TensorDict keys.

        Returns:
            The names and numbers that were written.

        Raises:
            ValueError: if ``step`` is missing, or a metric has the name of a fixed column.
        """
        if isinstance(metrics, TensorDictBase):
            metrics = dict(metrics.flatten_keys(keys_sep).items())
        row = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        if step is None or any(name in row for name in _FIXED):
            raise ValueError(
                f"ProgressCSVLogger.log_metrics: expected a step and metrics not named {_FIXED}, got step={step} and "
                f"{sorted(row)}. Pass step= and rename the metric."
            )
        if new := [name for name in row if name not in self._columns]:
            self._rewrite([*(self._columns or _FIXED), *new], self._read_rows())
        self._clock.stop()
        seconds = self._seconds_before + self._clock.host_seconds
        cells = {"step": step, "wall_time": f"{seconds:.3f}", **row}
        # Opened for each row: a row per interval is rare, and then no exit, clean or not, can lose one.
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(cells)
        return row

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Write a row with one metric; prefer ``log_metrics``, which writes many in one row."""
        self.log_metrics({name: value}, step=step)

    def log_hparams(self, cfg: Mapping[str, Any]) -> None:
        """Write the configuration to ``hparams.json``; values that JSON lacks are written as their text."""
        text = json.dumps(dict(cfg), indent=2, sort_keys=True, default=str)
        self.path.with_name("hparams.json").write_text(text + "\n", encoding="utf-8")

    def log_histogram(self, name: str, data: Sequence[float], **kwargs: Any) -> NoReturn:
        """Refuse: a histogram has no cell in a CSV file.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"progress.csv has no place for the histogram {name!r}: use W&B or TensorBoard.")

    def log_video(self, name: str, video: Tensor, step: int | None = None, **kwargs: Any) -> NoReturn:
        """Refuse: a video has no cell in a CSV file.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"progress.csv has no place for the video {name!r}: use W&B or TensorBoard.")

    def __repr__(self) -> str:
        return f"ProgressCSVLogger(path={os.fspath(self.path)!r})"

    def _create_experiment(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), [])
        return self.path

    def _checkpoint_state(self) -> dict[str, Any]:
        rows = self._read_rows()
        return {"last_step": float(rows[-1]["step"]) if rows else None}

    def _load_checkpoint_state(self, state_dict: Mapping[str, Any]) -> None:
        # A run that went on after its checkpoint and then died has left rows that the resumed run writes again.
        if not self._columns or "last_step" not in state_dict:
            return
        last = state_dict["last_step"]
        rows = [row for row in self._read_rows() if last is not None and float(row["step"]) <= last]
        self._rewrite(self._columns, rows)

    def _read_rows(self) -> list[dict[str, str]]:
        """All rows so far, from the disk."""
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _rewrite(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """Replace the file by one with these columns and rows; readers never see half of it."""
        draft = self.path.with_suffix(".csv.tmp")
        with draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        draft.replace(self.path)
        self._columns = columns
