"""The claims of active_dynamics, active learning of latent dynamics, on its transfers, its window and its cleanup."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from studies.active_dynamics.loss import divergences, masking, memory_events, variance
from studies.counts import counts
from studies.originals.rollout_window import Data, RollWindow, TurningWindow, copy_always, copy_by_need
from studies.originals.transfers import Cleanup, to_device, to_device_later
from studies.sitting import (
    CONFIRMED,
    NOT_HERE,
    NOT_REPRODUCED,
    PARTLY,
    Sitting,
    Variant,
    judge,
    times_text,
)
from torchrl_perf.bench import transfer
from torchrl_perf.replay import RecentWindow
from torchrl_perf.runtime import Upload, synchronize
from torchrl_perf.runtime.memory import MIB

CHANNELS, INPUTS, LENGTH = 20, 2, 20
LOCKED_LATER, UPLOAD, RESIDENT = "page-locked, non_blocking", "Upload", "resident"
ALWAYS, BY_NEED, IN_PLACE = "clone, detach", "clone by need", "copied in place"
ROLL, POOLED, TURNING, RING, GRAPH = (
    "roll, clone",
    "roll, clone by need, empty pool",
    "circular buffer as described",
    "package's ring",
    "package's ring, in a graph",
)
BY_NAME, BY_FLAG, UNTOUCHED = "name, cache emptied", "flag, cache emptied", "flag, cache kept"
CHECK_NAME, CHECK_FLAG = "name alone", "flag alone"


def less(saved: float) -> str:
    """``31% less``."""
    return f"{saved:.0%} less" if saved >= 0 else f"{-saved:.0%} more"


# -- transfers --------------------------------------------------------------------------------------------------------

FASTER, BESIDE_WORK, PEAK = (
    "non-blocking transfers are 25-40% faster",
    "transfers overlap with computation",
    "non-blocking transfers lower the peak of memory by 15-25%",
)


def transfers(sitting: Sitting) -> None:
    """A batch of 64 MiB to the device: as the original had it, from page-locked memory, staged, and not at all."""
    if not sitting.cuda:
        for claim in (FASTER, BESIDE_WORK, PEAK):
            sitting.verdict("transfers", claim, "", NOT_HERE, "no CUDA; what lies on the device is not copied at all")
        return
    mib = sitting.pick(4, 64)
    _transfer_case(sitting, mib)
    bench = transfer.Bench(sitting.device, (mib,), 10)
    calls, overlaps = transfer.copy_calls(int(mib * MIB / 4), sitting.device)["to device"], {}
    for name in transfer.COPIES["to device"][:-1]:
        fn, after = calls[name]
        row = bench.add("to device", name, fn, after=after)
        overlaps[name] = transfer.overlap(bench, fn, after, row["us"], first=False)
        found = {key: value for key, value in row.items() if key not in ("part", "variant")}
        found |= {"GB_s": mib * MIB / row["us"] * 1e-3, "overlap": overlaps[name]}
        note = f"{found['GB_s']:.1f} GB/s, {overlaps[name]:.0%} beside work, host held for {row['host_us']:,.0f} us"
        sitting.add("transfers", f"one tensor of {mib} MiB", name, **found, note=note)
    _transfer_verdicts(sitting, overlaps)


def _transfer_case(sitting: Sitting, mib: int) -> None:
    """A dict of three tensors; what arrives is compared with what was sent, to the bit."""
    device, rows = sitting.device, int(mib * MIB / 4 / (2 * CHANNELS + INPUTS))
    batch = {"obs": torch.randn(rows, CHANNELS), "next_obs": torch.randn(rows, CHANNELS)}
    batch["action"] = torch.randn(rows, INPUTS)
    locked = {name: value.pin_memory() for name, value in batch.items()}
    far = {name: value.to(device) for name, value in batch.items()}
    uploads = {name: Upload(device, nbytes=value.numel() * 4) for name, value in batch.items()}
    calls: dict[str, Callable[[], Data]] = {
        transfer.PAGEABLE: partial(to_device, batch, device),
        transfer.LATER: partial(to_device_later, batch, device),
        transfer.LOCKED: partial(to_device, locked, device),
        LOCKED_LATER: partial(to_device_later, locked, device),
        UPLOAD: lambda: {name: uploads[name].stage(value) for name, value in batch.items()},
        RESIDENT: lambda: far,
    }
    variants = [Variant(name, call, lambda call=call: list(call().values())) for name, call in calls.items()]
    sitting.compare("transfers", f"{mib} MiB", variants)


def _transfer_verdicts(sitting: Sitting, overlaps: dict[str, float]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in sitting.rows if row["experiment"] == "transfers"))[:1]
    gain = {
        name: [1 - 1 / found for found in sitting.ratio_of("transfers", transfer.PAGEABLE, name, cases)]
        for name in (transfer.LATER, LOCKED_LATER)
    }
    text = ", ".join(f"{less(values[0])} time {name}" for name, values in gain.items() if values)
    remark = (
        "from pageable memory the copy is staged, and the host waits; page-locked memory is what makes a difference"
    )
    sitting.verdict("transfers", FASTER, text, judge(gain[transfer.LATER], 0.25, 0.05), remark)
    staged = f"{transfer.LATER}, on a side stream {overlaps[transfer.LATER]:.0%} of the shorter; "
    staged += f"from page-locked memory {overlaps[transfer.BESIDE]:.0%}"
    sitting.verdict(
        "transfers", BESIDE_WORK, staged, judge(overlaps[transfer.LATER], transfer.MOSTLY, 0.1), "on a side stream"
    )
    peaks = [transfer.peak_memory(sitting.device, asynchronous) for asynchronous in (False, True)]
    sitting.add("transfers", "peak", transfer.LOCKED, peak_bytes=peaks[0], note=f"{peaks[0] / MIB:.1f} MiB")
    sitting.add("transfers", "peak", LOCKED_LATER, peak_bytes=peaks[1], note=f"{peaks[1] / MIB:.1f} MiB")
    saved = 1 - peaks[1] / peaks[0]
    sitting.verdict("transfers", PEAK, less(saved), judge(saved, 0.15, 0.05), "there is no mechanism by which it could")


# -- copies of a rollout ----------------------------------------------------------------------------------------------


def copies(sitting: Sitting) -> None:
    """Copies of a rollout whose entries ask for gradients, and do not."""
    sizes = sitting.pick((64,), (64, 1024))
    saved, cases = [], []
    for grad in (False, True):
        for batch in sizes:
            case = f"B={batch}, L={LENGTH}, {'with' if grad else 'without'} gradients"
            saved.append(_copies_case(sitting, case, batch, grad))
            cases.append(case)
    found = sitting.ratio_of("copy", ALWAYS, BY_NEED, cases)
    remark = "both forms make one copy of each entry, and neither records a graph that outlives it"
    sitting.verdict("copy", "rollout copies are 30-50% faster", times_text(found), judge(found, 1.43, 1.1), remark)
    after, ours = max(part[0] for part in saved), min(part[1] for part in saved)
    sitting.verdict("copy", "30-50% less memory of rollout copies", less(after), judge(after, 0.3, 0.05), remark)
    place = sitting.ratio_of("copy", ALWAYS, IN_PLACE, cases)
    text = f"{less(ours)} memory, {times_text(place)} as fast"
    sitting.verdict("copy", "a copy into what is kept saves it", text, judge(ours, 0.3, 0.05))


def _copies_case(sitting: Sitting, case: str, batch: int, grad: bool) -> tuple[float, float]:
    """The share of bytes saved by the original's form and by a copy in place."""
    data: Data = {
        "observation": torch.randn(batch, LENGTH, CHANNELS, device=sitting.device),
        "belief": torch.randn(batch, LENGTH, INPUTS, device=sitting.device),
    }
    for value in data.values():
        value.requires_grad_(grad)
    kept = {name: torch.empty_like(value) for name, value in data.items()}

    @torch.no_grad()
    def in_place() -> Data:
        torch._foreach_copy_(list(kept.values()), list(data.values()))
        return kept

    calls: dict[str, Callable[[], Data]] = {
        ALWAYS: partial(copy_always, data),
        BY_NEED: partial(copy_by_need, data),
        IN_PLACE: in_place,
    }
    variants = [
        Variant(name, call, lambda call=call: [v.clone() for v in call().values()]) for name, call in calls.items()
    ]
    rows = sitting.compare("copy", case, variants)
    size = {name: counts(call, sitting.device)["bytes"] for name, call in calls.items()}
    for name, row in rows.items():
        row["bytes"] = size[name]
    return 1 - size[BY_NEED] / size[ALWAYS], 1 - size[IN_PLACE] / size[ALWAYS]


# -- the window, and its pool -----------------------------------------------------------------------------------------


def window(sitting: Sitting) -> None:
    """A step is added to a window of 20 and the window is read, each step anew; time and allocations."""
    sizes = sitting.pick((1, 64), (1, 64, 1024), (1, 64, 1024, 8192))
    for batch in sizes:
        _window_case(sitting, batch)
    remark = "the pool is made and never filled: each step still moves the whole window"
    cases = [f"B={batch}" for batch in sizes]
    after = sitting.ratio_of("window", ROLL, POOLED, cases)
    sitting.verdict("window", "rollout operations are faster", times_text(after), judge(after, 1.43, 1.1), remark)
    ours = sitting.ratio_of("window", ROLL, GRAPH if sitting.cuda else RING, cases)
    alone = sitting.ratio_of("window", ROLL, RING, [f"{case}, add alone" for case in cases])
    text = f"{times_text(ours)} where each step is read, {times_text(alone)} without reading"
    sitting.verdict("window", "the package's ring is faster than the roll", text, judge(ours, 1.1, 0.9))
    steps = sitting.pick(50, 1000)
    step, found = numbered(7, 64, sitting.device), {}
    for name, form in forms(64, sitting.device).items():
        found[name] = allocations(partial(form.turn, form.made(step)), steps, sitting.device)
    for name, (count, size) in found.items():
        note = f"{count / steps:.1f} allocations and {size / steps:,.0f} bytes a step"
        entries = {"allocations": count, "allocated_bytes": size}
        sitting.add("window", f"B=64, {steps} steps", name, **entries, note=note)
    gone = {name: 1 - count / found[ROLL][0] for name, (count, _) in found.items()}
    sitting.verdict(
        "window",
        "pooling removes 80-90% of the allocations",
        f"{gone[POOLED]:.0%} as written, {gone[TURNING]:.0%} as described, {gone[RING]:.0%} by the package's ring",
        judge(gone[POOLED], 0.8, 0.05),
        remark,
    )
    saved = 1 - found[RING][1] / found[ROLL][1]
    sitting.verdict("window", "the package's ring allocates 80-90% less", less(saved), judge(saved, 0.8, 0.3))


def numbered(step: int, batch: int, device: torch.device) -> Data:
    """A step whose entries say which one it is."""
    row = torch.arange(batch, device=device, dtype=torch.float32).unsqueeze(-1) / 16384 + step
    return {"observation": row + torch.zeros(CHANNELS, device=device), "action": -row.expand(-1, INPUTS).clone()}


class Form(NamedTuple):
    """A way to keep the window.

    Attributes:
        made: a step as the window takes it.
        add: takes the newest step.
        read: the window ``[B, L, ...]``.
    """

    made: Callable[[Data], Any]
    add: Callable[[Any], None]
    read: Callable[[], Data]

    def turn(self, step: Any) -> Data:
        """Adds a step, and reads."""
        self.add(step)
        return self.read()


def forms(batch: int, device: torch.device) -> dict[str, Form]:
    """The forms by name, each with a window of its own."""
    example = numbered(0, batch, device)
    before, after, turning = RollWindow(LENGTH, example), RollWindow(LENGTH, example), TurningWindow(LENGTH, example)
    ring = RecentWindow(LENGTH, TensorDict(example, [batch]))

    def view() -> Data:
        found = ring.view()
        return {name: found[name] for name in example}

    return {
        ROLL: Form(dict, before.add, lambda: copy_always(before.data)),
        POOLED: Form(dict, after.add, lambda: copy_by_need(after.data)),
        TURNING: Form(dict, turning.add, turning.ordered),
        RING: Form(partial(TensorDict, batch_size=[batch]), ring.append, view),
    }


def contents(form: Form, batch: int, device: torch.device) -> list[Tensor]:
    """What a fresh window holds after 45 steps."""
    for step in range(45):
        form.add(form.made(numbered(step, batch, device)))
    return [value.clone() for value in form.read().values()]


def _window_case(sitting: Sitting, batch: int) -> None:
    device, timed = sitting.device, forms(batch, sitting.device)
    wanted = {name: partial(contents, form, batch, device) for name, form in forms(batch, device).items()}
    steps = {name: form.made(numbered(7, batch, device)) for name, form in timed.items()}
    variants = [Variant(name, partial(form.turn, steps[name]), wanted[name]) for name, form in timed.items()]
    graph = sitting.graph(_ring_alone(batch, device)) if sitting.cuda else None
    if graph is not None:
        variants.append(Variant(GRAPH, graph, compared=False, note="the same functions, recorded"))
    sitting.compare("window", f"B={batch}", variants)
    if graph is not None:
        graph.release()
    note = "windows are compared where they are read"
    adds = [Variant(name, partial(form.add, steps[name]), compared=False, note=note) for name, form in timed.items()]
    sitting.compare("window", f"B={batch}, add alone", adds)


def _ring_alone(batch: int, device: torch.device) -> Callable[[], Tensor]:
    step = TensorDict(numbered(7, batch, device), [batch])
    ring = RecentWindow(LENGTH, step)

    def turn() -> Tensor:
        ring.append(step)
        return ring.view()["observation"]

    return turn


def allocations(call: Callable[[], Any], count: int, device: torch.device) -> tuple[int, int]:
    """Blocks of memory that ``count`` calls take, and their bytes: of the allocator on CUDA, else of the profiler."""
    call()
    if device.type == "cuda":
        synchronize(device)
        keys = ("allocation.all.allocated", "allocated_bytes.all.allocated")
        before = [torch.cuda.memory_stats(device)[key] for key in keys]
        for _ in range(count):
            call()
        after = [torch.cuda.memory_stats(device)[key] for key in keys]
        return after[0] - before[0], after[1] - before[1]
    # acc_events: without it torch 2.11 warns of cycles, of which there is one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        for _ in range(count):
            call()
    sizes = [size for _, size in memory_events(found) if size > 0]
    return len(sizes), sum(sizes)


# -- cleanup ----------------------------------------------------------------------------------------------------------


def cleanup(sitting: Sitting) -> None:
    """The question whether the device is CUDA, by its name or by a flag, and what follows from the answer."""
    device = sitting.device
    variants = []
    for name, flag in ((CHECK_NAME, False), (CHECK_FLAG, True)):
        check = Cleanup(device, flag=flag, empties=False)
        variants.append(Variant(name, check, lambda check=check: torch.tensor([check()])))
    rows = sitting.compare("cleanup", "the question", variants)
    found = sitting.ratio_of("cleanup", CHECK_NAME, CHECK_FLAG, ["the question"])
    gained = (rows[CHECK_NAME]["us"] - rows[CHECK_FLAG]["us"]) if CHECK_FLAG in rows else math.nan
    text = f"{times_text(found)}, {gained * 1e3:.0f} ns a step"
    sitting.verdict("cleanup", "the cached check is 10-15% faster", text, judge(found, 1.1, 1.02))
    claims = ("cleanup as a whole is 10-15% faster", "what the check costs is what a cleanup costs")
    if not sitting.cuda:
        for claim in claims:
            sitting.verdict("cleanup", claim, "", NOT_HERE, "no CUDA, whose cache the original empties at each step")
        return
    whole = _cleanup_case(sitting)
    gain = whole[BY_NAME] / whole[BY_FLAG]
    sitting.verdict("cleanup", claims[0], f"{gain:.3g}x", judge(gain, 1.1, 1.02), "the cache is emptied as before")
    share = 1 - whole[UNTOUCHED] / whole[BY_FLAG]
    text = f"emptying the cache is {share:.0%} of a step of {whole[BY_FLAG]:,.0f} us, the check {gained:.2f} us"
    word = CONFIRMED if share < 0.5 else PARTLY if share < 0.9 else NOT_REPRODUCED
    sitting.verdict("cleanup", claims[1], text, word)


def _cleanup_case(sitting: Sitting) -> dict[str, float]:
    """A step that takes and frees 16 blocks of a MiB, cleaned up behind; microseconds by variant."""
    device, variants = sitting.device, []
    ways = {BY_NAME: (False, True), BY_FLAG: (True, True), UNTOUCHED: (True, False)}
    for name, (flag, empties) in ways.items():
        clean_up = Cleanup(device, flag=flag, empties=empties)

        def step(clean_up: Cleanup = clean_up) -> Tensor:
            blocks = [torch.ones(MIB // 4, device=device) for _ in range(16)]
            total = blocks[-1][:8] + blocks[0][:8]
            del blocks
            clean_up()
            return total

        variants.append(Variant(name, step))
    rows = sitting.compare("cleanup", "a step of 16 MiB", variants)
    return {name: row["us"] for name, row in rows.items()}


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {
    "transfers": transfers,
    "copy": copies,
    "window": window,
    "kl": divergences,
    "masking": masking,
    "variance": variance,
    "cleanup": cleanup,
}
"""Experiments by name."""
