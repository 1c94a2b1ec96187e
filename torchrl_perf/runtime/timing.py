"""Clocks and waits: the only place of the package that measures time or waits for a device."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

__all__ = ["Stopwatch", "Timing", "synchronize", "time_cuda"]


def synchronize(device: torch.device | str | None = None) -> None:
    """Wait until the device has done all its work; does nothing on a CPU.

    Args:
        device: None is CUDA where it is available, else the CPU.
    """
    if _is_cuda(device):
        torch.cuda.synchronize(device)


def _is_cuda(device: torch.device | str | None) -> bool:
    return torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"


class Stopwatch:
    """Measure the time of a stretch of work: CUDA events on the current stream, or the wall clock on a CPU.

    Starting and stopping do not wait for the device; reading ``seconds`` on CUDA waits for the end of the stretch.

    Example:
        >>> with Stopwatch("cpu") as watch:
        ...     total = sum(range(1000))
        >>> watch.seconds >= 0.0
        True

    Args:
        device: None is CUDA where it is available, else the CPU.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._cuda = _is_cuda(device)
        self._events: tuple[Any, Any] | None = None
        self._started = self._stopped = 0.0
        if self._cuda:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def start(self) -> Self:
        """Start the clock, again if it has run before."""
        if self._events is not None:
            self._events[0].record()
        self._started = time.perf_counter()
        return self

    def stop(self) -> None:
        """Stop the clock."""
        if self._events is not None:
            self._events[1].record()
        self._stopped = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds between ``start`` and ``stop`` on the device. Waits for the device on CUDA."""
        if self._events is not None:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) * 1e-3
        return self._stopped - self._started

    @property
    def host_seconds(self) -> float:
        """Seconds between ``start`` and ``stop`` on the host, launches only on CUDA; never waits."""
        return self._stopped - self._started

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()


@dataclass(frozen=True)
class Timing:
    """Times of one call over many repeats, in microseconds.

    Attributes:
        median: middle of the repeats.
        p10: 10th percentile.
        p90: 90th percentile.
        repeats: number of timed calls.
    """

    median: float
    p10: float
    p90: float
    repeats: int


def time_cuda(
    fn: Callable[[], Any], repeats: int = 100, *, warmup: int = 10, device: torch.device | str | None = None
) -> Timing:
    """Time a function call by call: CUDA events, or the wall clock on a CPU.

    The calls are queued without a wait between them, so that for a call shorter than its launch the launch is measured.
    A function whose memory fits into the cache is timed in the cache: rotate its buffers from call to call.

    Args:
        fn: function without arguments.
        repeats: number of timed calls.
        warmup: number of calls before them.
        device: None is CUDA where it is available, else the CPU.

    Returns:
        Median and percentiles in microseconds.

    Raises:
        ValueError: if ``repeats`` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"expected repeats >= 1, received {repeats}. Remedy: repeats=1 or more")
    for _ in range(warmup):
        fn()
    synchronize(device)
    watches = [Stopwatch(device) for _ in range(repeats)]
    for watch in watches:
        watch.start()
        fn()
        watch.stop()
    synchronize(device)
    times = torch.tensor([watch.seconds for watch in watches], dtype=torch.float64) * 1e6
    low, middle, high = torch.quantile(times, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return Timing(median=middle, p10=low, p90=high, repeats=repeats)
