"""A thread that makes one call at a time and is waited for with a limit."""

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

__all__ = ["CallThread", "end_with_process"]

END_SECONDS = 5.0
"""For which a process that ends waits for what a thread is doing."""


class CallThread:
    """Makes one call at a time in a thread; an error of the call is raised by :meth:`receive`.

    Attributes:
        is_busy: whether a call has been sent whose result has not been received.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._results: SimpleQueue[Any] = SimpleQueue()
        self.is_busy = False
        self._thread = threading.Thread(target=self._run, name="torchrl_perf-envs", daemon=True)
        self._thread.start()
        end_with_process(self, self._thread, partial(self._calls.put, None))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, arguments = call
            try:
                result = function(*arguments), None
            except BaseException as error:  # handed over, whatever it is: the other thread waits for an answer
                result = None, error
            self._results.put(result)
            del call, function, arguments, result  # a thread that waits keeps nothing alive

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Starts a call."""
        self.is_busy = True
        self._calls.put((function, arguments))

    def receive(self, timeout: float | None = None) -> Any:
        """Waits for the result of the call.

        Raises:
            TimeoutError: after ``timeout`` seconds; the call goes on, and ``is_busy`` stays true.
        """
        try:
            result, error = self._results.get(timeout=timeout)
        except Empty:
            raise TimeoutError(
                f"expected a result within {timeout:g} s, received none. Remedy: a longer timeout"
            ) from None
        self.is_busy = False
        if error is not None:
            raise error
        return result

    def frame(self) -> FrameType | None:
        """The frame that the thread is in."""
        return sys._current_frames().get(self._thread.ident or 0)

    def stop(self) -> None:
        """Ends the thread after the call that it may be in."""
        self._calls.put(None)


def end_with_process(
    owner: object, thread: threading.Thread, ask: Callable[[], object]
) -> "weakref.finalize[..., Any]":
    """Ends a thread that nobody has stopped: within an operation of torch it would abort a process that ends.

    Args:
        owner: what the thread works for, which lives as long as it does.
        thread: a daemon, already started.
        ask: asks the thread to end.

    Returns:
        What does so at the end of the process, unless it is detached.
    """
    return weakref.finalize(owner, _end, thread, ask)


def _end(thread: threading.Thread, ask: Callable[[], object]) -> None:
    if thread is not threading.current_thread():  # the thread itself drops the owner where it has ended in order
        ask()
        thread.join(END_SECONDS)
