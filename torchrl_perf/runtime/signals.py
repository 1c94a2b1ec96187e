"""Interrupts that let the current iteration finish."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a flag for the length of a ``with`` block; a second of a kind interrupts at once.

    Outside the main thread, where Python delivers no signals, it does nothing.

    Attributes:
        signum: number of the signal that came, or None.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}

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
            self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        signal.signal(signum, self._previous.get(signum) or signal.SIG_DFL)
