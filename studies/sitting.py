"""How a claim is measured: outputs compared first, then before and after timed in turns, then a verdict.

One row for each variant of each case. ``us`` is the time of a call from its start to the end of its work on the device;
``ratio`` is how many times as fast as the first variant it is, turn by turn.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from torchrl_perf.bench.report import CONFIRMED, NOT_HERE, NOT_REPRODUCED, PARTLY
from torchrl_perf.runtime import Captured, GpuSampler, capture, synchronize

REFUSED = "refused"
"""Verdict of a claim whose outputs differ: a time of it would mean nothing."""
ROW_COLUMNS = ("experiment", "case", "variant", "us", "p10_us", "p90_us", "ratio", "spread", "off_by", "note")
VERDICT_COLUMNS = ("claim", "measured", "verdict", "remark")
SHORTEST_TURN_S = 2e-4
MOST_CALLS = 500

Outputs = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Variant:
    """One way of doing a thing.

    Attributes:
        name: as the table shows it.
        call: what is timed.
        outputs: what is compared with the first variant's, given here by a call; None takes what ``call`` returns.
        scale: factor on the time, for a loop that is timed on a part of its rows, each of which takes the same.
        compared: False where there is nothing to compare, with the reason in ``note``.
        tolerance: of this variant alone, instead of the experiment's.
        note: what the table says of it.
    """

    name: str
    call: Callable[[], Any]
    outputs: Callable[[], Outputs] | None = None
    scale: float = 1.0
    compared: bool = True
    tolerance: float | None = None
    note: str = ""


@dataclass
class Sitting:
    """The device, and the rows measured so far.

    Attributes:
        system: name of the system, ``"durotaxis"``.
        device: where the work is done.
        quick: small sizes and few turns.
        compile: whether variants that need the compiler are measured, which takes minutes.
        save: called after each row with all of them.
        rows: rows of experiments.
        verdicts: rows of claims.
    """

    system: str
    device: torch.device
    quick: bool = False
    compile: bool = False
    save: Callable[[], None] = lambda: None
    rows: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cuda(self) -> bool:
        """Whether the device is one."""
        return self.device.type == "cuda"

    def pick(self, quick: Any, cpu: Any, cuda: Any = None) -> Any:
        """The size for this sitting; on CUDA that of a CPU where none is given."""
        if self.quick:
            return quick
        return cuda if self.cuda and cuda is not None else cpu

    def graph(self, call: Callable[[], Any], *, compile: bool = False) -> Captured:
        """The call in a CUDA graph, recorded; to be released after use."""
        made = capture(call, device=self.device, compile=compile, audit=False)
        for _ in range(4):
            made()
        return made

    def add(self, experiment: str, case: str, variant: str, **found: Any) -> dict[str, Any]:
        """Notes a row, prints it and saves all."""
        row = {"system": self.system, "experiment": experiment, "case": case, "variant": variant, **found}
        self.rows.append(row)
        print(_line(row), flush=True)
        self.save()
        return row

    def verdict(self, experiment: str, claim: str, measured: str, word: str, remark: str = "") -> dict[str, Any]:
        """Notes a verdict, prints it and saves all; ``refused`` where outputs of the experiment differ."""
        if any(row["experiment"] == experiment and row.get("ok") is False for row in self.rows):
            word = REFUSED
        row = {
            "part": "verdict",
            "system": self.system,
            "experiment": experiment,
            "claim": claim,
            "measured": measured,
            "verdict": word,
            "remark": remark,
        }
        self.verdicts.append(row)
        print(f"  -> {claim}: {measured or '-'}: {word}" + (f" ({remark})" if remark else ""), flush=True)
        self.save()
        return row

    def compare(
        self, experiment: str, case: str, variants: Sequence[Variant], *, tolerance: float = 0.0, **found: Any
    ) -> dict[str, dict[str, Any]]:
        """Compares the outputs of all variants with the first one's, then times those that are equal in turns.

        Args:
            experiment: name of the experiment.
            case: sizes.
            variants: the first is the "before".
            tolerance: largest absolute difference; 0 for equality.
            **found: entries of all rows.

        Returns:
            The rows by variant; one that differs has ``ok`` False and no time.
        """
        reference, good, off = None, [], {}
        for variant in variants:
            limit = tolerance if variant.tolerance is None else variant.tolerance
            if not variant.compared:
                good.append(variant)
                continue
            outputs = as_tuple((variant.outputs or variant.call)())
            reference = outputs if reference is None else reference
            off[variant.name] = difference(outputs, reference)
            if off[variant.name] <= limit:
                good.append(variant)
                continue
            note = f"differs from {variants[0].name} by {off[variant.name]:.1e}, more than {limit:g}"
            entries = {"off_by": off[variant.name], "tolerance": limit, "ok": False, "note": note}
            self.add(experiment, case, variant.name, **found, **entries)
        times = in_turns([variant.call for variant in good], self.device, self.quick)
        rows = {}
        for variant, seconds in zip(good, times, strict=True):
            low, middle, high = np.quantile(seconds, (0.1, 0.5, 0.9)) * 1e6 * variant.scale
            entries = {"us": float(middle), "p10_us": float(low), "p90_us": float(high), "repeats": len(seconds)}
            if good[0] is variants[0]:
                entries |= ratio(times[0] * good[0].scale, seconds * variant.scale)
            if variant.compared:
                limit = tolerance if variant.tolerance is None else variant.tolerance
                entries |= {"off_by": off[variant.name], "tolerance": limit, "ok": True}
            if variant.scale != 1.0:
                entries["scaled_by"] = variant.scale
            if variant.note:
                entries["note"] = variant.note
            rows[variant.name] = self.add(experiment, case, variant.name, **found, **entries)
        return rows

    def ratio_of(self, experiment: str, before: str, after: str, cases: Sequence[str] = ()) -> list[float]:
        """Median of ``before`` over that of ``after`` in each case that has both."""
        own = {
            (row["case"], row["variant"]): row["us"]
            for row in self.rows
            if row["experiment"] == experiment and "us" in row
        }
        names = cases or list(dict.fromkeys(case for case, _ in own))
        return [
            own[case, before] / own[case, after] for case in names if (case, before) in own and (case, after) in own
        ]

    def best(self, experiment: str, case: str, column: str) -> float | None:
        """The greatest value of a column; None where it was not measured."""
        own = [row for row in self.rows if (row["experiment"], row["case"]) == (experiment, case)]
        return max((row[column] for row in own if column in row), default=None)


def _line(row: dict[str, Any]) -> str:
    head = f"{row['experiment']:<13} {row['case']:<20} {row['variant']:<38}"
    body = f"{row['us']:>13,.1f} us" if "us" in row else ""
    if "ratio" in row:
        body += f" {row['ratio']:>9.2f}x"
    return f"{head} {body} {row.get('note', '')}".rstrip()


def as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    """Outputs as a tuple of tensors on the CPU, in double precision."""
    parts = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    return tuple(torch.as_tensor(part).detach().double().cpu() for part in parts)


def difference(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Largest absolute difference; infinite for other shapes, and where one is NaN and the other is not."""
    if len(outputs) != len(reference):
        return math.inf
    worst = 0.0
    for one, other in zip(outputs, reference, strict=True):
        if one.shape != other.shape:
            return math.inf
        if not one.numel():
            continue
        apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs())
        worst = max(worst, float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    return worst


def in_turns(calls: Sequence[Callable[[], Any]], device: torch.device, quick: bool) -> list[np.ndarray]:
    """Seconds of the calls, one turn of each after the other, until each has had its share of the time."""
    budget, least, most = (0.04, 3, 15) if quick else (0.25, 5, 60)
    counts, total = [], 0.0
    for call in calls:
        seconds = _turn(call, 1, device)
        warm = 0 if seconds > budget else min(10, int(budget / 4 / max(seconds, 1e-7)))
        for _ in range(warm):
            call()
        if warm:
            seconds = _turn(call, 1, device)
        counts.append(max(1, min(MOST_CALLS, round(SHORTEST_TURN_S / max(seconds, 1e-7)))))
        total += counts[-1] * seconds
    turns = max(least, min(most, int(budget * len(calls) / max(total, 1e-7))))
    seconds = [[_turn(call, count, device) for call, count in zip(calls, counts, strict=True)] for _ in range(turns)]
    return list(np.array(seconds).reshape(turns, len(calls)).T)


def _turn(call: Callable[[], Any], count: int, device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) / count


def ratio(before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    """How many times as fast, turn by turn: median, and its 10th and 90th percentile."""
    low, middle, high = np.quantile(before / after, (0.1, 0.5, 0.9)).tolist()
    return {"ratio": middle, "ratio_p10": low, "ratio_p90": high, "spread": f"{low:.3g} to {high:.3g}"}


def judge(value: float | Sequence[float] | None, confirmed: float, partly: float) -> str:
    """Confirmed from the first bound on, partly from the second; of several values the least counts.

    Without a value it could not be measured here.
    """
    if isinstance(value, Sequence):
        value = min(value, default=None)
    if value is None or math.isnan(value):
        return NOT_HERE
    return CONFIRMED if value >= confirmed else PARTLY if value >= partly else NOT_REPRODUCED


def times_text(values: Sequence[float]) -> str:
    """``3.1x``, or ``1.2x to 3.1x``; empty without values."""
    if not values:
        return ""
    low, high = f"{min(values):.3g}x", f"{max(values):.3g}x"
    return low if low == high else f"{low} to {high}"


def gpu_reading(call: Callable[[], Any], sitting: Sitting) -> dict[str, float]:
    """Means of what NVML says at 10 Hz, but for memory, while a call is made again and again; empty without NVML."""
    for _ in range(3):
        call()
    synchronize(sitting.device)
    sampler = GpuSampler(sitting.device, interval=0.1).start()
    sampler.latest()
    end = time.perf_counter() + sitting.pick(0.5, 1.5)
    while time.perf_counter() < end:
        call()
        synchronize(sitting.device)
    reading = sampler.latest()
    sampler.close()
    return {name: value for name, value in reading.items() if not name.startswith("gpu/memory")}


def busy_share(call: Callable[[], Any], sitting: Sitting) -> float:
    """Share of the time of a call on CUDA in which a kernel or a copy of this process ran; others do not count.

    When they ran is what the profiler says of a call, which it makes longer: the time is that of calls without it.
    """
    calls = [_turn(call, 1, sitting.device) for _ in range(sitting.pick(2, 4))]
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        call()
        synchronize(sitting.device)
    events: Sequence[Any] = found.profiler.kineto_results.events() if found.profiler is not None else []
    on_device = [event for event in events if event.device_type() == DeviceType.CUDA]
    spans = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in on_device]
    return covered(spans) / 1e9 / float(np.median(calls[1:]))


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """How much lies within at least one of some spans, each from its first number to its second."""
    total = reached = 0
    for number, (begin, end) in enumerate(sorted(spans)):
        reached = begin if number == 0 else max(begin, reached)
        total += max(0, end - reached)
        reached = max(reached, end)
    return total
