"""How the time of a run splits into phases."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchrl_perf.runtime.timing import Stopwatch

_MOST_PENDING = 1024


class PhaseTimer:
    """Measures the seconds spent in named phases (collect, advantage, update, log) without a host wait in a phase.

    On CUDA a phase is bracketed by two events on the current stream, which are read at ``flush``; on a CPU the host
    clock is read.

    The inside of a captured graph cannot be timed: no Python runs in a replay, and while the graph is being recorded
    ``phase`` does nothing. Then only the phases around the replay and the total are reported.

    Args:
        device: device of the work.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._seconds: dict[str, float] = {}
        self._pending: deque[tuple[str, Stopwatch]] = deque()
        self._spare: list[Stopwatch] = []
        self._interval = Stopwatch("cpu").start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body of a ``with`` statement; times of one name add up, and phases may be nested.

        A body that raises is not counted.

        Args:
            name: name of the phase.

        Raises:
            ValueError: for the name ``"total"``, which ``flush`` uses.
        """
        if name == "total":
            raise ValueError("PhaseTimer.phase: expected a name other than 'total', which flush reports. Rename it.")
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield
            return
        # Making a pair of events is slow beside recording it, so they are used again.
        watch = self._spare.pop() if self._spare else Stopwatch(self.device)
        watch.start()
        yield
        watch.stop()
        self._pending.append((name, watch))
        if len(self._pending) > _MOST_PENDING:
            # Without a flush the list would grow for ever; the device has long passed its oldest entry.
            self._read_oldest()

    def flush(self) -> dict[str, float]:
        """Report the interval and start a new one.

        On CUDA this waits for the end of the latest phase, so that phases and total cover the same work.

        Returns:
            Seconds since the last flush by the host clock under ``"total"``, then seconds per phase under its name, for
            the phases that ran.
        """
        while self._pending:
            self._read_oldest()
        self._interval.stop()
        row = {"total": self._interval.host_seconds, **self._seconds}
        self._interval.start()
        self._seconds = {}
        return row

    def _read_oldest(self) -> None:
        """Add the oldest phase to its sum and keep its stopwatch for later."""
        name, watch = self._pending.popleft()
        self._seconds[name] = self._seconds.get(name, 0.0) + watch.seconds
        self._spare.append(watch)
