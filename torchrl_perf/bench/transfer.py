"""Copies between host and device, pageable, page-locked or none; tensors from arrays; metrics, single or packed.

Each part measures a claim that is often made and ends in a verdict. Times are those of the wall clock from the call to
the end of the work on the device; ``host_us`` is the host's time for the call itself.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_perf.bench.report import format_table, write_results
from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.runtime import Download, Upload, synchronize

COLUMNS = ("part", "MiB", "variant", "us", "p10_us", "p90_us", "host_us", "GB_s", "overlap")
VERDICT_COLUMNS = ("claim", "measured", "verdict")
PAGEABLE, LATER, ON_THE_FLY = "pageable", "pageable, non_blocking", "page-locked on the fly, non_blocking, side stream"
LOCKED, BESIDE = "page-locked", "page-locked, non_blocking, side stream"
IN_PLACE = "Upload, block filled in place"
COPIES = {
    "to device": (PAGEABLE, LATER, ON_THE_FLY, LOCKED, BESIDE, "Upload", IN_PLACE, "Upload, side stream", "resident"),
    "to host": (PAGEABLE, LATER, LOCKED, BESIDE, "Download", "Download, side stream", "resident"),
}
MOSTLY = 0.5  # of the shorter of copy and work: the least that counts as running side by side
NUM_METRICS, NUM_ARRAYS, ARRAY_SIZE = 20, 256, 256


@dataclass(frozen=True)
class BenchTransfer:
    """Options of ``torchrl-perf bench transfer``."""

    sizes: tuple[float, ...] = (0.0625, 1, 16, 64)
    """MiB of the copies; the largest decides the verdicts."""
    repeats: int = 50
    """Timed calls."""
    quick: bool = False
    """Sizes 1 and 16 and 10 repeats, written only where --out says so."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for transfer.json; the package's bench/results by default."""


@dataclass
class Bench:
    """One session: the device, and the rows measured so far."""

    device: torch.device
    sizes: tuple[float, ...]
    repeats: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: str, variant: str, fn: Callable[[], Any], **more: Any) -> dict[str, Any]:
        """Time a call to the end of its work on the device, and note the row."""
        row = {"part": part, "variant": variant, **wall(fn, self.repeats, self.device, more.pop("after", None)), **more}
        self.rows.append(row)
        return row

    def median(self, part: str, variant: str, column: str = "us") -> float:
        """A column of the last, which is the largest, row of a variant."""
        return [row[column] for row in self.rows if (row["part"], row["variant"]) == (part, variant)][-1]


def wall(
    fn: Callable[[], Any], repeats: int, device: torch.device, after: Callable[[], Any] | None = None
) -> dict[str, float]:
    """Median and percentiles of a call in microseconds, and the median of the host's share; ``after`` is not timed."""
    totals, hosts = [], []
    for index in range(repeats + 3):
        synchronize(device)
        begin = time.perf_counter()
        fn()
        returned = time.perf_counter()
        synchronize(device)
        end = time.perf_counter()
        if after is not None:
            after()
        if index >= 3:
            totals.append((end - begin) * 1e6)
            hosts.append((returned - begin) * 1e6)
    low, middle, high = np.quantile(totals, (0.1, 0.5, 0.9)).tolist()
    return {"us": middle, "p10_us": low, "p90_us": high, "host_us": statistics.median(hosts)}


# -- copies -----------------------------------------------------------------------------------------------------------


def copies(bench: Bench) -> None:
    """Each way of copying, by size and direction, alone and behind work on the current stream."""
    if bench.device.type != "cuda":
        for part, variants in COPIES.items():
            bench.rows += [{"part": part, "variant": variant, "note": "n/a: no CUDA"} for variant in variants]
        return
    for size in bench.sizes:
        for part, calls in copy_calls(int(size * 2**18), bench.device).items():
            for variant in COPIES[part]:
                fn, after = calls[variant]
                row = bench.add(part, variant, fn, after=after, MiB=size)
                row["GB_s"] = None if variant == "resident" else size * 2**20 / row["us"] * 1e-3
                first = part == "to host"  # it runs beside what follows; a copy to the device beside what went before
                row["overlap"] = None if variant == "resident" else overlap(bench, fn, after, row["us"], first)


def copy_calls(numel: int, device: torch.device) -> dict[str, dict[str, tuple[Callable[[], Any], Any]]]:
    """For each direction and variant: the call, and what has to follow it outside the clock."""
    far, side = torch.ones(numel, device=device), torch.cuda.Stream(device)
    near, locked = torch.ones(numel), torch.ones(numel).pin_memory()
    upload, beside = Upload(device, nbytes=4 * numel), Upload(device, nbytes=4 * numel, side_stream=True)
    down, down_beside = Download(far), Download(far, side_stream=True)

    # Whether a copy may be asynchronous is passed by position: here a host that reads too early is not the question.
    def copy(target: Tensor, source: Tensor, asynchronous: bool = False, stream: Any = None) -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            target.copy_(source, asynchronous)

    to_device: dict[str, tuple[Callable[[], Any], Any]] = {
        PAGEABLE: (partial(copy, far, near), None),
        LATER: (partial(copy, far, near, True, side), None),
        ON_THE_FLY: (lambda: copy(far, near.pin_memory(), True, side), None),
        LOCKED: (partial(copy, far, locked), None),
        BESIDE: (partial(copy, far, locked, True, side), None),
        "Upload": (partial(upload.stage, near), None),
        # What fills the block is the work that makes the batch, which every other variant has before the clock too.
        IN_PLACE: (lambda: upload.send(upload.block((numel,), torch.float32)), None),
        "Upload, side stream": (partial(beside.stage, near), None),
        "resident": (lambda: far, None),
    }
    to_host: dict[str, tuple[Callable[[], Any], Any]] = {
        PAGEABLE: (partial(copy, near, far), None),
        LATER: (partial(copy, near, far, True, side), None),
        LOCKED: (partial(copy, locked, far), None),
        BESIDE: (partial(copy, locked, far, True, side), None),
        "Download": (partial(down.start, far), down.wait),
        "Download, side stream": (partial(down_beside.start, far), down_beside.wait),
        "resident": (lambda: far, None),
    }
    return {"to device": to_device, "to host": to_host}


def overlap(bench: Bench, fn: Callable[[], Any], after: Any, alone: float, first: bool) -> float:
    """Share of the shorter of copy and matrix products that runs beside the longer: 0 in turn, 1 wholly beside.

    The copy is started before the products if it is ``first``, else after them.
    """
    factor = torch.randn(1024, 1024, device=bench.device)
    one = wall(lambda: torch.mm(factor, factor), 5, bench.device)["us"]
    count = max(1, min(2000, round(2 * alone / one)))

    def work() -> None:
        for _ in range(count):
            torch.mm(factor, factor)

    def both() -> None:
        for part in (fn, work) if first else (work, fn):
            part()

    repeats = max(5, bench.repeats // 5)
    busy = wall(work, repeats, bench.device)["us"]
    together = wall(both, repeats, bench.device, after)["us"]
    return max(0.0, min(1.0, (alone + busy - together) / min(alone, busy)))


def peak_memory(device: torch.device, asynchronous: bool) -> int:
    """Largest number of bytes allocated on the device by ten copies of 16 MiB from page-locked memory."""
    source = torch.ones(2**22).pin_memory()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    target = torch.empty(0, device=device)
    for _ in range(10):
        target = source.to(device, torch.float32, asynchronous)
    synchronize(device)
    del target
    return torch.cuda.max_memory_allocated(device) - before


# -- tensors from arrays, and metrics ---------------------------------------------------------------------------------


def creation(bench: Bench) -> None:
    """Moving a batch of observations, a list of arrays or one array on the host, to the device."""
    parts = list(np.random.default_rng(0).standard_normal((NUM_ARRAYS, ARRAY_SIZE), np.float32))
    whole, upload = np.array(parts), Upload(bench.device)
    far, size = torch.from_numpy(whole).to(bench.device), whole.nbytes / 2**20
    calls: dict[str, Callable[[], Any]] = {
        "tensor(np.array(list))": lambda: torch.tensor(np.array(parts)).to(bench.device),
        "tensor(array)": lambda: torch.tensor(whole).to(bench.device),
        "from_numpy(array)": lambda: torch.from_numpy(whole).to(bench.device),
        "Upload": lambda: upload.stage(whole),
        "resident": lambda: far,
    }
    for variant, fn in calls.items():
        bench.add("creation", variant, fn, MiB=size)


def metrics(bench: Bench) -> None:
    """Twenty scalars of one update: read one by one, packed and waited for, read one update later, only added up."""
    scalars = list(torch.randn(NUM_METRICS, device=bench.device).unbind())
    named = {f"metric_{index}": scalar for index, scalar in enumerate(scalars)}
    download, sums = Download(torch.stack(scalars)), DeviceMetrics(bench.device)

    def packed() -> list[float]:
        download.start(torch.stack(scalars))
        return download.wait().tolist()

    def deferred() -> list[float]:
        download.start(torch.stack(scalars))
        return download.wait().tolist() if download.pending == 2 else []

    bench.add("metrics", f"{NUM_METRICS} x .item()", lambda: [scalar.item() for scalar in scalars])
    bench.add("metrics", "one packed copy", packed)
    bench.add("metrics", "packed, read an update later", deferred)
    bench.add("metrics", "added up on the device", lambda: sums.add_all(named))


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(bench: Bench) -> list[dict[str, str]]:
    """The verdict of the rows on each claim."""
    items, later = f"{NUM_METRICS} x .item()", "packed, read an update later"
    saved = 1 - bench.median("metrics", later) / bench.median("metrics", items)
    times = bench.median("creation", "tensor(np.array(list))") / bench.median("creation", "from_numpy(array)")
    found = [
        _verdict("from_numpy makes tensors 100 times faster", f"{times:.1f} times", times >= 50),
        _verdict("reading metrics packed and later saves 80 %", f"{saved:.0%}", saved >= 0.8),
    ]
    names = ("non_blocking from pageable memory is blocking", "non_blocking page-locked copies save 25 to 40 %")
    names += ("non_blocking lowers the peak of memory by 15 to 25 %", "copies run beside work on the device")
    if bench.device.type != "cuda":
        return [*found, *({"claim": name, "measured": "", "verdict": "n/a: no CUDA"} for name in names)]

    up, down = (partial(bench.median, part) for part in COPIES)
    blocked = [of(LATER, "host_us") / of(PAGEABLE) for of in (up, down)]
    gains = [1 - of(BESIDE) / of(PAGEABLE) for of in (up, down)]
    peaks = [peak_memory(bench.device, asynchronous) for asynchronous in (False, True)]
    beside = [up("Upload, side stream", "overlap"), down("Download, side stream", "overlap")]
    measured = (
        f"the host is held for {blocked[0]:.0%} (to device) and {blocked[1]:.0%} (to host) of a blocking copy",
        f"{gains[0]:.0%} to device, {gains[1]:.0%} to host",
        f"{1 - peaks[1] / peaks[0]:.0%}",
        f"{beside[0]:.0%} of the copy to device, {beside[1]:.0%} of that to host",
    )
    holds = (min(blocked) >= MOSTLY, min(gains) >= 0.25, peaks[1] <= 0.85 * peaks[0], min(beside) >= MOSTLY)
    return [*found, *map(_verdict, names, measured, holds)]


def _verdict(claim: str, measured: str, holds: bool) -> dict[str, str]:
    return {"claim": claim, "measured": measured, "verdict": "holds" if holds else "does not hold"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print the tables and write ``transfer.json`` (``transfer_cpu.json`` on a CPU)."""
    import tyro

    options = tyro.cli(BenchTransfer, args=argv, prog="torchrl-perf bench transfer")
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    sizes, repeats = ((1.0, 16.0), 10) if options.quick else (options.sizes, options.repeats)
    bench = Bench(torch.empty(0, device=name).device, sizes, repeats)
    for part in (copies, creation, metrics):
        part(bench)
    table = verdicts(bench)
    print(format_table([{**row, "us": row.get("us", row.get("note"))} for row in bench.rows], COLUMNS))
    print()
    print(format_table(table, VERDICT_COLUMNS))
    if not options.quick or options.out is not None:
        file = "transfer" if bench.device.type == "cuda" else "transfer_cpu"
        rows = [*bench.rows, *({"part": "verdict", **row} for row in table)]
        print(f"written to {write_results(file, rows, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
