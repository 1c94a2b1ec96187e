"""Several loggers behind TorchRL's ``Logger``, none of which can slow, stop or hang the run."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torchrl.record.loggers import Logger

from torchrl_perf.metrics.histogram import Histogram
from torchrl_perf.metrics.logger_thread import QUEUE_ROWS, LoggerThread
from torchrl_perf.metrics.sinks import LoggerSink, Sink, plain_numbers
from torchrl_perf.runtime.redact import redact
from torchrl_perf.runtime.timing import Stopwatch

_FLUSH_LIMIT = 2.0  # seconds


class LoggerGroup(Logger):
    """Passes every call to several loggers, each in its own thread behind a bounded queue.

    A call converts tensors to numbers and returns: nothing is opened, formatted or written in the calling thread. A
    member that raises, hangs or is slow affects neither the caller nor the other members. Trouble is reported once per
    member, see :class:`LoggerThread`.

    Steps of rows should rise; metrics that come late are kept under their own step by members that can
    (``progress.csv``, TensorBoard), and reported by the one that cannot (W&B).

    The group is closed at the exit of the process at the latest. An empty group logs nothing.

    Args:
        loggers: TorchRL loggers or sinks, the members.
        exp_name: name of the run.
        log_dir: folder of the run.
        capacity: rows that may wait for a member.

    Attributes:
        last_step: step of the latest row, or of the last stored one of a resumed run; None before any.
    """

    def __init__(
        self,
        loggers: Sequence[Logger | Sink],
        exp_name: str = "",
        log_dir: str = "",
        *,
        capacity: int = QUEUE_ROWS,
    ) -> None:
        self.loggers = tuple(loggers)
        self.last_step: int | None = None
        self._service_shutdown = False  # threads read it before TorchRL's constructor sets it
        sinks = [LoggerSink(member) if isinstance(member, Logger) else member for member in loggers]
        self._threads = tuple(LoggerThread(sink, capacity=capacity, opened=self._close_at_exit) for sink in sinks)
        super().__init__(exp_name=exp_name, log_dir=log_dir)
        self._close_at_exit()

    @property
    def problems(self) -> tuple[str, ...]:
        """Trouble reported so far, one line for each kind and member."""
        return tuple(line for thread in self._threads for line in thread.problems)

    def log_row(self, row: Mapping[str, Any], histograms: Mapping[str, Histogram], step: int) -> None:
        """Log the numbers and histograms of an interval; returns at once.

        Args:
            row: names and numbers; copied.
            histograms: names and histograms.
            step: environment steps so far.
        """
        self._put(plain_numbers(row), dict(histograms), step)

    def log_metrics(self, metrics: Any, step: int | None = None, *, keys_sep: str = "/") -> dict[str, Any]:
        """Log one row, with the present values of tensors.

        Args:
            metrics: mapping of names to numbers or tensors, or a TensorDict.
            step: environment steps so far; by default one more than the last.
            keys_sep: separator of nested TensorDict keys.

        Returns:
            Names and values without tensors.
        """
        row = plain_numbers(metrics, keys_sep)
        self._put(row, {}, self._next_step(step))
        return dict(row)

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Log one number as a row; prefer ``log_metrics``, which takes many."""
        self.log_metrics({name: value}, step=step)

    def log_hparams(self, cfg: Mapping[str, Any]) -> None:
        """Store the configuration in each member, without credentials."""
        self._call("log_hparams", redact(dict(cfg)))

    def log_histogram(self, name: str, data: Sequence[float], **kwargs: Any) -> None:
        """Log a histogram in each member that can hold one."""
        self._call("log_histogram", name, _copied(data), **kwargs)

    def log_video(self, name: str, video: Tensor, step: int | None = None, **kwargs: Any) -> None:
        """Log a video in each member that can hold one."""
        self._call("log_video", name, _copied(video), step=step, **kwargs)

    def log_file(self, name: str, path: str | os.PathLike[str], step: int | None = None) -> None:
        """Show the file of a picture or a film: in W&B, and as far as it can in TensorBoard.

        The file is read by the threads of the members: leave it where it is until the group is closed.

        Args:
            name: what it is called there.
            path: a picture (PNG, JPEG), or a film (GIF, MP4, WebM).
            step: environment steps so far.
        """
        self._call("log_file", name, os.fspath(path), step=step)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the rows so far are in the files of members that write files; W&B's service is not waited for.

        Args:
            timeout: seconds, 2 by default, for all members together; one that exceeds it, or cannot write, is not
                waited for.
        """
        local = [thread for thread in self._threads if thread.sink.is_local]
        _drain(local, _FLUSH_LIMIT if timeout is None else timeout)

    def drain(self, timeout: float) -> bool:
        """Wait until every member, W&B included, is open and has written the rows so far.

        Args:
            timeout: seconds for all members together.

        Returns:
            Whether no row is waiting.
        """
        return _drain(self._threads, timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """Write the waiting rows and close each member, within its time limit; never raises; further calls do nothing.

        Args:
            timeout: seconds for all members together; by default 10, or 30 while W&B has a server to send to.
        """
        if self._service_shutdown:
            return
        self._service_shutdown = True
        atexit.unregister(self.close)
        for thread in self._threads:
            thread.start_closing()
        watch = Stopwatch("cpu").start()
        for thread in self._threads:
            watch.stop()
            limit = thread.sink.close_limit if timeout is None else timeout
            thread.finish_closing(max(limit - watch.host_seconds, 0.0))

    def __repr__(self) -> str:
        return f"LoggerGroup({', '.join(thread.sink.name for thread in self._threads)})"

    def _create_experiment(self) -> tuple[Any, ...]:
        return self._threads

    def _checkpoint_state(self) -> dict[str, Any]:
        return {"last_step": self.last_step}

    def _load_checkpoint_state(self, state_dict: Mapping[str, Any]) -> None:
        if "last_step" not in state_dict:
            return
        self.last_step = state_dict["last_step"]
        for thread in self._threads:
            thread.resume_after(self.last_step)

    def _close_at_exit(self) -> None:
        # Registered again after a member has opened: exit hooks run in reverse order, and W&B's stops its service.
        atexit.unregister(self.close)
        if not self._service_shutdown:
            atexit.register(self.close)

    def _next_step(self, step: int | None) -> int:
        if step is not None:
            return step
        return 0 if self.last_step is None else self.last_step + 1

    def _put(self, row: dict[str, Any], histograms: dict[str, Histogram], step: int) -> None:
        # A resumed run may go back to its checkpoint: the last step is that of the latest row, not the greatest.
        self.last_step = step
        for thread in self._threads:
            thread.put_row(row, histograms, step)

    def _call(self, method: str, *arguments: Any, **options: Any) -> None:
        for thread in self._threads:
            thread.put_call(method, *arguments, **options)


def _drain(threads: Sequence[LoggerThread], limit: float) -> bool:
    watch, done = Stopwatch("cpu").start(), True
    for thread in threads:
        watch.stop()
        done = thread.drain(max(limit - watch.host_seconds, 0.0)) and done
    return done


def _copied(data: Any) -> Any:
    """Copies of values that the caller may overwrite."""
    if isinstance(data, Tensor):
        return data.detach().to("cpu", copy=True)
    return data.copy() if hasattr(data, "copy") else data
