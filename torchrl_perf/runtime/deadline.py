"""A limit for what may wait in a driver for ever: the process says what it waited for, and ends."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from torchrl_perf.streams import say

__all__ = ["Deadline"]


class Deadline:
    """Says one line and kills this process where a block takes longer than it may.

    The thread that watches the clock is started at construction,
    since none can be started while the interpreter ends.
    """

    def __init__(self) -> None:
        self._blocks: SimpleQueue[tuple[float, str, threading.Event]] = SimpleQueue()
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    @contextmanager
    def within(self, seconds: float, words: str) -> Iterator[None]:
        """A block that may take so long; one at a time.

        Args:
            seconds: longest time.
            words: what to say where it takes longer.
        """
        done = threading.Event()
        self._blocks.put((seconds, words, done))
        try:
            yield
        finally:
            done.set()

    def _watch(self) -> None:
        while True:
            seconds, words, done = self._blocks.get()
            if not done.wait(seconds):
                say(words)
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)  # the main thread waits where no exception reaches it
