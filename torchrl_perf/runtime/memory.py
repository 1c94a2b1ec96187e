"""Memory over a run: what is in use, when to give cached blocks back, and whether it grows."""

import ctypes
import functools
import gc
import math
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import torch

__all__ = ["LeakCheck", "LeakReport", "MemoryGuard", "MemoryReading", "MemoryRule", "heap_bytes", "rss_bytes"]

MIB = 2**20
MemoryRule = Literal["unused", "allocated", "never"]
SMALL_OBJECT_BYTES = 64  # mean size of the blocks of Python's own allocator, for objects up to 512 bytes
STATM = Path("/proc/self/statm")


# -- readings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryReading:
    """What the caching allocator of a device holds, in bytes."""

    allocated: int
    """In use by tensors."""
    reserved: int
    """Taken from the driver: in use, cached for later, or owned by CUDA graphs."""
    total: int
    """Memory of the device."""
    peak: int = 0
    """Most that was in use since the process began, or since the peak was last reset."""
    allocations: int = 0
    """Blocks handed out since the process began."""
    retries: int = 0
    """Times that the allocator gave its cache back because the driver had no memory left; each costs a wait."""


def read_cuda(device: torch.device) -> MemoryReading:
    """The reading of a CUDA device: host counters, no wait."""
    stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    if not stats:  # nothing was allocated yet
        return MemoryReading(0, 0, _total(device))
    used = stats["allocated_bytes"]["all"]
    return MemoryReading(
        allocated=used["current"],
        reserved=stats["reserved_bytes"]["all"]["current"],
        total=_total(device),
        peak=used["peak"],
        allocations=stats["allocation"]["all"]["allocated"],
        retries=stats["num_alloc_retries"],
    )


@functools.cache
def _total(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def rss_bytes() -> int | None:
    """Memory of the process that is in RAM, in bytes; None where the system does not say (no ``/proc``)."""
    try:
        return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def heap_bytes() -> int | None:
    """Bytes in use on the heap of the process: exact for the C library, estimated for small Python objects.

    Unlike :func:`rss_bytes` it does not depend on the allocators' reserves, so that a loop without a leak
    reads the same number after each iteration, and after ``gc.collect`` to a few kB: cycles that wait for the garbage
    collector count. Tensors on a CPU are counted, pages of files and of CUDA are not. None where the C library has no
    ``mallinfo2`` (glibc since 2.33 has).
    """
    mallinfo = _mallinfo2()
    if mallinfo is None:
        return None
    info = mallinfo()
    return info.uordblks + info.hblkhd + SMALL_OBJECT_BYTES * sys.getallocatedblocks()


class _MallInfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _mallinfo2() -> Callable[[], Any] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [], _MallInfo2
    return function


# -- guard --------------------------------------------------------------------------------------------------------


class MemoryGuard:
    """Gives cached memory back when a rule asks for it, runs Python's garbage collector now and then, and counts.

    Neither happens at each iteration. Giving cached blocks back (``torch.cuda.empty_cache``) waits for the device and
    slows the next allocations; it helps other processes and libraries with their own allocators, and defragments. It
    does not save a run from running out of memory: PyTorch's allocator does the same before it gives up. Memory that
    belongs to CUDA graphs is reserved too and stays.

    * ``"unused"``: more than ``threshold`` of the device is reserved, and more than ``unused_share`` of the device is
      reserved without being in use. The next cleanup needs that much *more* unused memory than the last one left, so
      that memory which cannot be freed, mainly the pools of graphs, does not trigger it again.
    * ``"allocated"``: more than ``threshold`` of the device is in use by tensors.
    * ``"never"``.

    Readings are taken every ``check_interval`` iterations, and at least ``cooldown`` iterations lie between two
    cleanups.

    The first garbage collection walks all objects, and then freezes those that remain (``gc.freeze``), since the
    modules and compiled code of a run live as long as it does; later collections visit only new objects, in
    microseconds. :meth:`close` unfreezes them.

    Args:
        device: device of the run. On a CPU there is no cache to give back.
        rule: when to clean up.
        threshold: share of the device's memory, between 0 and 1.
        gc_interval: iterations between two garbage collections; 0 leaves them to Python.
        read: reads the device; by default its allocator.
        empty: gives memory back; by default ``torch.cuda.empty_cache``.
        check_interval: iterations between two readings.

    Attributes:
        iterations: calls of :meth:`after_iteration`.
        cleanups: times that memory was given back.
        gc_runs: garbage collections.

    Raises:
        ValueError: for an unknown rule, a threshold outside of (0, 1), or intervals that are no counts.
    """

    unused_share = 0.2
    cooldown = 1_000

    def __init__(
        self,
        device: torch.device | str,
        *,
        rule: MemoryRule = "unused",
        threshold: float = 0.8,
        gc_interval: int = 5_000,
        read: Callable[[], MemoryReading] | None = None,
        empty: Callable[[], object] = torch.cuda.empty_cache,
        check_interval: int = 100,
    ) -> None:
        if rule not in get_args(MemoryRule):
            raise ValueError(f"rule: expected one of {get_args(MemoryRule)}, received {rule!r}. Remedy: one of these.")
        if not 0 < threshold < 1:
            raise ValueError(
                f"threshold: expected a share between 0 and 1, received {threshold}. Remedy: a number such as 0.8."
            )
        if gc_interval < 0 or check_interval < 1:
            raise ValueError(
                f"expected gc_interval >= 0 and check_interval >= 1, received {gc_interval} and {check_interval}. "
                "Remedy: gc_interval=0 to leave the collector to Python."
            )
        self.device = torch.device(device)
        self.rule, self.threshold = rule, threshold
        self.gc_interval, self.check_interval = gc_interval, check_interval
        if read is None and self.device.type == "cuda":
            read = functools.partial(read_cuda, self.device)
        self._read, self._empty = read, empty
        self._checks = read is not None and rule != "never"
        self._left_unused = 0
        self._next_cleanup = 0
        self._froze = False
        self.iterations = self.cleanups = self.gc_runs = 0

    def after_iteration(self) -> None:
        """Counts the iteration; now and then looks at the memory, and cleans up where the rule asks for it."""
        self.iterations += 1
        if self._checks and self.iterations % self.check_interval == 0 and self.iterations >= self._next_cleanup:
            self._check()
        if self.gc_interval and self.iterations % self.gc_interval == 0:
            self._collect_garbage()

    def _check(self) -> None:
        assert self._read is not None
        reading = self._read()
        if not self._is_due(reading):
            return
        self._empty()
        left = self._read()
        self._left_unused = left.reserved - left.allocated
        self._next_cleanup = self.iterations + self.cooldown
        self.cleanups += 1

    def _is_due(self, reading: MemoryReading) -> bool:
        if self.rule == "allocated":
            return reading.allocated > self.threshold * reading.total
        unused = reading.reserved - reading.allocated
        # if less is unused than a cleanup left, that memory may be free at a later cleanup
        self._left_unused = min(self._left_unused, unused)
        grown = unused - self._left_unused
        return reading.reserved > self.threshold * reading.total and grown > self.unused_share * reading.total

    def _collect_garbage(self) -> None:
        gc.collect()
        self.gc_runs += 1
        if not self._froze and not gc.get_freeze_count():  # else other code has frozen objects, and unfreezes them
            gc.freeze()
            self._froze = True

    def row(self) -> dict[str, float]:
        """Metrics of the memory as it is now; only those that the device has.

        Returns:
            On CUDA ``memory/allocated_mib``, ``memory/reserved_mib``, ``memory/peak_mib`` (most that was ever
            allocated), ``memory/allocations`` (blocks handed out so far: a captured loop needs none),
            ``memory/alloc_retries``. Everywhere ``memory/rss_mib`` and ``memory/heap_mib`` of the process where the
            system tells them, ``memory/cleanups`` and ``memory/gc_runs``.
        """
        row: dict[str, float] = {}
        if self._read is not None:
            reading = self._read()
            for name in ("allocated", "reserved", "peak"):
                row[f"memory/{name}_mib"] = getattr(reading, name) / MIB
            row |= {"memory/allocations": reading.allocations, "memory/alloc_retries": reading.retries}
        for name, count in (("rss", rss_bytes()), ("heap", heap_bytes())):
            if count is not None:
                row[f"memory/{name}_mib"] = count / MIB
        return row | {"memory/cleanups": self.cleanups, "memory/gc_runs": self.gc_runs}

    def close(self) -> None:
        """Unfreezes the objects that the first garbage collection froze."""
        if self._froze:
            gc.unfreeze()
            self._froze = False


# -- leaks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeakReport:
    """How memory changes with the iterations. All NaN where there were too few samples."""

    slope_mib_per_1000: float
    """MiB per 1,000 iterations."""
    low: float
    """Lower end of the 95% confidence interval of the slope."""
    high: float
    """Upper end."""
    leaks: bool
    """Whether the whole interval lies above the tolerance."""
    samples: int
    """Samples that were recorded, those of the warm-up included."""
    tolerance: float = 0.1
    """Slope in MiB per 1,000 iterations up to which memory counts as flat."""

    @property
    def flat(self) -> bool:
        """Whether the whole interval lies within the tolerance: evidence of no leak, not just no evidence of one."""
        return -self.tolerance <= self.low and self.high <= self.tolerance


class LeakCheck:
    """Tells a leak from noise: the slope of memory over iterations, with a confidence interval.

    The first quarter of the iterations, in which caches fill, is left out. The rest is cut into blocks, whose medians
    are used. The slope is that of Theil and Sen, the median of the slopes between all pairs of blocks, and its interval
    is Sen's (1968), from the variance of Kendall's statistic. Both use the order of the readings, so that a single step
    (a buffer that is made late) or an outlier is no leak. Consecutive readings are correlated, which would make the
    interval too narrow: blocks are usually longer than the correlation, and if their medians are still correlated the
    variance is enlarged as by Hamed and Rao (1998).

    Memory of the check itself is bounded: neighbours are merged when there are ``maximum`` samples.

    Which reading: ``torch.cuda.memory_allocated`` on CUDA, :func:`heap_bytes` on a CPU. :func:`rss_bytes` moves by
    whole arenas of the allocator and needs many more iterations.

    Args:
        warmup: share of the iterations that is left out at the beginning.
        tolerance: slope in MiB per 1,000 iterations up to which memory counts as flat.
        maximum: most samples that are kept, even.

    Raises:
        ValueError: for a warmup outside of [0, 1), or fewer than 32 samples.
    """

    blocks = 24

    def __init__(self, *, warmup: float = 0.25, tolerance: float = 0.1, maximum: int = 512) -> None:
        if not 0 <= warmup < 1 or maximum < 32 or maximum % 2:
            raise ValueError(
                f"expected warmup in [0, 1) and an even maximum of at least 32, received {warmup} and {maximum}. "
                "Remedy: warmup=0.2 and maximum=1024, for example."
            )
        self.warmup, self.tolerance, self.maximum = warmup, tolerance, maximum
        self.count = 0
        # allocated at once: a check that grows would detect itself
        self._iterations, self._mib = array("d", bytes(8 * maximum)), array("d", bytes(8 * maximum))
        self._filled = 0
        self._merged = 1  # samples in one point
        self._pending = 0  # samples in the point that is being filled

    def record(self, iteration: int, mib: float) -> None:
        """Adds a reading.

        Args:
            iteration: number of the iteration; rising.
            mib: memory in MiB.
        """
        at, self.count, self._pending = self._filled, self.count + 1, self._pending + 1
        share = 1 / self._pending
        self._iterations[at] += share * (iteration - self._iterations[at])
        self._mib[at] += share * (mib - self._mib[at])
        if self._pending < self._merged:
            return
        self._filled, self._pending = at + 1, 0
        if self._filled == self.maximum:
            self._merge()

    def _merge(self) -> None:
        half = self.maximum // 2
        for values in (self._iterations, self._mib):
            for at in range(half):
                values[at] = 0.5 * (values[2 * at] + values[2 * at + 1])
        self._filled, self._merged = half, 2 * self._merged

    def report(self) -> LeakReport:
        """The slope so far; at least 5 readings after the warm-up make one."""
        points = list(zip(self._iterations, self._mib, strict=True))[: self._filled]
        if points:
            first, last = points[0][0], points[-1][0]
            points = [point for point in points if point[0] >= first + self.warmup * (last - first)]
        if len(points) < 5:
            return LeakReport(math.nan, math.nan, math.nan, leaks=False, samples=self.count, tolerance=self.tolerance)
        slope, low, high = theil_sen(_block_medians(points, self.blocks))
        slope, low, high = 1000 * slope, 1000 * low, 1000 * high
        return LeakReport(slope, low, high, low > self.tolerance, self.count, self.tolerance)


def _block_medians(points: Sequence[tuple[float, float]], blocks: int) -> list[tuple[float, float]]:
    """Points in order, cut into at most ``blocks`` blocks: middle of the iterations and median of the readings."""
    count = min(blocks, len(points))
    cuts = [len(points) * k // count for k in range(count + 1)]
    parts = [points[start:stop] for start, stop in pairwise(cuts)]
    return [(math.fsum(x for x, _ in part) / len(part), median(y for _, y in part)) for part in parts]


def theil_sen(points: Sequence[tuple[float, float]], z: float = 1.96) -> tuple[float, float, float]:
    """Median of the slopes between all pairs, and Sen's confidence interval.

    Args:
        points: at least 3, with rising first numbers.
        z: quantile of the normal distribution; 1.96 for 95%.
    """
    n = len(points)
    slopes = sorted((y2 - y1) / (x2 - x1) for k, (x1, y1) in enumerate(points) for x2, y2 in points[k + 1 :])
    slope = median(slopes)
    variance = n * (n - 1) * (2 * n + 5) / 18 * _autocorrelation([y - slope * x for x, y in points])
    margin = z * math.sqrt(variance)
    low = max(0, math.floor((len(slopes) - margin) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + margin) / 2))
    return slope, slopes[low], slopes[high]


def _autocorrelation(values: Sequence[float]) -> float:
    """Factor on the variance of Kendall's statistic for autocorrelated values, at least 1."""
    n = len(values)
    # of equal values the mean rank
    ranks = [sum((other < value) + 0.5 * (other == value) for other in values) - n / 2 for value in values]
    total = math.fsum(rank * rank for rank in ranks)
    if total == 0:
        return 1.0
    factor = 1.0
    for lag in range(1, n // 3):
        rho = math.fsum(a * b for a, b in zip(ranks, ranks[lag:], strict=False)) / total
        if abs(rho) > 1.96 / math.sqrt(n):  # smaller ones are noise
            factor += 2 / (n * (n - 1) * (n - 2)) * (n - lag) * (n - lag - 1) * (n - lag - 2) * rho
    return max(1.0, factor)
