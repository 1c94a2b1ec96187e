"""Loggers of a run: progress.csv, W&B and TensorBoard behind TorchRL's ``Logger``, with one row per interval."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrl_perf.metrics.log_row import log_row
from torchrl_perf.metrics.logger_group import LoggerGroup
from torchrl_perf.metrics.progress_csv import read_rows
from torchrl_perf.metrics.sinks import CSVSink, Sink, TensorboardSink
from torchrl_perf.metrics.wandb_settings import WandbSettings
from torchrl_perf.run_layout import CHECKPOINTS, PROGRESS
from torchrl_perf.runtime.machine import machine_card
from torchrl_perf.runtime.redact import redact

__all__ = ["LOGGER_NAMES", "LoggerGroup", "log_row", "make_loggers"]

logger = logging.getLogger("torchrl_perf")

LOGGER_NAMES = ("csv", "wandb", "tensorboard", "none")
"""Names that ``make_loggers`` understands."""


def make_loggers(
    name: str,
    run_dir: str | os.PathLike[str],
    project: str,
    run_name: str,
    config: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    wandb: WandbSettings | None = None,
) -> LoggerGroup:
    """Make the loggers of a run, and store its configuration and the machine card in them, without credentials.

    ``"csv"`` writes ``run_dir/progress.csv`` (see ``ProgressCSVLogger``), ``"wandb"`` a W&B run whose files lie in
    ``run_dir`` (see ``WandbSink``), ``"tensorboard"`` event files in ``run_dir/tensorboard``, ``"none"`` nothing. Each
    takes all metrics of an interval as one row. Loggers cannot disturb training: they are opened and written to in
    threads, and trouble is reported once, as a line on standard error. Call ``flush()`` before a checkpoint to have the
    rows so far on disk; ``close()`` finishes the run within a time limit.

    W&B runs offline when there is no key (neither ``WANDB_API_KEY`` nor a netrc entry); ``WANDB_MODE`` decides if set.

    A resumed run goes on in the same file, W&B run and TensorBoard folder, from the ``last_step`` of the checkpoint
    given to ``load_state_dict``, or else from its first row. Rows that the run wrote after its checkpoint, before it
    died, are replaced in ``progress.csv`` and TensorBoard; W&B cannot take rows back, and is not sent them again.

    Args:
        name: one of ``LOGGER_NAMES`` or several separated by commas, for example ``"csv,wandb"``.
        run_dir: folder of the run; made if missing.
        project: W&B project.
        run_name: name of the run.
        config: configuration to store with the run, JSON-like; None stores nothing.
        resume: whether the run continues the one in ``run_dir``.
        wandb: what the W&B run is called and where it belongs.

    Returns:
        The group of loggers.

    Raises:
        ValueError: for an unknown or repeated name, ``"none"`` beside another, and a folder of code that is missing.
        ImportError: if the package behind a name is not installed.
    """
    names = [part.strip() for part in name.split(",") if part.strip()]
    unknown = [part for part in names if part not in LOGGER_NAMES]
    if unknown or not names or len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise ValueError(
            f"make_loggers: expected {', '.join(LOGGER_NAMES)}, or several different ones of the first three "
            f"separated by commas, received {name!r}. Remedy: 'csv', or 'csv,tensorboard' for two."
        )
    _check_members(names, wandb)
    with suppress(OSError):  # the logger that cannot write there reports it
        Path(run_dir).mkdir(parents=True, exist_ok=True)
    if names == ["none"]:
        return LoggerGroup([], run_name, os.fspath(run_dir))
    stored = None if config is None else {**redact(dict(config)), "machine": redact(machine_card())}
    folder = os.fspath(run_dir)
    if (
        resume
        and "csv" in names
        and not (Path(run_dir) / PROGRESS).is_file()
        and (Path(run_dir) / CHECKPOINTS).is_dir()
    ):
        logger.warning("%s is missing: the rows before the resume are lost.", Path(run_dir) / PROGRESS)
    sinks = [_sink(part, folder, (project, run_name), stored, resume, wandb) for part in names]
    group = LoggerGroup(sinks, run_name, folder)
    if resume:
        group.last_step = max((step for step, _ in read_rows(Path(run_dir) / PROGRESS)), default=None)
    return group


def _check_members(names: list[str], wandb: WandbSettings | None) -> None:
    """Refuse loggers whose package is not installed, and a folder of code that is missing."""
    for part in names:
        if part in ("wandb", "tensorboard") and importlib.util.find_spec(part) is None:
            raise ImportError(
                f"make_loggers: expected the package {part} for the logger {part!r}, received an environment without "
                f"it. Remedy: `pip install {part}`, or choose the logger 'csv'."
            )
    if "wandb" in names and wandb is not None and wandb.code is not None and not Path(wandb.code).is_dir():
        raise ValueError(
            f"wandb_code: expected a folder whose Python files are stored, received {wandb.code!r}, which is none. "
            "Remedy: '.', the present folder, or leave it out."
        )


def _sink(
    name: str,
    run_dir: str,
    names: tuple[str, str],
    config: Mapping[str, Any] | None,
    resume: bool,
    wandb: WandbSettings | None,
) -> Sink:
    """Where the rows of one logger go; ``names`` are those of project and run."""
    if name == "csv":
        return CSVSink(run_dir, names[1], config)
    if name == "tensorboard":
        return TensorboardSink(run_dir, config, resume=resume)
    from torchrl_perf.metrics.wandb_sink import WandbSink

    return WandbSink(run_dir, *names, config, resume=resume, settings=wandb)
