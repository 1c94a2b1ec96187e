"""A thread that writes the rows of one logger, so that no logger can slow or stop the run."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torchrl.record.loggers import Logger

from torchrl_perf.metrics.histogram import Histogram
from torchrl_perf.metrics.sinks import Sink
from torchrl_perf.runtime.redact import redact

QUEUE_ROWS = 10_000
"""Rows that may wait for a logger; beyond them the oldest are dropped, counted and reported."""

_FIRST_RETRY, _LONGEST_RETRY = 0.5, 10.0  # seconds
_LOG = logging.getLogger("torchrl_perf")


class _Row(NamedTuple):
    """A row of numbers and histograms."""

    row: Mapping[str, Any]
    histograms: Mapping[str, Histogram]
    step: int


class _Call(NamedTuple):
    """A call of any other method."""

    method: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


class LoggerThread:
    """Owns one sink: opens it, writes what is put into a bounded queue, closes it; never raises into the caller.

    A sink that fails for good is abandoned, and later rows are dropped and counted. If its errors may pass
    (``Sink.retries``), rows wait, in order, and are tried again at growing intervals. Each kind of trouble is reported
    once, as a line on standard error through the logger "torchrl_perf", and kept in ``problems``.

    Args:
        sink: where rows go.
        capacity: rows that may wait.
        opened: called in the thread once the logger is open.
    """

    def __init__(self, sink: Sink, *, capacity: int = QUEUE_ROWS, opened: Callable[[], None] = lambda: None) -> None:
        self.sink = sink
        self._opened = opened
        self.capacity = capacity
        self.logger: Logger | None = None
        self.problems: list[str] = []
        self.dropped = 0
        self.failed = False
        self._queue: deque[_Row | _Call] = deque()
        self._changed = threading.Condition()
        self._busy = self._stuck = self._lagging = self._closing = False
        self._reported: set[str] = set()
        self._first_step: int | None = None
        self._thread = threading.Thread(target=self._run, name=f"log-{sink.name}", daemon=True)
        self._thread.start()

    def put_row(self, row: Mapping[str, Any], histograms: Mapping[str, Histogram], step: int) -> None:
        """Queue one row, which must not be changed any more; never waits for the sink."""
        self._put(_Row(row, histograms, step))

    def put_call(self, method: str, *arguments: Any, **options: Any) -> None:
        """Queue the call of another method."""
        self._put(_Call(method, arguments, options))

    def resume_after(self, step: int | None) -> None:
        """Tell the sink of a resumed run, before its first row, after which step it continues; None: the beginning."""
        with self._changed:
            self._first_step = 0 if step is None else step + 1
            if self.sink.retries:  # the one that can take rows back
                self._queue.append(_Call("load_state_dict", ({"local": {"last_step": step}},), {}))
            self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait until everything queued has been written and flushed, unless the sink is in trouble.

        Args:
            timeout: seconds. A sink that has once exceeded it is not waited for again until it has caught up.

        Returns:
            Whether nothing is left.
        """
        with self._changed:
            if not (self._stuck or self._lagging or self._waits_for_row):
                self._queue.append(_Call("flush", (), {}))
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._idle or self.failed or self._stuck, timeout)
            self._lagging = not self._idle
            return self._idle

    def start_closing(self) -> None:
        """Ask the thread to write the remaining rows and to end; does not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def finish_closing(self, timeout: float) -> None:
        """Wait until the thread has ended after ``start_closing``, then report lost rows.

        Args:
            timeout: seconds after which the sink is abandoned, with the rows that wait for it.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._changed:
                self.failed, lost = True, self._drop_queue() + self._busy
            self._report("close", f"was not finished within {timeout:.0f} s and was let go; {_rows(lost)} not written")
            self._reported.add("failed")  # the thread fails once its sink is taken away; that is no news
            self.sink.abandon(hanging=True)
            self._thread.join(1.0)
        elif self.dropped:
            self._report("dropped", f"misses {_rows(self.dropped)} of this run")

    @property
    def _waits_for_row(self) -> bool:
        """Whether the sink is not open because it has to know the step of the first row."""
        known = self.logger is not None or self._first_step is not None or not self.sink.opens_with_first_row
        return not known and not any(isinstance(entry, _Row) for entry in self._queue)

    @property
    def _idle(self) -> bool:
        return not self._queue and not self._busy

    def _put(self, entry: _Row | _Call) -> None:
        with self._changed:
            if self.failed or self._closing:
                self.dropped += isinstance(entry, _Row)
                return
            if len(self._queue) >= self.capacity:
                self.dropped += isinstance(self._queue.popleft(), _Row)
            self._queue.append(entry)
            self._changed.notify_all()

    # In the thread

    def _run(self) -> None:
        delay = _FIRST_RETRY
        while (entry := self._next()) is not None or self.logger is None:
            try:
                self._open_and_write(entry)
            except (ValueError, TypeError) as error:
                if self.logger is None:
                    return self._fail(entry, error)
                self._count_lost(entry)
                self._report("refused", f"refused what it was given: {_text(error)}")
            except Exception as error:
                if not (self.sink.retries and isinstance(error, OSError)):
                    return self._fail(entry, error)
                if not self._wait_to_retry(entry, error, delay):
                    return self._fail(None, error)
                delay = min(2 * delay, _LONGEST_RETRY)
                continue
            delay = _FIRST_RETRY
            self._done()
        return self._close_logger()

    def _next(self) -> _Row | _Call | None:
        """The oldest entry, taken out of the queue, or None: open the logger, or close it if it is open."""
        with self._changed:
            opens = self.logger is None
            self._changed.wait_for(lambda: self._closing or (not self._waits_for_row and (self._queue or opens)))
            self._busy = True
            if self._first_step is None:
                self._first_step = next((entry.step for entry in self._queue if isinstance(entry, _Row)), None)
            return self._queue.popleft() if self._queue else None

    def _open_and_write(self, entry: _Row | _Call | None) -> None:
        if self.logger is None:
            self.logger = self.sink.open(self._first_step)
            self._opened()
        if isinstance(entry, _Row):
            self.sink.write(self.logger, entry.row, entry.histograms, entry.step)
        elif entry is not None:
            self.sink.call(self.logger, entry.method, entry.arguments, entry.options)

    def _done(self) -> None:
        with self._changed:
            self._busy = self._stuck = False
            self._changed.notify_all()

    def _wait_to_retry(self, entry: _Row | _Call | None, error: Exception, delay: float) -> bool:
        """Put the entry back in front and wait; False if this was the last try, at closing."""
        self._report("retry", f"cannot be written: {_text(error)}. Up to {self.capacity} rows wait and are tried again")
        with self._changed:
            last_try = self._closing
            if entry is not None and len(self._queue) < self.capacity:
                self._queue.appendleft(entry)
            else:
                self.dropped += isinstance(entry, _Row)
            self._busy, self._stuck = False, True
            self._changed.notify_all()
            if not last_try:
                self._changed.wait_for(lambda: self._closing, delay)
        return not last_try

    def _fail(self, entry: _Row | _Call | None, error: Exception) -> None:
        self._count_lost(entry)
        with self._changed:
            self.failed = True
            self.dropped += self._drop_queue()
            self._busy = False
            self._changed.notify_all()
        self._report("failed", f"has failed and gets no more rows: {_text(error)}")
        with suppress(Exception):
            if not self.sink.abandon(hanging=False) and self.logger is not None:
                self.sink.close(self.logger)

    def _close_logger(self) -> None:
        self._done()
        try:
            if self.logger is not None:
                self.sink.close(self.logger)
        except Exception as error:
            self._report("close", f"could not be closed: {_text(error)}")
            with suppress(Exception):
                self.sink.abandon(hanging=False)

    # Reports

    def _count_lost(self, entry: _Row | _Call | None) -> None:
        with self._changed:
            self.dropped += isinstance(entry, _Row)

    def _drop_queue(self) -> int:
        rows = sum(isinstance(entry, _Row) for entry in self._queue)
        self._queue.clear()
        return rows

    def _report(self, kind: str, text: str) -> None:
        """One line for each kind of trouble, once."""
        if kind in self._reported:
            return
        self._reported.add(kind)
        message = redact(f"logging: {self.sink.name} {text}. Training goes on.")
        self.problems.append(message)
        _LOG.warning(message)


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(". ")
