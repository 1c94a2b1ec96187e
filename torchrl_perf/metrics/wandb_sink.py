"""W&B: offline unless there is a key, continued after a resume, given up when it fails or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from torchrl.record.loggers import Logger

from torchrl_perf.metrics.histogram import Histogram
from torchrl_perf.metrics.progress_csv import read_rows
from torchrl_perf.metrics.sinks import FILMS, LoggerSink
from torchrl_perf.metrics.wandb_file import last_stored_step
from torchrl_perf.metrics.wandb_settings import WandbSettings
from torchrl_perf.run_layout import PROGRESS
from torchrl_perf.runtime.files import write_text
from torchrl_perf.runtime.redact import redact, redact_command
from torchrl_perf.runtime.timing import Stopwatch
from torchrl_perf.runtime.upstream.wandb_service import forget_import_hooks, forget_service
from torchrl_perf.runtime.wandb_key import has_wandb_key

STATE_FILE = "wandb.json"
"""File in the folder of a run with the identifier of its W&B run and the last step that was handed to it."""

_INIT_LIMIT = 20  # seconds that the server gets to answer
_CLOSE_LIMITS = {"online": 30.0, "offline": 10.0}  # seconds
_SECONDS_BETWEEN_STATES = 1.0


class WandbSink(LoggerSink):
    """A W&B run whose files lie in the folder of the run, with one history row per step; ``_step`` is the env step.

    It is offline when there is no key (neither ``WANDB_API_KEY`` nor a netrc entry) or the server cannot be reached at
    the start; the settings, or ``WANDB_MODE``, decide if set. ``WANDB_RUN_ID``, which the agent of a sweep sets, is the
    identifier of a new run. A resumed run keeps its identifier and gets the rows that it does not have
    yet: first those of ``progress.csv``, in case W&B died before the run did.

    Args:
        run_dir: folder of the run.
        project: W&B project.
        run_name: name of the run.
        config: stored with the run; None stores nothing.
        resume: continue the run that ``wandb.json`` names.
        settings: what the run is called and where it belongs.
    """

    retries = False
    is_local = False
    opens_with_first_row = True  # its step tells which rows of progress.csv are from before the resumed run

    def __init__(
        self,
        run_dir: str,
        project: str,
        run_name: str,
        config: Mapping[str, Any] | None,
        *,
        resume: bool = False,
        settings: WandbSettings | None = None,
    ) -> None:
        # Imported by the thread that trains, before it starts: an import takes seconds and holds the interpreter.
        import wandb  # noqa: F401

        self.name, self.retries = "W&B", False
        self.opens_with_first_row = resume
        self._settings = settings or WandbSettings()
        self._mode = wandb_mode() if self._settings.mode == "auto" else self._settings.mode
        self.close_limit = _CLOSE_LIMITS.get(self._mode, _CLOSE_LIMITS["online"])
        self._run_dir, self._project, self._config = run_dir, project, config
        self._run_name = self._settings.name or run_name
        self._resume = resume
        self._id = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._stored: int | None = None
        self._state_age = Stopwatch("cpu").start()

    def open(self, first_step: int | None) -> Logger:
        """Start or continue the run, store its configuration, and send it the rows that it misses."""
        if self._resume:
            self._read_state()
        self._write_state()
        try:
            logger = self._start(self._mode)
        except Exception as error:
            if self._mode != "online":
                raise
            sys.stderr.write(redact(f"logging: W&B cannot be reached ({error}); the run is stored offline.\n"))
            self._mode = "offline"
            logger = self._start("offline")
        start = int(getattr(logger.experiment, "starting_step", 0) or 0)
        if self._resume and start > 0:
            self._stored = max(start - 1, -1 if self._stored is None else self._stored)
        if self._config is not None:
            logger.log_hparams(dict(self._config))
        if self._settings.code is not None:
            logger.experiment.log_code(self._settings.code)
        if self._resume and first_step is not None:
            for step, row in read_rows(Path(self._run_dir) / PROGRESS):
                row.pop("wall_time", None)
                if step < first_step:
                    self.write(logger, row, {}, step)
        return logger

    def write(self, logger: Any, row: Mapping[str, Any], histograms: Mapping[str, Histogram], step: int) -> None:
        """Write one row, unless the run has it already.

        Raises:
            ValueError: for a step that is not above the last, which W&B would drop without a word.
        """
        if self._stored is not None and step <= self._stored:
            if self._resume:
                return
            raise ValueError(
                f"expected a step above {self._stored}, received {step}. Remedy: read the late metrics in progress.csv"
            )
        # Once a row is new, what comes below it is late.
        self._resume = False
        logger.experiment.log({**row, **_bins(histograms)}, step=step, commit=True)
        self._stored = step
        self._state_age.stop()
        if self._state_age.host_seconds > _SECONDS_BETWEEN_STATES:
            self._write_state()

    def call(self, logger: Logger, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Call another method of TorchRL's W&B logger; a histogram or video joins the row of its step, or the next."""
        if method in ("log_histogram", "log_video", "log_file"):
            step = options.get("step")
            late = step is not None and self._stored is not None and step <= self._stored
            step = None if late else step
            if method == "log_file":
                name, path = arguments
                cast("Any", logger).experiment.log({name: _media(path)}, step=step, commit=False)
                return
            options = {**options, "step": step, "override_global_step": True, "commit": False}
        super().call(logger, method, arguments, options)

    def close(self, logger: Logger) -> None:
        """Finish the run and note its last step."""
        try:
            logger.close()
        finally:
            self._write_state()

    def abandon(self, *, hanging: bool) -> bool:
        """Forget W&B's service if it is dead, and end it if it hangs, so that the process can exit.

        This reaches into W&B, whose own exit hook waits for the service without a limit.
        """
        with contextlib.suppress(Exception):
            return forget_service(kill=hanging)
        return False

    def _start(self, mode: str) -> Logger:
        import wandb
        from torchrl.record.loggers.wandb import WandbLogger

        settings = wandb.Settings(
            # Standard output may hold private text, and wrapping it slows every print of the process.
            console=cast("Any", os.environ.get("WANDB_CONSOLE", "off")),
            quiet=True,
            init_timeout=_INIT_LIMIT,
            finish_timeout=0.8 * self.close_limit,
            # W&B stores the raw command line, and a patch of uncommitted changes; the configuration holds a
            # machine card with commit and command, without credentials.
            x_disable_meta=redact_command(sys.argv) != sys.argv,
            disable_git=True,
        )
        try:
            return WandbLogger(
                self._run_name,
                project=self._project,
                save_dir=self._run_dir,
                id=self._id,
                log_env_packages=False,
                # ``mode`` rather than TorchRL's ``offline=True``, which would set WANDB_MODE for the whole process.
                mode=mode,
                # without a server W&B does not look for an earlier run, and warns if asked to
                resume="allow" if mode == "online" else None,
                reinit="create_new",
                **self._belongs_to,
                settings=settings,
            )
        finally:
            forget_import_hooks(self._id)

    @property
    def _belongs_to(self) -> dict[str, Any]:
        """What is set of entity, group, tags and notes; W&B looks at its environment variables for the others."""
        settings = self._settings
        named = {"entity": settings.entity, "group": settings.group, "notes": settings.notes}
        return {**{k: v for k, v in named.items() if v}, **({"tags": list(settings.tags)} if settings.tags else {})}

    def _read_state(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads((Path(self._run_dir) / STATE_FILE).read_text(encoding="utf-8"))
            self._id = str(state["id"])
            # The files show whether rows reached the disk; the note counts only if they hold no rows.
            stored = last_stored_step(self._run_dir, self._id)
            self._stored = stored if stored is not None else state.get("last_step")

    def _write_state(self) -> None:
        text = json.dumps({"id": self._id, "last_step": self._stored}) + "\n"
        with contextlib.suppress(OSError):  # progress.csv reports a full disk
            write_text(Path(self._run_dir) / STATE_FILE, text, lasting=False)
        self._state_age.start()


def wandb_mode() -> str:
    """``WANDB_MODE`` if set, else "online" if W&B could log in without asking, else "offline"."""
    return os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")


def _media(path: str) -> Any:
    """A picture, or a film for the suffixes of one."""
    import wandb

    suffix = Path(path).suffix.lower()
    return wandb.Video(path, format=cast("Any", suffix[1:])) if suffix in FILMS else wandb.Image(path)


def _bins(histograms: Mapping[str, Histogram]) -> dict[str, Any]:
    if not histograms:
        return {}
    import wandb

    return {
        name: wandb.Histogram(np_histogram=(np.asarray(h.counts), np.asarray(h.edges)))
        for name, h in histograms.items()
    }
