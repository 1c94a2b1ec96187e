"""Collection in a separate thread, into a replay buffer."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchrl_perf.collectors.host_thread import end_with_process


class Background:
    """Calls ``advance`` again and again in a thread until it returns False, or until it is stopped.

    Args:
        advance: collects once; returns whether to go on.
    """

    def __init__(self, advance: Callable[[], bool]) -> None:
        self._advance = advance
        self._stopped = threading.Event()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._at_end: weakref.finalize[..., Any] | None = None
        self._error: BaseException | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin; does nothing if the thread already runs."""
        if self.running:
            return
        self._stopped.clear()
        self._error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if self._at_end is not None:
            self._at_end.detach()
        self._at_end = end_with_process(self, self._thread, self._stopped.set)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                with self._turn:
                    if not self._advance():
                        return
        except Exception as error:  # kept for stop(): an error that ends a thread is otherwise lost
            self._error = error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold the thread inside the context; a call of ``advance`` that has begun is finished first."""
        with self._turn:
            yield

    def stop(self, timeout: float | None = None) -> None:
        """End after the present call of ``advance``; raises the error that the thread failed with, if any."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(
                "start(): expected the collecting thread to run, received its error, which is the cause of this one. "
                "Remedy: mend that, then start() again."
            ) from error
