"""Collection in a thread of its own, into a replay buffer."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Background:
    """Calls ``advance`` again and again in a thread until it returns False, or until it is stopped.

    Args:
        advance: one turn; returns whether there is another one.
    """

    def __init__(self, advance: Callable[[], bool]) -> None:
        self._advance = advance
        self._stopped = threading.Event()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin, or do nothing where it runs already."""
        if self.running:
            return
        self._stopped.clear()
        self._error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                with self._turn:
                    if not self._advance():
                        return
        except Exception as error:  # handed to whoever stops the thread: one that dies alone would tell nobody
            self._error = error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the context no turn is taken; one that has begun is ended first."""
        with self._turn:
            yield

    def stop(self, timeout: float | None = None) -> None:
        """End after the present turn; raises what the thread has failed with."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(
                "start(): expected the collecting thread to run, received its error, which is the cause of this one. "
                "Remedy: mend that, then start() again."
            ) from error
