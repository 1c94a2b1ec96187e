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
    ``phase`` does nothing. Then only the phases around the replay and the total are reported. The first interval begins
    with its first phase.

    Args:
        device: device of the work.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._seconds: dict[str, float] = {}
        self._pending: deque[tuple[str, Stopwatch]] = deque()
        self._spare: list[Stopwatch] = []
        self._interval = Stopwatch("cpu").start()
        self._unused = True
        # For each interval under way: the number of its pending phases, its total, and the phases read early.
        self._started: deque[tuple[int, float, dict[str, float]]] = deque()

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
            raise ValueError(
                "PhaseTimer.phase: expected another name than 'total', which flush reports itself, received 'total'. "
                "Remedy: rename it."
            )
        if self._unused:  # time before the first phase, such as opening files, does not count
            self._interval.start()
            self._unused = False
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield
            return
        # Making a pair of events is slow compared to recording it, so they are reused.
        watch = self._spare.pop() if self._spare else Stopwatch(self.device)
        watch.start()
        yield
        watch.stop()
        self._pending.append((name, watch))
        if len(self._pending) > _MOST_PENDING:
            # Without a flush the list would grow for ever; the device has long passed its oldest entry.
            self._read_early()

    def start_flush(self) -> None:
        """End the interval and start a new one; nothing waits, and ``finish_flush`` reads the times later."""
        self._interval.stop()
        earlier = sum(count for count, _, _ in self._started)
        self._started.append((len(self._pending) - earlier, self._interval.host_seconds, self._seconds))
        self._interval.start()
        self._seconds = {}

    def finish_flush(self) -> dict[str, float] | None:
        """Report the oldest interval under way; on CUDA this waits for the end of its latest phase.

        Returns:
            Seconds by the host clock from its start to its ``start_flush`` under ``"total"``, then seconds per phase
            under its name, for the phases that ran; ``None`` when no interval is under way.
        """
        if not self._started:
            return None
        count, total, seconds = self._started.popleft()
        for _ in range(count):
            self._read_oldest(seconds)
        return {"total": total, **seconds}

    def flush(self) -> dict[str, float]:
        """Report the interval and start a new one.

        On CUDA this waits for the end of the latest phase, so that phases and total cover the same work. Intervals
        under way are dropped.

        Returns:
            Seconds since the last flush by the host clock under ``"total"``, then seconds per phase under its name, for
            the phases that ran.
        """
        while self._started:
            self.finish_flush()
        while self._pending:
            self._read_oldest(self._seconds)
        self.start_flush()
        return self.finish_flush() or {}

    def _read_early(self) -> None:
        """Read the oldest phase before its interval is asked for."""
        if not self._started or not self._started[0][0]:
            self._read_oldest(self._seconds)
            return
        count, total, seconds = self._started[0]
        self._read_oldest(seconds)
        self._started[0] = (count - 1, total, seconds)

    def _read_oldest(self, seconds: dict[str, float]) -> None:
        """Add the oldest phase to its sum and keep its stopwatch for later."""
        name, watch = self._pending.popleft()
        seconds[name] = seconds.get(name, 0.0) + watch.seconds
        self._spare.append(watch)
