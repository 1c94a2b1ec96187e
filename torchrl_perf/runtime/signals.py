"""Interrupts that let the current iteration finish."""

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

GRACE_SECONDS = 0.5


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a flag for the length of a ``with`` block; a second one interrupts at once.

    A scheduler often signals the process and its group, or a launcher forwards the signal: signals within half a second
    of the first count as the same request. Outside the main thread, where Python delivers no signals, it does nothing.

    Attributes:
        signum: number of the first signal that came, or None.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}
        self._came = 0.0

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        """The shell's code for a program that a signal ended, 128 + its number, or 0."""
        return 0 if self.signum is None else 128 + self.signum

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # one that is ignored, as by nohup, stays ignored
            numbers = [number for number in self.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self._previous = {}

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # None: a handler that C code has set, which cannot be set again
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._came = signum, now
        elif now - self._came >= GRACE_SECONDS:
            self._restore()
            signal.raise_signal(signum)
