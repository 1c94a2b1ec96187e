"""The claims of options_market on what is kept of its steps, and in what memory."""

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.data import LazyTensorStorage

from studies.counts import counts
from studies.options_market.agents import BATCH, ENVS, NUM_OPTIONS, OBSERVATION
from studies.originals.dict_replay import ArrayReplay, DequeReplay, Row
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
from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.runtime.memory import MIB, heap_bytes

DEQUE, OWN, ARRAYS = "deque of dicts", "deque of dicts, copies", "arrays in a ring"
HOST, DEVICE = "LazyTensorStorage, host", "LazyTensorStorage, device"
PACKAGE, COMPACT = "package", "package, compact"


def episode(steps: int) -> list[list[Row]]:
    """Transitions of 16 envs, step by step, each of which begins where the one before ended."""
    draw = np.random.default_rng(0)
    seen = draw.standard_normal((steps + 1, ENVS, OBSERVATION), np.float32)
    return [
        [
            {
                "observation": seen[step, env],
                "action": draw.uniform(-1, 1, 1).astype(np.float32),
                "active_option": int(draw.integers(NUM_OPTIONS)),
                "next_observation": seen[step + 1, env],
                "reward": draw.standard_normal(1, np.float32),
                "terminated": np.array([False]),
            }
            for env in range(ENVS)
        ]
        for step in range(steps)
    ]


def batch_of(rows: list[Row], device: torch.device) -> TensorDict:
    """The transitions of a step as the package stores them, ``[16, 1]``."""
    columns = {name: torch.from_numpy(np.array([row[name] for row in rows])).to(device) for name in rows[0]}
    flags = columns["terminated"]
    following = {"observation": columns["next_observation"], "reward": columns["reward"]}
    following |= {"terminated": flags, "done": flags, "truncated": flags}
    own = {name: columns[name] for name in ("observation", "action", "active_option")}
    return TensorDict({**own, "next": TensorDict(following, [ENVS])}, [ENVS], device=device).unsqueeze(1)


def columns_of(td: TensorDictBase) -> dict[str, Tensor]:
    """Rows of the package as the original's replays give them."""
    after = cast("TensorDictBase", td["next"])
    return {
        "observation": td["observation"],
        "action": td["action"],
        "active_option": td["active_option"],
        "next_observation": after["observation"],
        "reward": after["reward"],
        "terminated": after["terminated"],
    }


# -- replay -----------------------------------------------------------------------------------------------------------


class Storages:
    """The designs of a replay of one size, all filled with the same steps.

    Args:
        steps: steps of 16 envs, as many as there is room for.
        device: of those that live there.
    """

    def __init__(self, steps: list[list[Row]], device: torch.device) -> None:
        self.capacity, self.device, self.count = ENVS * len(steps), device, 0
        self.deque, self.arrays = DequeReplay(self.capacity), ArrayReplay(self.capacity, steps[0][0])
        self.lazy = {
            name: LazyTensorStorage(self.capacity, device=place)
            for name, place in ((HOST, torch.device("cpu")), (DEVICE, device))
        }
        self.package = make_replay_buffer(self.capacity, batch_size=BATCH, device=device)
        self.rows = steps[-1]
        self.batch = batch_of(self.rows, device)
        for rows in steps:
            self.deque.add(rows)
            self.arrays.add(rows)
            batch = batch_of(rows, device)
            for name in self.lazy:
                self.extend(name, batch)
            self.count += ENVS
            self.package.extend(batch)

    def extend(self, name: str, batch: TensorDictBase) -> None:
        """Writes a step into a ``LazyTensorStorage`` as a ring; on the host, the batch is copied there."""
        storage = self.lazy[name]
        place = torch.arange(self.count, self.count + ENVS) % self.capacity
        storage.set(place, batch[:, 0].to(storage.device))

    def add_calls(self) -> dict[str, Callable[[], Any]]:
        """Writes a step; rows come from where each design has them: arrays on the host, or tensors on the device."""
        return {
            DEQUE: partial(self.deque.add, self.rows),
            ARRAYS: partial(self.arrays.add, self.rows),
            HOST: partial(self.extend, HOST, self.batch),
            DEVICE: partial(self.extend, DEVICE, self.batch),
            PACKAGE: partial(self.package.extend, self.batch),
        }

    def lazy_sample(self, name: str, count: int) -> TensorDictBase:
        """Random rows of a ``LazyTensorStorage``, brought to the device."""
        storage = self.lazy[name]
        return storage.get(torch.randint(0, self.capacity, (count,))).to(self.device)

    def sample_calls(self, count: int) -> dict[str, Callable[[], Any]]:
        """Takes random rows to the device."""
        return {
            DEQUE: partial(self.deque.sample, count, self.device),
            ARRAYS: partial(self.arrays.sample, count, self.device),
            HOST: partial(self.lazy_sample, HOST, count),
            DEVICE: partial(self.lazy_sample, DEVICE, count),
            PACKAGE: partial(self.package.sample, count),
        }

    def held(self, name: str) -> list[Tensor]:
        """What a design holds, all entries, row by row from the oldest; ``[rows, numbers]``."""
        places = np.arange(self.capacity)
        if name in (DEQUE, ARRAYS):
            replay = self.deque if name == DEQUE else self.arrays
            columns = replay.take(places.tolist(), torch.device("cpu"))
        else:
            stored = self.package[:] if name == PACKAGE else self.lazy[name].get(torch.from_numpy(places))
            columns = columns_of(cast("TensorDictBase", stored))
        return [columns[key].reshape(self.capacity, -1).double().cpu() for key in sorted(columns)]


def replay(sitting: Sitting) -> None:
    """A step of 16 envs into a replay, and a batch out of it, by design."""
    steps = episode(sitting.pick(32, 256, 512))
    made = Storages(steps, sitting.device)
    held = {name: partial(made.held, name) for name in made.add_calls()}
    adds = [Variant(name, call, held[name]) for name, call in made.add_calls().items()]
    sitting.compare("replay", f"add {ENVS}", adds)
    for size in sitting.pick((BATCH,), (BATCH, 1024), (BATCH, 4096)):
        calls = made.sample_calls(size)
        takes = [Variant(name, call, compared=False, note="rows are compared above") for name, call in calls.items()]
        found = sitting.compare("replay", f"sample {size:,}", takes)
        for name, row in found.items():
            row["waits"] = counts(calls[name], sitting.device).get("waits")
    cases = [f"add {ENVS}", f"sample {BATCH}"]
    after, ours = (
        [next(iter(sitting.ratio_of("replay", DEQUE, name, [case])), math.nan) for case in cases]
        for name in (ARRAYS, PACKAGE)
    )
    sitting.verdict(
        "replay",
        "replay buffer 3x: arrays in place of a deque",
        f"{after[0]:.3g}x to add, {after[1]:.3g}x to sample",
        CONFIRMED if min(after) >= 3.0 else PARTLY if max(after) >= 1.1 else NOT_REPRODUCED,
        "a deque keeps references, and adds nothing faster than that" if after[0] < 1 else "",
    )
    sitting.verdict(
        "replay",
        "replay buffer 3x: the package's, to sample",
        f"{ours[1]:.3g}x; {ours[0]:.3g}x to add",
        judge(ours[1], 3.0, 1.1),
        "to add, a step of 16 rows costs it more than a list does" if ours[0] < 1 else "",
    )


# -- memory -----------------------------------------------------------------------------------------------------------


def memory(sitting: Sitting) -> None:
    """Memory of the same transitions by design of the replay, and of a step of the optimiser's gradients."""
    steps = sitting.pick(64, 256, 512)
    names = (DEQUE, OWN, ARRAYS, DEVICE, PACKAGE, COMPACT)
    gc.collect()
    gc.freeze()  # so that a collection looks at what is made here alone
    try:
        sizes = {name: _held_bytes(name, steps, sitting.device) for name in names}
    finally:
        gc.unfreeze()
    for name, (host, card) in sizes.items():
        note = f"{host / MIB:.1f} MiB on the host" + (f", {card / MIB:.1f} MiB on the card" if sitting.cuda else "")
        sitting.add("memory", f"{steps * ENVS:,} rows", name, host_bytes=host, card_bytes=card, note=note)
    total = {name: sum(pair) for name, pair in sizes.items()}
    known = heap_bytes() is not None
    for name, claim in (
        (ARRAYS, "memory -40%: arrays in place of a deque of dicts"),
        (PACKAGE, "memory -40%: the package's replay"),
        (COMPACT, "memory -40%: each observation stored once"),
    ):
        saved, of_copies = (1 - total[name] / max(total[before], 1) for before in (DEQUE, OWN))
        text = f"{-saved:+.0%}; {-of_copies:+.0%} where the deque holds copies" if known else ""
        remark = (
            "a deque that shares the array which ends a step and begins the next holds it once; rings hold it twice"
        )
        word = judge(saved, 0.4, 0.05) if known else NOT_HERE
        sitting.verdict("memory", claim, text, word, remark if name != COMPACT else "")
    _zero_grad(sitting)


def _held_bytes(name: str, steps: int, device: torch.device) -> tuple[int, int]:
    """What a replay takes of the host's heap and of the card, filled with steps made one by one."""
    gc.collect()
    card = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    host = heap_bytes() or 0
    kept = _fill(name, steps, device)
    gc.collect()
    found = (heap_bytes() or 0) - host
    card = torch.cuda.memory_allocated(device) - card if device.type == "cuda" else 0
    del kept
    return found, card


def _fill(name: str, steps: int, device: torch.device) -> Any:
    """A replay of one design, filled; each step's observations are those that follow the step before."""
    capacity, rows = steps * ENVS, episode(1)[0]
    replays: dict[str, Callable[[], Any]] = {
        DEQUE: lambda: DequeReplay(capacity),
        OWN: lambda: DequeReplay(capacity),
        ARRAYS: lambda: ArrayReplay(capacity, rows[0]),
        DEVICE: lambda: LazyTensorStorage(capacity, device=device),
        PACKAGE: lambda: make_replay_buffer(capacity, batch_size=BATCH, device=device),
        COMPACT: lambda: make_replay_buffer(capacity, batch_size=BATCH, device=device, compact=True),
    }
    made = replays[name]()
    seen = [row["observation"] for row in rows]
    for step in range(steps):
        after = [old + 1 for old in seen]
        pairs = zip(rows, seen, after, strict=True)
        rows = [{**_copied(row), "observation": old, "next_observation": new} for row, old, new in pairs]
        seen = after
        if name in (DEQUE, OWN, ARRAYS):
            made.add([_copied(row) for row in rows] if name == OWN else rows)
        elif name == DEVICE:
            made.set(torch.arange(step * ENVS, (step + 1) * ENVS), batch_of(rows, device)[:, 0])
        else:
            made.extend(batch_of(rows, device))
    return made


def _copied(row: Row) -> Row:
    return {key: np.copy(value) if isinstance(value, np.ndarray) else value for key, value in row.items()}


def _zero_grad(sitting: Sitting) -> None:
    """``zero_grad`` as it is, and with ``set_to_none`` said and denied, in front of a backward pass."""
    torch.manual_seed(0)
    layers = [nn.Linear(OBSERVATION, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2)]
    net = nn.Sequential(*layers).to(sitting.device)
    adam, rows = torch.optim.Adam(net.parameters()), torch.randn(64, OBSERVATION, device=sitting.device)

    def step(**options: Any) -> None:
        adam.zero_grad(**options)
        net(rows).square().mean().backward()

    def gradients(**options: Any) -> list[Tensor]:
        step(**options)
        return [cast("Tensor", parameter.grad).clone() for parameter in net.parameters()]

    forms = {"zero_grad()": {}, "set_to_none=True": {"set_to_none": True}, "set_to_none=False": {"set_to_none": False}}
    variants = [
        Variant(name, partial(step, **options), partial(gradients, **options)) for name, options in forms.items()
    ]
    sitting.compare("memory", "gradients, B=64", variants, tolerance=1e-6)
    found = sitting.ratio_of("memory", "zero_grad()", "set_to_none=True", ["gradients, B=64"])
    denied = sitting.ratio_of("memory", "set_to_none=False", "set_to_none=True", ["gradients, B=64"])
    sitting.verdict(
        "memory",
        "zero_grad(set_to_none=True) is faster than zero_grad()",
        f"{times_text(found)}; {times_text(denied)} than set_to_none=False",
        judge(found, 1.1, 1.05),
        "it is what zero_grad() has done since PyTorch 2.0",
    )


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {"replay": replay, "memory": memory}
"""Experiments by name."""
