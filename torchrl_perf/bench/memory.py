"""Memory rules of training loops: cost and benefit of cleaning up, which loops leak, and the cost of the guard.

The claims are those of a deep Q-learning system whose loop went from 27 experiences a second to 11.5 by memory fixes
and back to 25 to 27 by rarer ones, with 50% of the loss said to be copies to the CPU, 30% frequent cleanup and 20%
garbage collection. The envs here are faster, so that only ratios compare.
"""

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchrl_perf.bench.memory_loops import (
    AGGRESSIVE,
    HISTORY,
    LEAKY,
    NUM_ENVS,
    OPTIMISED,
    SETTINGS,
    TRAIN_EVERY,
    WITHOUT,
    ListLoop,
    Setting,
    empty_cache,
    native,
)
from torchrl_perf.bench.report import Sheet, format_table
from torchrl_perf.replay import BoundedHistory
from torchrl_perf.runtime import LeakCheck, LeakReport, MemoryGuard, synchronize
from torchrl_perf.runtime.memory import MIB, heap_bytes, read_cuda, rss_bytes

COLUMNS = ("part", "variant", "per_second", "us", "ms", "ns", "MiB", "slope_mib_per_1000", "low", "high", "leaks")
VERDICT_COLUMNS = ("claim", "measured", "verdict")
NO_CUDA = "n/a on this device"
GC_INTERVAL = 5_000
NATIVE = "native"
SPANS = 3
"""Of steps one after the other that all have to rise before a loop is said to leak."""
LEAK_EXPECTED = {LEAKY.name: True, OPTIMISED.name: False, NATIVE: False}
"""The loops whose memory is followed, and whether it should grow."""


@dataclass(frozen=True)
class BenchMemory:
    """Options of ``torchrl-perf bench memory``."""

    seconds: float = 1.5
    """Time of each loop and round."""
    rounds: int = 2
    """Rounds of the loops, in turn."""
    leak_steps: int = 800
    """Env steps in which a leak is looked for."""
    objects: tuple[int, ...] = (0, 300_000, 1_000_000)
    """Python objects besides those there are, for the cost of a garbage collection."""
    cached: tuple[int, ...] = (0, 256, 2_048)
    """MiB in PyTorch's cache, for the cost of emptying it."""
    intervals: tuple[int, ...] = (1, 10, 100, 0)
    """Training steps from one cleanup to the next; 0 is never."""
    quick: bool = False
    """Half a second a loop, one round, small heaps, nothing compiled; written only where --out says so."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for memory.json; the package's bench/results by default."""


@dataclass
class Bench:
    """One session: the device, and the rows measured so far."""

    options: BenchMemory
    device: torch.device
    sheet: Sheet = field(default_factory=lambda: Sheet(COLUMNS))

    def add(self, part: str, variant: str, **values: Any) -> dict[str, Any]:
        """Notes a row, and returns it."""
        return self.sheet.add({"part": part, "variant": variant, **values})

    def value(self, variant: str, column: str = "per_second") -> Any:
        """A column of the row of a variant."""
        return next(row[column] for row in self.sheet.rows if row["variant"] == variant and column in row)

    def mib(self) -> float | None:
        """Memory in use: of tensors on CUDA, of the process's heap on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) / MIB
        count = heap_bytes() or rss_bytes()
        return None if count is None else count / MIB


def microseconds(fn: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median wall time of a call, to the end of its work on the device."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        fn()
        synchronize(device)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


# -- loops ------------------------------------------------------------------------------------------------------------


def loops(bench: Bench) -> None:
    """Speed of each memory rule, memory and slope of those that a claim is made of."""
    rows: dict[str, dict[str, Any]] = {}
    speeds: dict[str, list[float]] = {setting.name: [] for setting in SETTINGS}
    for _ in range(bench.options.rounds):
        for setting in SETTINGS:
            speeds[setting.name].append(_list_loop(bench, setting, rows))
            row = rows[setting.name]
            if len(speeds[setting.name]) > 1:
                row["per_second"] = statistics.median(speeds[setting.name])
                bench.sheet.show(row)


def _list_loop(bench: Bench, setting: Setting, rows: dict[str, dict[str, Any]]) -> float:
    """Experiences a second of a loop that is made anew, whose row is added in the first round."""
    loop = ListLoop(setting, bench.device)
    loop.warm_up()
    speed = _speed(bench, loop.step, NUM_ENVS)
    if setting.name not in rows:
        rows[setting.name] = _note(bench, setting.name, speed, loop.step, bench.options.leak_steps)
    del loop
    gc.collect()
    return speed


def own_loop(bench: Bench) -> None:
    """Speed, memory and slope of the package's loop; behind the others, whose heap its compilation would enlarge."""
    trainer, step = native(bench.device, compiles=not bench.options.quick)
    for _ in range(50):
        step()
    speed = statistics.median(_speed(bench, step, NUM_ENVS * TRAIN_EVERY) for _ in range(bench.options.rounds))
    _note(bench, NATIVE, speed, step, bench.options.leak_steps // TRAIN_EVERY)
    trainer.close()


def _speed(bench: Bench, step: Callable[[], Any], frames: int) -> float:
    """Experiences a second."""
    synchronize(bench.device)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < bench.options.seconds:
        step()
        count += 1
        if count % 50 == 0:
            synchronize(bench.device)  # a replay only queues
    synchronize(bench.device)
    return count * frames / (time.perf_counter() - begin)


def _note(bench: Bench, name: str, speed: float, step: Callable[[], Any], count: int) -> dict[str, Any]:
    if name not in LEAK_EXPECTED:
        return bench.add("loop", name, per_second=speed, MiB=bench.mib())
    report = leak(bench, step, count)
    slopes = {"slope_mib_per_1000": report.slope_mib_per_1000, "low": report.low, "high": report.high}
    return bench.add("loop", name, per_second=speed, MiB=bench.mib(), **slopes, leaks=report.leaks)


def leak(bench: Bench, step: Callable[[], Any], count: int) -> LeakReport:
    """The slope of memory over ``count`` calls; of the last of up to three such spans, where the earlier ones rose.

    In a span as short as that a tenth of a MiB in 1,000 steps is a few kB: what threads of the start still fill, which
    takes long where other processes have the cores. That comes to an end, and a leak goes on.
    """
    for _ in range(SPANS):
        report = _span(bench, step, count)
        if not report.leaks:
            break
    return report


def _span(bench: Bench, step: Callable[[], Any], count: int) -> LeakReport:
    """The slope over ``count`` calls, read about 50 times, each time after a garbage collection."""
    check, every = LeakCheck(), max(1, count // 50)
    gc.collect()
    gc.freeze()
    try:
        for number in range(count):
            step()
            if number % every == 0:
                gc.collect()
                check.record(number, bench.mib() or math.nan)
    finally:
        gc.unfreeze()
    return check.report()


# -- costs ------------------------------------------------------------------------------------------------------------


def cleanup_costs(bench: Bench) -> None:
    """One ``gc.collect()`` by the number of objects, frozen or not, and one ``empty_cache()`` by what is cached."""
    for count in bench.options.objects:
        kept = [[number] for number in range(count)]
        ms = microseconds(gc.collect, 3, torch.device("cpu")) / 1e3
        bench.add("gc.collect", f"{len(gc.get_objects()):,} objects", ms=ms)
        del kept
    gc.collect()
    gc.freeze()
    bench.add("gc.collect", "after gc.freeze", ms=microseconds(gc.collect, 20, torch.device("cpu")) / 1e3)
    gc.unfreeze()
    if bench.device.type != "cuda":
        bench.add("empty_cache", NO_CUDA)
        return
    for size in bench.options.cached:
        times = []
        for _ in range(3):
            blocks = [torch.empty(16 * MIB, dtype=torch.uint8, device=bench.device) for _ in range(size // 16)]
            del blocks
            times.append(microseconds(torch.cuda.empty_cache, 1, bench.device) / 1e3)
        bench.add("empty_cache", f"{size:,} MiB cached", ms=statistics.median(times))


def frequencies(bench: Bench) -> None:
    """A training step with a cleanup every so many of them."""
    device = bench.device
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    adam, data = torch.optim.Adam(net.parameters()), torch.randn(256, 64, device=device)

    def step() -> None:
        adam.zero_grad()
        net(data).square().mean().backward()
        adam.step()

    for _ in range(20):
        step()
    for interval in bench.options.intervals:
        count = 5 if interval == 1 else max(20, interval) if interval else 100
        synchronize(device)
        begin = time.perf_counter()
        for number in range(1, count + 1):
            step()
            if interval and number % interval == 0:
                gc.collect()
                empty_cache(device)
        synchronize(device)
        name = f"every {interval:,} steps" if interval else "never"
        bench.add("cleanup", name, us=(time.perf_counter() - begin) / count * 1e6)


def trims(bench: Bench) -> None:
    """Appending to a list that is trimmed at once, or at 1.2 times its bound, and to a ring."""

    def trimmed(tolerance: float) -> Callable[[], None]:
        def run() -> None:
            values: list[float] = [0.0] * HISTORY
            limit = int(HISTORY * tolerance)
            for _ in range(10_000):
                values.append(1.0)
                if len(values) > limit:
                    values = values[-HISTORY:]

        return run

    def ring() -> None:
        values = BoundedHistory([0.0] * HISTORY, maxlen=HISTORY)
        for _ in range(10_000):
            values.append(1.0)

    variants = {"trim at each overflow": trimmed(1.0), "trim at 1.2": trimmed(1.2), "ring": ring}
    for name, run in variants.items():
        bench.add("append", name, ns=microseconds(run, 5, torch.device("cpu")) / 10_000 * 1e3)


def guard_costs(bench: Bench) -> None:
    """Time of the guard in each iteration, and of a reading and a row of metrics."""
    guard, host = MemoryGuard(bench.device, gc_interval=0), torch.device("cpu")

    def thousand() -> None:
        for _ in range(1_000):
            guard.after_iteration()

    bench.add("guard", "after_iteration", us=microseconds(thousand, 10, host) / 1_000)
    if bench.device.type == "cuda":
        bench.add("guard", "reading", us=microseconds(lambda: read_cuda(bench.device), 200, host))
    bench.add("guard", "row", us=microseconds(guard.row, 50, host))


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(bench: Bench) -> list[dict[str, str]]:
    """The verdict of the rows on each claim."""
    speed, cuda = bench.value, bench.device.type == "cuda"
    aggressive, optimised = (speed(one.name) / speed(LEAKY.name) for one in (AGGRESSIVE, OPTIMISED))
    costs = {name: 1 - speed(AGGRESSIVE.name) / speed(one.name) for name, one in WITHOUT.items()}
    found = [
        _verdict("memory fixes cost 57% of the speed (27 to 11.5)", f"{1 - aggressive:.0%}", 1 - aggressive, 0.4, 0.1),
        _verdict("rarer ones bring it back (25 to 27 of 27)", f"{optimised:.0%}", optimised, 25 / 27, 0.7),
    ]
    for name, claimed in zip(costs, (0.5, 0.3, 0.2), strict=True):
        cost = costs[name]
        claim = f"of the aggressive loop {name} cost {claimed:.0%}"
        judged = _verdict(claim, f"{cost:.0%}", cost, 0.75 * claimed, 0.05)
        if name == "copies" and not cuda:
            judged["verdict"] = NO_CUDA
        found.append(judged)
    product = math.prod(1 - cost for cost in costs.values())
    together = aggressive / optimised
    fit = min(product / together, together / product)
    found.append(_verdict("the three compose", f"{product:.3f} for {together:.3f}", fit, 0.8, 0.5))
    plain, tolerant, ring = (bench.value(name, "ns") for name in ("trim at each overflow", "trim at 1.2", "ring"))
    times = f"{plain / tolerant:.0f} times cheaper; a ring {plain / ring:.0f} times"
    found.append(_verdict("trimming at 1.2 is cheaper than at each overflow", times, plain / tolerant, 2, 1.1))
    each, never = (bench.value(name, "us") for name in ("every 1 steps", "never"))
    found.append(_verdict("cleaning up at each step is slow", f"{each / never:.1f} times", each / never, 2, 1.1))
    return found + _own(bench)


def _own(bench: Bench) -> list[dict[str, str]]:
    """The claims of the package itself."""
    times = bench.value(NATIVE) / bench.value(LEAKY.name)
    found = [_verdict("native is faster than leaky", f"{times:.2f} times", times, 1, 0.8)]
    for name, leaks in LEAK_EXPECTED.items():
        low, high = bench.value(name, "low"), bench.value(name, "high")
        holds = low > 0.1 if leaks else low <= 0.1
        word = "leaks" if leaks else "does not leak"
        text = f"{bench.value(name, 'slope_mib_per_1000'):+.3f} MiB in 1,000 steps ({low:+.3f} to {high:+.3f})"
        found.append(_verdict(f"{name} {word}", text, float(holds), 1, 1))
    iteration = NUM_ENVS * TRAIN_EVERY / bench.value(NATIVE) * 1e6
    cost = bench.value("after_iteration", "us") + bench.value("after gc.freeze", "ms") * 1e3 / GC_INTERVAL
    share = cost / iteration
    text = f"{share:.4%} of {iteration:,.0f} us"
    return [*found, _verdict("the guard takes less than 0.1% of an iteration", text, -share, -0.001, -0.01)]


def _verdict(claim: str, measured: str, value: float, confirmed: float, partly: float) -> dict[str, str]:
    """Confirmed from the first bound on, partly from the second."""
    word = "confirmed" if value >= confirmed else "partly" if value >= partly else "not reproduced"
    return {"claim": claim, "measured": measured, "verdict": word}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print the tables and write ``memory.json`` (``memory_cpu.json`` on a CPU)."""
    import tyro

    options = tyro.cli(BenchMemory, args=argv, prog="torchrl-perf bench memory")
    if options.quick:
        small = {"seconds": 0.5, "rounds": 1, "leak_steps": 300, "objects": (0, 300_000), "cached": (0, 256)}
        options = BenchMemory(**small, intervals=(1, 100, 0), quick=True, device=options.device, out=options.out)
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.empty(0, device=name).device
    file = "memory" if device.type == "cuda" else "memory_cpu"
    writes = not options.quick or options.out is not None
    bench = Bench(options, device, Sheet(COLUMNS, file if writes else None, options.out))
    for part in (loops, own_loop, cleanup_costs, frequencies, trims, guard_costs):
        part(bench)
    table = verdicts(bench)
    print(f"\n{format_table(bench.sheet.rows, COLUMNS)}\n\n{format_table(table, VERDICT_COLUMNS)}")
    bench.sheet.rows += [{"part": "verdict", **row} for row in table]
    bench.sheet.write()
    if bench.sheet.path is not None:
        print(f"written to {bench.sheet.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
