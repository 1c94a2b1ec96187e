"""Where rows go: one sink per kind of logger, opened and written to by the thread that owns it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.record.loggers import Logger

from torchrl_perf.metrics.histogram import Histogram
from torchrl_perf.metrics.log_row import bin_centres, log_row
from torchrl_perf.metrics.progress_csv import ProgressCSVLogger
from torchrl_perf.run_layout import CONFIG, PROGRESS
from torchrl_perf.runtime.upstream.loggers import without_tensors

FILMS = (".gif", ".mp4", ".webm")
"""Suffixes of files that hold a film; any other is a picture."""


class Sink(Protocol):
    """A place for rows. Only the thread that owns it calls it, except for :meth:`abandon`.

    Attributes:
        name: its name in messages.
        retries: whether an ``OSError``, such as a full disk, may pass, so that rows wait and are tried again.
        is_local: whether it writes files by itself, so that a flush is worth waiting for.
        opens_with_first_row: whether it needs to know the step of the first row, or can be opened before.
        close_limit: seconds that closing may take.
    """

    name: str
    retries: bool
    is_local: bool
    opens_with_first_row: bool
    close_limit: float

    def open(self, first_step: int | None) -> Logger:
        """Make the logger; ``first_step`` is the step of its first row, or where a resumed run goes on, if known."""
        ...

    def write(self, logger: Logger, row: Mapping[str, Any], histograms: Mapping[str, Histogram], step: int) -> None:
        """Write one row."""
        ...

    def call(self, logger: Logger, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Call another method of the logger."""
        ...

    def close(self, logger: Logger) -> None:
        """Finish what the logger has under way."""
        ...

    def abandon(self, *, hanging: bool) -> bool:
        """Give up a logger that has failed or hangs; called from any thread. Returns whether its helpers are gone."""
        ...


class LoggerSink:
    """Any TorchRL logger that exists already.

    Args:
        logger: the logger.
        name: how it is called in messages; by default its class.
    """

    retries = False
    is_local = True
    opens_with_first_row = False
    close_limit = 10.0

    def __init__(self, logger: Logger, name: str | None = None) -> None:
        self.name = name or type(logger).__name__
        self.logger = logger
        self.retries = isinstance(logger, ProgressCSVLogger)

    def open(self, first_step: int | None) -> Logger:
        """The logger itself."""
        return self.logger

    def write(self, logger: Logger, row: Mapping[str, Any], histograms: Mapping[str, Histogram], step: int) -> None:
        """Write one row."""
        log_row(logger, row, histograms, step)

    def call(self, logger: Logger, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Call another method of the logger; one that it refuses on purpose is left out.

        ``log_file`` is none of TorchRL's methods; sinks that show pictures have it in their own way.
        """
        if method == "log_file":
            return
        try:
            getattr(logger, method)(*arguments, **options)
        except NotImplementedError:
            return

    def close(self, logger: Logger) -> None:
        """Close the logger."""
        logger.close()

    def abandon(self, *, hanging: bool) -> bool:
        """Do nothing: the logger belongs to the caller."""
        return False


class CSVSink(LoggerSink):
    """``progress.csv`` in a folder, and ``hparams.json`` unless a trainer has written ``config.json`` there.

    Args:
        run_dir: folder of the run.
        run_name: name of the run.
        config: stored in ``hparams.json`` if there is no ``config.json``; None stores nothing.
    """

    def __init__(self, run_dir: str, run_name: str, config: Mapping[str, Any] | None) -> None:
        self.name, self.retries = PROGRESS, True
        self._run_dir, self._run_name, self._config = run_dir, run_name, config

    def open(self, first_step: int | None) -> Logger:
        """Open or continue the file."""
        logger = ProgressCSVLogger(self._run_name, self._run_dir)
        if self._config is not None and not os.path.exists(os.path.join(self._run_dir, CONFIG)):
            logger.log_hparams(self._config)
        return logger


class TensorboardSink(LoggerSink):
    """Event files in ``run_dir/tensorboard``: one event per row.

    Args:
        run_dir: folder of the run.
        config: stored as text, since TensorBoard's own hparams open a second run; None stores nothing.
        resume: whether events from the first row on, which a killed run has left, are to be hidden.
    """

    def __init__(self, run_dir: str, config: Mapping[str, Any] | None, *, resume: bool = False) -> None:
        # Imported by the thread that trains, before it starts: an import takes a second and holds the interpreter.
        import torch.utils.tensorboard  # noqa: F401

        self.name, self.retries = "TensorBoard", False
        self.opens_with_first_row = resume
        self._run_dir, self._config, self._resume = run_dir, config, resume

    def open(self, first_step: int | None) -> Logger:
        """Open a new event file that replaces events at and after ``first_step`` in earlier ones."""
        from torchrl_perf.metrics.tensorboard_logger import PurgingTensorboardLogger

        logger = PurgingTensorboardLogger(self._run_dir, purge_step=first_step if self._resume else None)
        if self._config is not None:
            _write_text(logger, self._config, first_step if self._resume else None)
        return logger

    def write(self, logger: Any, row: Mapping[str, Any], histograms: Mapping[str, Histogram], step: int) -> None:
        """Write one row as one event, histograms as raw ones."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        if row:
            # ``add_scalar`` would write a separate event for each metric.
            values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in row.items()]
            logger.experiment.file_writer.add_summary(Summary(value=values), step)
        for name, histogram in histograms.items():
            logger.experiment.add_histogram_raw(name, **_tensorboard_bins(histogram), global_step=step)

    def call(self, logger: Logger, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Call another method of the logger; a configuration becomes text, and the file of a picture an image."""
        if method == "log_hparams":
            _write_text(logger, arguments[0], None)
        elif method == "log_file":
            _write_picture(logger, *arguments, options.get("step"))
        else:
            super().call(logger, method, arguments, options)


def _write_text(logger: Any, config: Mapping[str, Any], step: int | None) -> None:
    text = json.dumps(config, indent=2, sort_keys=True, default=str)
    logger.experiment.add_text("config", f"```json\n{text}\n```", step)


def _write_picture(logger: Any, name: str, path: str, step: int | None) -> None:
    """A PNG, JPEG or GIF as it is in the file; TensorBoard shows no other films."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    if not path.lower().endswith((".png", ".jpg", ".jpeg", ".gif")):
        return
    with open(path, "rb") as file:
        image = Summary.Image(encoded_image_string=file.read())
    logger.experiment.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)


def plain_numbers(metrics: Any, keys_sep: str = "/") -> dict[str, Any]:
    """A row as host values, read at the time of the call.

    Args:
        metrics: mapping of names to numbers or tensors, or a TensorDict.
        keys_sep: separator of nested TensorDict keys.

    Returns:
        Names and values without tensors.
    """
    if isinstance(metrics, TensorDictBase):
        return without_tensors(metrics, keys_sep=keys_sep)
    row = dict(metrics)
    if any(isinstance(value, Tensor) for value in row.values()):
        safe = without_tensors(row)  # one wait for all of them; it changes the order
        row = {name: safe[name] for name in row}
    return row


def _tensorboard_bins(histogram: Histogram) -> dict[str, Any]:
    """Arguments of ``SummaryWriter.add_histogram_raw``; the moments are those of the bin centres."""
    pairs: Sequence[tuple[float, float]] = list(zip(histogram.counts, bin_centres(histogram), strict=True))
    return {
        "min": histogram.edges[0],
        "max": histogram.edges[-1],
        "num": sum(histogram.counts),
        "sum": sum(count * centre for count, centre in pairs),
        "sum_squares": sum(count * centre * centre for count, centre in pairs),
        "bucket_limits": histogram.edges[1:],
        "bucket_counts": histogram.counts,
    }
