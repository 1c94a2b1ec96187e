"""Each switch of :mod:`torchrl_perf.runtime.precision`, off and on, in the package's own loops.

Two tables in one: with everything on, each switch off; with everything off, each switch on. Before anything is timed,
the outputs of the networks are compared with those in full float32, and the loss of a few iterations with that of the
plain loop. The variants take turns. Compiling takes most of the time: the cheap loops come first, and variants that no
longer fit into the budget are named.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchrl_perf.bench.ablation_loops import LOOPS, OPTIMIZER_OFF, Loop, Variant
from torchrl_perf.bench.report import Sheet, format_table
from torchrl_perf.runtime import CaptureError, Stopwatch, synchronize

COLUMNS = ("loop", "variant", "ms", "p10_ms", "p90_ms", "speedup", "outputs_off_by", "loss_off_by", "start_s")
COLUMNS += ("ok", "verdict")
OUTPUT_TOLERANCE = {"ieee": 1e-5, "tf32": 4e-3, "bf16": 2e-2}
"""Largest difference of a network's outputs from full float32, relative to the largest of them.

TF32 keeps ten bits of the mantissa, 1e-3 a product, and the networks have three layers.
"""
LOSS_TOLERANCE = {"ieee": 0.05, "tf32": 0.05, "bf16": 0.1}
"""Largest relative difference of the loss of the first iterations: different rounding makes some actions differ."""
CLAIMS = {"tf32": (8.0, math.inf), "bf16": (2.0, math.inf), "compile": (1.15, 1.30), "fused": (1.20, math.inf)}
"""Speedups that the original systems claimed for a switch, from least to most."""
CHECKED = 3  # iterations before the loss is compared: two to warm up, one to record and replay
SLOW, LEAST_TURNS, TURN_SECONDS = 0.05, 3, 0.5  # seconds of a slow iteration, and how often it is timed at least
BUDGET, QUICK_BUDGET = 95.0, 25.0  # seconds


@dataclass(frozen=True)
class BenchAblation:
    """Options of ``torchrl-perf bench ablation``."""

    loops: tuple[str, ...] = ("matmul", "conv", "dqn", "ppo", "sac")
    """What to run: matmul, conv (a small convolutional net), dqn, ppo, sac, sac-4096 (large batches)."""
    rounds: int = 12
    """Turns of each variant, of ``calls`` iterations; fewer for those above 50 ms."""
    calls: int = 4
    """Iterations of a turn; one for those above 50 ms."""
    budget: float | None = None
    """Seconds after which no variant is begun; 0 is without end, None 95, or 25 with --quick."""
    without: tuple[str, ...] = ()
    """Switches to leave out, such as compile, which takes most of the time."""
    quick: bool = False
    """Small sizes and nothing compiled: a check of the benchmark, written only where --out says so."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for ablation.json; the package's bench/results by default."""


def variants_of(loop: type[Loop], available: Iterable[str]) -> list[Variant]:
    """Everything off, each switch on; everything on, each switch off. Switches that the machine lacks are left out.

    A matrix product has one precision: with ``bf16``, the products that stay in float32 take TF32.
    """
    available = set(available)
    switches = [name for name in loop.switches if name in available]
    compiled = [name for name in loop.compiled_switches if name in available]
    variants = [Variant("all off", frozenset())]
    variants += [Variant(f"+ {name}", frozenset({name})) for name in switches]
    everything = frozenset(switches)
    if not everything <= {"tf32", "bf16"}:  # else "bf16" alone is the same variant
        variants.append(Variant("all on", everything))
        # without TF32 alone nothing would change: bf16 is on
        variants += [Variant(f"- {name}", everything - {name}) for name in compiled if name != "tf32"]
    unique = {variant.on: variant for variant in reversed(variants)}
    return [variant for variant in variants if unique[variant.on] is variant]


def deviation(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference, relative to the largest value of the reference."""
    difference = (value.double() - reference.double()).abs().max()
    return float(difference / reference.double().abs().max())


def verdict(switch: str, speedup: float, device: torch.device) -> str:
    """The verdict on the claim for a switch; empty if there is none."""
    if switch not in CLAIMS:
        return ""
    if switch == "tf32" and device.type == "cpu":
        return "n/a on this device"
    least = CLAIMS[switch][0]
    if speedup >= least:
        return f"confirmed ({least:g}x claimed)"
    return f"{'partly' if speedup >= 1 + (least - 1) / 4 else 'not reproduced'} ({least:g}x claimed)"


class Ablation:
    """All variants of one loop.

    Args:
        name: of the loop.
        options: of the benchmark.
        device: where it runs.
        sheet: takes the rows.
        watch: runs since the benchmark began, for its budget.
    """

    def __init__(
        self,
        name: str,
        options: BenchAblation,
        device: torch.device,
        sheet: Sheet | None = None,
        watch: Stopwatch | None = None,
    ) -> None:
        self.name, self.options, self.device = name, options, device
        self.sheet = Sheet(COLUMNS) if sheet is None else sheet
        self._watch = Stopwatch("cpu").start() if watch is None else watch
        self.kind = LOOPS[name]
        self.variants = variants_of(self.kind, available_switches(device) - set(options.without))
        self.loops: dict[tuple[str, bool], Loop] = {}

    @property
    def out_of_time(self) -> bool:
        """Whether the budget is used up."""
        budget = self.options.budget
        if budget is None:
            budget = QUICK_BUDGET if self.options.quick else BUDGET
        self._watch.stop()
        return 0 < budget < self._watch.host_seconds

    def loop_of(self, variant: Variant) -> Loop:
        """The loop that runs a variant: one for each precision, eager and compiled."""
        key = (variant.precision, "compile" in variant)
        if key not in self.loops:
            self.loops[key] = self.kind(*key, self.options.quick, self.device)
        return self.loops[key]

    def checked_step(self, variant: Variant) -> tuple[Callable[[], Any], dict[str, Any]]:
        """The function of a variant, warm, and the result of its comparison with the plain loop."""
        loop = self.loop_of(variant)
        start = Stopwatch("cpu").start()
        loop.reset()
        outputs = loop.outputs().clone()
        step = loop.step(variant)
        for _ in range(CHECKED):
            step()
        synchronize(self.device)
        start.stop()
        loss = loop.loss_value()
        if variant.name == "all off":
            self.reference = outputs, loss
        plain_outputs, plain_loss = self.reference
        found = {
            "outputs_off_by": deviation(outputs, plain_outputs),
            "loss_off_by": None if math.isnan(loss) else abs(loss - plain_loss) / abs(plain_loss),
            "start_s": start.seconds,
        }
        near = found["outputs_off_by"] <= OUTPUT_TOLERANCE[variant.precision]
        near &= found["loss_off_by"] is None or found["loss_off_by"] <= LOSS_TOLERANCE[variant.precision]
        return step, found | {"ok": bool(near)}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each variant, and one for all that the budget leaves out."""
        rows, steps = [], []
        left_out = []
        for variant in self.variants:
            if self.out_of_time:
                left_out.append(variant.name)
                continue
            row = {"loop": self.name, "variant": variant.name, "switches": sorted(variant.on)}
            try:
                step, found = self.checked_step(variant)
            except CaptureError as error:  # only this variant failed: time the others
                failed = {"ok": False, "verdict": "not captured", "error": str(error)}
                rows.append(self.sheet.add(row | failed))
                continue
            steps.append(step)
            rows.append(self.sheet.add(row | found))
        self._time([row for row in rows if "error" not in row], steps)
        if left_out:
            names = {"loop": self.name, "variant": ", ".join(left_out)}
            rows.append(self.sheet.add({**names, "verdict": "left out: time is up; --budget 0, or --loops"}))
        return rows

    def _time(self, rows: list[dict[str, Any]], steps: list[Callable[[], Any]]) -> None:
        """Adds times, speedups and verdicts to the rows of the steps."""
        for row, times in zip(rows, _alternate(steps, self.options, self.device), strict=True):
            low, middle, high = torch.quantile(times, torch.tensor([0.1, 0.5, 0.9], dtype=times.dtype)).tolist()
            row |= {"ms": middle, "p10_ms": low, "p90_ms": high, "repeats": len(times)}
        by_name = {row["variant"]: row for row in rows}
        for row in rows:
            sign, _, switch = row["variant"].partition(" ")
            if sign == "+" or row["variant"] == "all on":
                row["speedup"] = by_name["all off"]["ms"] / row["ms"]
            if sign == "-" and "all on" in by_name:
                row["speedup"] = row["ms"] / by_name["all on"]["ms"]
            if sign == "+" and not self.options.quick:
                row["verdict"] = verdict(switch, row["speedup"], self.device)
            self.sheet.show(row)

    def close(self) -> None:
        """Releases the loops, their graphs with them."""
        for loop in self.loops.values():
            loop.close()
        self.loops.clear()
        gc.collect()


def _alternate(steps: list[Callable[[], Any]], options: BenchAblation, device: torch.device) -> Iterator[torch.Tensor]:
    """Milliseconds of each step's calls, float64: one turn of each after the other, again and again.

    A slow step has shorter and fewer turns: its time is long compared to disturbances.
    """
    turns = [min(options.rounds, 3) if options.quick else options.rounds] * len(steps)
    calls = [options.calls] * len(steps)
    for number, step in enumerate(steps):
        step()
        with Stopwatch(device) as watch:
            step()
        if watch.seconds > SLOW:
            calls[number] = 1
            turns[number] = min(turns[number], max(LEAST_TURNS, int(TURN_SECONDS / watch.seconds)))
    watches: list[list[Stopwatch]] = [[] for _ in steps]
    for turn in range(max(turns, default=0)):
        for number, step in enumerate(steps):
            if turn >= turns[number]:
                continue
            if calls[number] > 1:
                step()  # refills the caches after another variant
            for _ in range(calls[number]):
                with Stopwatch(device) as watch:
                    step()
                watches[number].append(watch)
    synchronize(device)
    for own in watches:
        yield torch.tensor([watch.seconds * 1e3 for watch in own], dtype=torch.float64)


def available_switches(device: torch.device) -> set[str]:
    """Switches that have an effect on the device."""
    switches = {"bf16", "compile", "fused", "channels-last"}
    return switches | {"tf32", "graph"} if device.type == "cuda" else switches


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes ``ablation.json``; 1 where an output is out of tolerance."""
    import tyro

    options = tyro.cli(BenchAblation, args=argv, prog="torchrl-perf bench ablation")
    if unknown := [name for name in options.loops if name not in LOOPS]:
        print(f"loops: expected names among {', '.join(LOOPS)}, received {', '.join(unknown)}", file=sys.stderr)
        return 2
    if options.quick:
        options = replace(options, without=(*options.without, "compile"))
    watch = Stopwatch("cpu").start()
    name = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    print(f"{device}; optimiser without fused: {OPTIMIZER_OFF[device.type]}; speedup of '+': all off / variant, ")
    print("of '-': variant / all on; ok: outputs and loss within tolerance of full float32")
    writes = not options.quick or options.out is not None
    file = "ablation" if device.type == "cuda" else "ablation_cpu"
    sheet = Sheet(COLUMNS, file if writes else None, options.out)
    for loop in options.loops:
        ablation = Ablation(loop, options, device, sheet, watch)
        ablation.rows()
        ablation.close()
    print(f"\n{format_table(sheet.rows, COLUMNS)}")
    if sheet.path is not None:
        print(f"written to {sheet.path}")
    return 0 if all(row.get("ok", True) for row in sheet.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
