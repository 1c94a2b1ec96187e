"""Loggers of a run: progress.csv, W&B and TensorBoard behind TorchRL's ``Logger``, with one row per interval."""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
from torch import Tensor
from torchrl.record.loggers import Logger

from torchrl_perf.metrics.histogram import Histogram
from torchrl_perf.metrics.progress_csv import ProgressCSVLogger

LOGGER_NAMES = ("csv", "wandb", "tensorboard", "none")
"""Names that ``make_loggers`` understands."""


class LoggerGroup(Logger):
    """Passes every call to several TorchRL loggers; an empty group logs nothing.

    Args:
        loggers: the members, in the order in which they are called.
        exp_name: name of the run.
        log_dir: folder of the run.
    """

    def __init__(self, loggers: Sequence[Logger], exp_name: str = "", log_dir: str = "") -> None:
        self.loggers = tuple(loggers)
        super().__init__(exp_name=exp_name, log_dir=log_dir)

    def log_metrics(self, metrics: Any, step: int | None = None, *, keys_sep: str = "/") -> dict[str, Any]:
        """Log one row in each member; tensors are converted by each of them."""
        row = dict(metrics.items())  # what an empty group returns
        for logger in self.loggers:
            row = logger.log_metrics(metrics, step=step, keys_sep=keys_sep)
        return row

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Log one number in each member."""
        for logger in self.loggers:
            logger.log_scalar(name, value, step=step)

    def log_hparams(self, cfg: Mapping[str, Any]) -> None:
        """Store the configuration in each member."""
        for logger in self.loggers:
            logger.log_hparams(dict(cfg))

    def log_histogram(self, name: str, data: Sequence[float], **kwargs: Any) -> None:
        """Log a histogram in each member that can hold one."""
        for logger in self.loggers:
            if not isinstance(logger, ProgressCSVLogger):
                logger.log_histogram(name, data, **kwargs)

    def log_video(self, name: str, video: Tensor, step: int | None = None, **kwargs: Any) -> None:
        """Log a video in each member that can hold one."""
        for logger in self.loggers:
            if not isinstance(logger, ProgressCSVLogger):
                logger.log_video(name, video, step=step, **kwargs)

    def flush(self, timeout: float | None = None) -> None:
        """Flush each member."""
        for logger in self.loggers:
            logger.flush(timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """Close each member, every one of them even if another fails; the first failure is raised at the end."""
        failure: Exception | None = None
        for logger in self.loggers:
            try:
                logger.close(timeout)
            except Exception as error:
                failure = failure or error
        self._service_shutdown = True
        if failure is not None:
            raise failure

    def __repr__(self) -> str:
        return f"LoggerGroup({', '.join(map(repr, self.loggers))})"

    def _create_experiment(self) -> tuple[Any, ...]:
        return tuple(logger.experiment for logger in self.loggers)

    def _checkpoint_state(self) -> dict[str, Any]:
        return {"members": [logger.state_dict() for logger in self.loggers]}

    def _load_checkpoint_state(self, state_dict: Mapping[str, Any]) -> None:
        members = state_dict.get("members", [])
        if len(members) != len(self.loggers):
            raise ValueError(
                f"LoggerGroup.load_state_dict: expected the state of {len(self.loggers)} loggers, got {len(members)}. "
                "Make the group from the same names as in the saved run."
            )
        for logger, state in zip(self.loggers, members, strict=True):
            logger.load_state_dict(state)


def make_loggers(
    name: str,
    run_dir: str | os.PathLike[str],
    project: str,
    run_name: str,
    config: Mapping[str, Any] | None = None,
) -> Logger:
    """Make the logger or loggers of a run, and store its configuration in them.

    ``"csv"`` writes ``run_dir/progress.csv`` (see ``ProgressCSVLogger``), ``"wandb"`` a W&B run whose files lie in
    ``run_dir``, ``"tensorboard"`` event files in ``run_dir/tensorboard``, ``"none"`` nothing. Each takes all metrics
    of an interval in one ``log_metrics`` call; ``close()`` finishes the run.

    W&B runs offline when there is no key (neither ``WANDB_API_KEY`` nor a netrc entry); ``WANDB_MODE`` decides if set.

    Args:
        name: one of ``LOGGER_NAMES`` or several separated by commas, for example ``"csv,wandb"``.
        run_dir: folder of the run; made if missing.
        project: W&B project.
        run_name: name of the run.
        config: configuration to store with the run, JSON-like.

    Returns:
        A TorchRL logger; a ``LoggerGroup`` for several names or ``"none"``.

    Raises:
        ValueError: for an unknown or repeated name, or ``"none"`` beside another.
        ImportError: if the package behind a name is not installed.
    """
    names = [part.strip() for part in name.split(",") if part.strip()]
    unknown = [part for part in names if part not in LOGGER_NAMES]
    if unknown or not names or len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise ValueError(
            f"make_loggers: expected {', '.join(LOGGER_NAMES)}, or several different ones of the first three separated "
            f"by commas, got {name!r}."
        )
    for part in names:
        if part in ("wandb", "tensorboard") and importlib.util.find_spec(part) is None:
            raise ImportError(
                f"make_loggers: expected the package {part} for the logger {part!r}, which is not installed. "
                f"Install it with `pip install {part}`, or choose the logger 'csv'."
            )
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    loggers = [_make(part, run_dir, project, run_name) for part in names if part != "none"]
    if config is not None:
        for logger in loggers:
            _store_config(logger, dict(config))
    return loggers[0] if len(loggers) == 1 else LoggerGroup(loggers, run_name, os.fspath(run_dir))


def log_row(logger: Logger, row: Mapping[str, float], histograms: Mapping[str, Histogram], step: int) -> None:
    """Log the metrics of an interval, histograms included, as one row.

    Finished bins are handed over as bins where the logger can take them (W&B in the same row, TensorBoard as a raw
    histogram). Other loggers get the bin centres through ``log_histogram``, each repeated in proportion to its count;
    those that refuse histograms, such as CSV files, are left with the numbers.

    Args:
        logger: a TorchRL logger or a ``LoggerGroup``.
        row: names and numbers.
        histograms: names and histograms.
        step: environment steps so far.
    """
    if isinstance(logger, LoggerGroup):
        for member in logger.loggers:
            log_row(member, row, histograms, step)
        return
    kind = type(logger).__name__
    if kind == "WandbLogger" and histograms:
        import wandb

        bins = {
            name: wandb.Histogram(np_histogram=(np.asarray(h.counts), np.asarray(h.edges)))
            for name, h in histograms.items()
        }
        logger.log_metrics({**row, **bins}, step=step)
        return
    if row:
        logger.log_metrics(dict(row), step=step)
    if kind == "ProgressCSVLogger":
        return
    for name, histogram in histograms.items():
        if kind == "TensorboardLogger":
            logger.experiment.add_histogram_raw(name, **_tensorboard_bins(histogram), global_step=step)
        else:
            _log_centres(logger, name, histogram, step)


def _make(name: str, run_dir: Path, project: str, run_name: str) -> Logger:
    """Make one logger."""
    if name == "csv":
        return ProgressCSVLogger(run_name, run_dir)
    if name == "tensorboard":
        from torchrl.record.loggers.tensorboard import TensorboardLogger

        return TensorboardLogger(exp_name="tensorboard", log_dir=os.fspath(run_dir))
    from torchrl.record.loggers.wandb import WandbLogger

    # `mode` rather than TorchRL's `offline=True`, which would set WANDB_MODE for the whole process.
    mode = None if "WANDB_MODE" in os.environ or _has_wandb_key() else "offline"
    return WandbLogger(run_name, project=project, save_dir=os.fspath(run_dir), log_env_packages=False, mode=mode)


def _has_wandb_key() -> bool:
    """Whether W&B could log in without asking: a key in the environment, or a netrc entry for its host."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _store_config(logger: Logger, config: dict[str, Any]) -> None:
    """Store the configuration; TensorBoard gets it as text, since its own hparams open a second run."""
    if type(logger).__name__ == "TensorboardLogger":
        text = json.dumps(config, indent=2, sort_keys=True, default=str)
        logger.experiment.add_text("config", f"```json\n{text}\n```")
    else:
        logger.log_hparams(config)


def _centres(histogram: Histogram) -> list[float]:
    """Centre of each bin."""
    return [(low + high) / 2 for low, high in zip(histogram.edges[:-1], histogram.edges[1:], strict=True)]


def _tensorboard_bins(histogram: Histogram) -> dict[str, Any]:
    """Arguments of ``SummaryWriter.add_histogram_raw``; the moments are those of the bin centres."""
    pairs = list(zip(histogram.counts, _centres(histogram), strict=True))
    return {
        "min": histogram.edges[0],
        "max": histogram.edges[-1],
        "num": sum(histogram.counts),
        "sum": sum(count * centre for count, centre in pairs),
        "sum_squares": sum(count * centre * centre for count, centre in pairs),
        "bucket_limits": histogram.edges[1:],
        "bucket_counts": histogram.counts,
    }


def _log_centres(logger: Logger, name: str, histogram: Histogram, step: int) -> None:
    """Log a histogram through TorchRL's interface, which takes elements rather than bins."""
    most = max(sum(histogram.counts), 1.0)
    # A thousand elements show the shape; the true number may be millions.
    repeats = [round(count * min(1.0, 1000 / most)) for count in histogram.counts]
    data = [centre for centre, n in zip(_centres(histogram), repeats, strict=True) for _ in range(n)]
    try:
        logger.log_histogram(name, data, step=step, bins=len(histogram.counts))
    except NotImplementedError:
        return
