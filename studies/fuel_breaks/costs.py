"""The claims of fuel_breaks on what each memory rule costs by itself: cleaning up, trimming, copying, the threshold."""

import json
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

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
from torchrl_perf.bench import memory
from torchrl_perf.bench.memory import Bench, BenchMemory
from torchrl_perf.bench.memory_loops import (
    AGGRESSIVE,
    CAPACITY,
    HISTORY,
    NUM_ENVS,
    OPTIMISED,
    TRAIN_EVERY,
    Setting,
)
from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape
from torchrl_perf.replay import BoundedHistory, make_replay_buffer
from torchrl_perf.runtime import MemoryGuard
from torchrl_perf.runtime.memory import MIB, MemoryReading, read_cuda
from torchrl_perf.systems.fuel_breaks import FuelBreaksConfig

COPIES, DETACHED, RING = "a copy on the CPU each", "detached each", "all at once into the device's ring"
RECORDED = f"{RING}, in a graph"
TRIM, TOLERANT, OURS = "trim at each overflow", "trim at 1.2", "ring"
UNITS = ("us", "ms", "ns")


class SittingBench(Bench):
    """A sitting of ``bench memory`` whose rows are those of an experiment.

    Args:
        sitting: takes the rows.
        experiment: their name.
        options: sizes.
    """

    def __init__(self, sitting: Sitting, experiment: str, options: BenchMemory) -> None:
        super().__init__(options, sitting.device)
        self.sitting, self.experiment = sitting, experiment

    def add(self, part: str, variant: str, **values: Any) -> dict[str, Any]:
        """Notes a row; a time is in its own unit, for it has no percentiles."""
        found = {f"time_{unit}": values[unit] for unit in UNITS if unit in values}
        note = ", ".join(f"{value:,.4g} {unit}" for unit, value in values.items())
        row = {"part": part, "variant": variant, **values}
        self.sheet.rows.append(row)
        self.sitting.add(self.experiment, part, variant, note=note, **found)
        return row


# -- cleaning up ------------------------------------------------------------------------------------------------------


def cleanup(sitting: Sitting) -> None:
    """A garbage collection by the number of objects, an emptied cache by what was cached; how often is too often."""
    options = BenchMemory(
        objects=sitting.pick((0,), (0, 300_000, 1_000_000)),
        cached=sitting.pick((0, 256), (0, 256, 2_048)),
        intervals=sitting.pick((100, 0), (1, 10, 50, 100, 200, 2_000, 0)),
    )
    bench = SittingBench(sitting, "cleanup", options)
    memory.cleanup_costs(bench)
    memory.frequencies(bench)
    memory.guard_costs(bench)
    add = partial(sitting.verdict, "cleanup")
    rows = {row["variant"]: row for row in bench.sheet.rows}
    heap, frozen = [row for row in bench.sheet.rows if row["part"] == "gc.collect"], rows["after gc.freeze"]
    text = ", ".join(f"{row['ms']:.0f} ms with {row['variant']}" for row in heap if row is not frozen)
    never = rows["never"]["us"]
    word = CONFIRMED if min(row["ms"] * 1e3 for row in heap if row is not frozen) > 10 * never else NOT_REPRODUCED
    remark = f"{frozen['ms']:.2g} ms once gc.freeze() has set aside what lives as long as the run"
    add("gc.collect() is expensive", f"{text}; a training step {never / 1e3:.2g} ms", word, remark)
    shares = {name: row["us"] / never for name, row in rows.items() if row["part"] == "cleanup"}
    text = ", ".join(f"{name} {share:.2f}x" for name, share in shares.items())
    frequent = shares.get("every 100 steps", 1.0)
    add("cleanup every 100 training steps is too frequent", text, judge(frequent, 1.3, 1.05), "time of a training step")
    rare = shares.get("every 2,000 steps")
    remark = "" if rare is not None else "2,000 steps are measured without --quick"
    value = None if rare is None else -rare
    add(
        "every 2,000 costs nothing to speak of",
        "" if rare is None else f"{rare:.2f}x",
        judge(value, -1.05, -1.2),
        remark,
    )
    emptied = [row["ms"] for row in bench.sheet.rows if row["part"] == "empty_cache" and "ms" in row]
    text = f"{emptied[0]:.2g} ms with nothing cached, {emptied[-1]:.2g} ms with the most" if emptied else ""
    word = judge(emptied[-1] * 1e3 / never if emptied else None, 1.0, 0.1)
    add("empty_cache() is expensive", text, word, "" if emptied else "a CPU has no cache to empty")
    cost = rows["after_iteration"]["us"] + frozen["ms"] * 1e3 / memory.GC_INTERVAL
    text = f"{cost:.2g} us an iteration"
    add("minimal overhead: the package's guard", text, judge(-cost / never, -0.001, -0.01), "of a training step")


# -- histories --------------------------------------------------------------------------------------------------------


def trims(sitting: Sitting) -> None:
    """Appending to a list with and without tolerance, and to a ring; the slice of a deque."""
    bench = SittingBench(sitting, "trims", BenchMemory())
    memory.trims(bench)
    plain, tolerant, ring = (bench.value(name, "ns") for name in (TRIM, TOLERANT, OURS))
    add = partial(sitting.verdict, "trims")
    text = f"{plain:,.0f} ns an append become {tolerant:,.0f}; a ring {ring:,.0f}"
    add("trimming at 1.2 is cheaper than at each overflow", text, judge(plain / tolerant, 2.0, 1.1), "20% more memory")
    text = f"{tolerant / ring:.2f}x"
    add("a ring needs no trim and is no slower", text, judge(tolerant / ring, 1.0, 0.7))
    _slices(sitting)


def _slices(sitting: Sitting) -> None:
    """The newest 1,000 of 2,000 numbers: of a deque, of its list, of the package's history."""
    values = [float(number) for number in range(HISTORY)]
    plain, ours = deque(values, maxlen=HISTORY), BoundedHistory(values, maxlen=HISTORY)
    want = values[-1000:]
    try:
        crashes = plain[-1000:] is None  # pyright: ignore[reportArgumentType, reportCallIssue]
    except TypeError:
        crashes = True
    whole = list(plain)
    found = {
        "list(deque)[-1000:]": whole[-1000:] == want,
        "BoundedHistory[-1000:]": ours[-1000:] == want,
    }
    for name, good in found.items():
        sitting.add("trims", "the newest 1,000", name, ok=good, note="as of a list" if good else "other numbers")
    remark = f"its fix list(deque) has no slice: {len(whole):,} numbers instead of the newest 1,000"
    text = "TypeError" if crashes else "no error"
    word = CONFIRMED if crashes else NOT_REPRODUCED
    sitting.verdict(
        "trims", "deque[-1000:] crashes, a list of it works", text, word if whole == want else PARTLY, remark
    )


# -- what is remembered -----------------------------------------------------------------------------------------------


def remember(sitting: Sitting) -> None:
    """Eight transitions into the memory: copied to the CPU one by one, detached one by one, written at once."""
    for size in sitting.pick((10,), (20, 50)):
        _remember_case(sitting, size)
    add = partial(sitting.verdict, "remember")
    found = sitting.ratio_of("remember", COPIES, DETACHED)
    word = judge(found, 2.0, 1.1) if sitting.cuda else NOT_HERE
    remark = "a raster of the env has no graph: to detach it changes nothing but its wrapper"
    text = times_text(found) if sitting.cuda else ""
    add("to detach and stay on the GPU halves the cost of remember()", text, word, remark)
    ours = sitting.ratio_of("remember", DETACHED, RECORDED if sitting.cuda else RING)
    remark = "detaching copies nothing; the ring copies, and keeps what a list holds in one piece for each env"
    add("a ring on the device remembers no slower than a list", times_text(ours), judge(ours, 1.0, 0.5), remark)


def _remember_case(sitting: Sitting, size: int) -> None:
    device = sitting.device
    env = FuelBreaks(NUM_ENVS, landscape=Landscape.fractal(0, size), budget=8, device=device, seed=0)
    td = env.rand_action(env.reset())
    after = env.step(td)
    names = ("observation", "action", ("next", "reward"), ("next", "observation"), ("next", "done"))
    columns = [after.get(name) for name in names]
    kept: deque[tuple[Tensor, ...]] = deque(maxlen=CAPACITY)

    def one_by_one(change: Callable[[Tensor], Tensor]) -> None:
        for n in range(NUM_ENVS):
            kept.append(tuple(change(column[n]) for column in columns))

    def listed(change: Callable[[Tensor], Tensor]) -> Callable[[], list[Tensor]]:
        def newest() -> list[Tensor]:
            one_by_one(change)
            rows = [kept[-NUM_ENVS + n] for n in range(NUM_ENVS)]
            return [torch.stack([row[column] for row in rows]) for column in range(len(names))]

        return newest

    ring, batch = make_replay_buffer(CAPACITY, device=device), as_rows(after)

    def held() -> list[Tensor]:
        rows = make_replay_buffer(CAPACITY, device=device)
        rows.extend(batch)
        mine = rows[:NUM_ENVS]
        before, behind = (
            env.planes(part["breaks"], part["remaining"], part["landscape_id"]) for part in (mine, mine["next"])
        )
        return [before, mine["action"], mine["next", "reward"], behind, mine["next", "done"]]

    copied: Callable[[Tensor], Tensor] = lambda value: value.cpu().detach()  # noqa: E731

    def write() -> None:
        ring.extend(batch)

    graph = sitting.graph(write) if sitting.cuda else None
    variants = [
        Variant(COPIES, partial(one_by_one, copied), listed(copied)),
        Variant(DETACHED, partial(one_by_one, Tensor.detach), listed(Tensor.detach)),
        Variant(RING, write, held, note="breaks and the landscape's number instead of planes"),
    ]
    if graph is not None:
        variants.append(Variant(RECORDED, graph, compared=False, note="the same function, recorded"))
    sitting.compare("remember", f"{size} x {size}, 8 rows", variants)
    if graph is not None:
        graph.release()


def as_rows(stepped: Any) -> TensorDict:
    """What the package stores of a step ``[N]``, as ``[N, 1]`` rows of a replay buffer."""
    state = ("breaks", "remaining", "landscape_id")
    following = {name: stepped["next", name] for name in (*state, "reward", "done", "terminated")}
    rows = {name: stepped[name] for name in (*state, "action")}
    return TensorDict({**rows, "next": TensorDict(following, stepped.batch_size)}, stepped.batch_size).unsqueeze(1)


# -- the threshold ----------------------------------------------------------------------------------------------------


READINGS = {
    "calm": (0.30, 0.40),
    "tensors, nothing cached": (0.85, 0.86),
    "cached blocks, few tensors": (0.30, 0.90),
}
"""Shares of the device that are in use, and taken from the driver."""
NEEDED = ("cached blocks, few tensors",)
"""Where there is something to give back."""


def threshold(sitting: Sitting) -> None:
    """When a cache is emptied: above 80% in use, as the original has it, or where much lies unused."""
    total, checks = 100 * 1024 * MIB, 3_000
    for name, (allocated, reserved) in READINGS.items():
        for rule in ("allocated", "unused"):
            reading = MemoryReading(int(allocated * total), int(reserved * total), total)
            guard = MemoryGuard("cpu", rule=rule, gc_interval=0, read=lambda r=reading: r, empty=int, check_interval=1)
            for _ in range(checks):
                guard.after_iteration()
            wanted = name in NEEDED if rule == "unused" else allocated > 0.8
            note = f"emptied {guard.cleanups} times in {checks:,} looks"
            sitting.add("threshold", name, rule, ok=bool(guard.cleanups) == wanted, cleanups=guard.cleanups, note=note)
    add = partial(sitting.verdict, "threshold")
    remark = (
        "it never looks at what is cached: full of tensors it empties nothing, full of cached blocks it does not run"
    )
    add("GPU memory is only cleared when >80% full", "above 80% in use alone", CONFIRMED, remark)
    if not sitting.cuda:
        add("emptying the cache frees memory", "", NOT_HERE, "a CPU has no cache to empty")
        return
    freed = {name: _given_back(sitting.device, keep) for name, keep in (("in use", True), ("cached", False))}
    for name, count in freed.items():
        sitting.add("threshold", "512 MiB", name, freed_MiB=count, note=f"{count:.0f} MiB given back")
    text = f"{freed['in use']:.0f} MiB of 512 in use, {freed['cached']:.0f} of 512 cached"
    add("emptying the cache frees memory", text, PARTLY if freed["cached"] > freed["in use"] else NOT_REPRODUCED)


def _given_back(device: torch.device, keep: bool) -> float:
    """MiB that ``empty_cache`` gives back of a block of 512 that is in use, or was."""
    torch.cuda.empty_cache()
    block: Tensor | None = torch.empty(512 * MIB, dtype=torch.uint8, device=device)
    if not keep:
        block = None
    before = read_cuda(device).reserved
    torch.cuda.empty_cache()
    after = read_cuda(device).reserved
    del block
    return (before - after) / MIB


# -- the configuration ------------------------------------------------------------------------------------------------


SETTINGS = {
    "experience_buffer_size": ("capacity", 2_000),
    "cleanup_frequency": ("gc_interval", 2_000),
    "checkpoint_frequency": ("checkpoint_interval", 50),
    "memory_cleanup_frequency": (None, 50),
    "max_history_size": (None, 2_000),
}
"""The original's optimised configuration, and the package's setting of the same; None where it needs none."""
STEPS, TEST_EPISODES, COLLECTION = 50, 100, 5_000
"""Steps of the original's episodes, episodes of the test that it proposes, training steps between its collections."""


def configuration(sitting: Sitting) -> None:
    """What a file of settings reaches, and how often each rule comes due in a test of 100 episodes."""
    reached = []
    for name, (own, value) in SETTINGS.items():
        note = f"{own} = {value:,}" if own else "no setting: a ring has its bound, a rule looks at what is unused"
        entries: dict[str, Any] = {}
        if own:
            config = FuelBreaksConfig.from_dict(json.loads(json.dumps({own: value, "minibatch_size": 32})))
            reached.append(getattr(config, own) == value)
            entries["ok"] = reached[-1]
        sitting.add("configuration", name, "package", note=note, **entries)
    add = partial(sitting.verdict, "configuration")
    remark = "its agent is built with a history of 1,000 and a cleanup each 100 steps, whatever its file says"
    text = f"{sum(reached)} of {len(SETTINGS)} are settings of the package, the others it does not need"
    add("all parameters are controllable via the file", text, PARTLY, remark)
    for setting in (AGGRESSIVE, OPTIMISED):
        for envs in (1, NUM_ENVS):
            due = due_in_test(setting, envs)
            note = ", ".join(f"{count} by {rule}" for rule, count in due.items())
            sitting.add("configuration", f"{TEST_EPISODES} episodes, {envs} envs", setting.name, note=note, **due)
    one, eight = (due_in_test(OPTIMISED, envs) for envs in (1, NUM_ENVS))
    text = f"by training steps {one['training steps']} cleanups and {one['collections']} collections of one env, "
    text += f"{eight['training steps']} and {eight['collections']} of {NUM_ENVS} in parallel"
    word = CONFIRMED if min(one.values()) > 0 else PARTLY if min(eight.values()) > 0 else NOT_REPRODUCED
    add("a test of 100 episodes shows the rules at work", text, word, "an episode has 50 steps, every fourth trains")


def due_in_test(setting: Setting, envs: int) -> dict[str, int]:
    """How often each rule of a setting comes due in 100 episodes of each env."""
    steps = TEST_EPISODES * STEPS * envs
    trained = steps // TRAIN_EVERY
    return {
        "steps": steps // setting.steps,
        "training steps": trained // setting.train_steps,
        "episodes": TEST_EPISODES // setting.episodes,
        "collections": trained // COLLECTION if setting.conditional else 0,
    }


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {
    "cleanup": cleanup,
    "trims": trims,
    "remember": remember,
    "threshold": threshold,
    "configuration": configuration,
}
"""Experiments by name."""
