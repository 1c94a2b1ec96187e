"""What the host does for one call, counted: Python functions entered and operations handed to torch.

On a GPU the host takes longer than the kernels, so these counts are the time of a call that is not captured. They are
counted, not timed, and so are the same on every machine. A ceiling is raised only together with the reason.
"""

import gc
import sys
from collections.abc import Callable
from typing import Any

import emulated_graph
import pytest
import torch
from recording_device import emulated_graphs
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from torchrl_perf.replay import (
    DevicePrioritizedSampler,
    DeviceRandomSampler,
    DeviceStorage,
    DeviceWriter,
    make_replay_buffer,
)
from torchrl_perf.replay import rows as rows_module
from torchrl_perf.runtime.self_capture import held, in_place


def batch(*shape: int) -> TensorDict:
    """Transitions of six entries."""
    done = torch.zeros(*shape, 1, dtype=torch.bool)
    following = {"observation": torch.randn(*shape, 3), "reward": torch.randn(*shape, 1), "done": done}
    following["terminated"] = done.clone()
    data = {"observation": torch.randn(*shape, 3), "action": torch.randn(*shape, 2), "next": following}
    return TensorDict(data, shape)


class Operations(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def cost(call: Callable[[], Any]) -> tuple[int, int]:
    """Python functions entered by a call (itself left out), and operations of torch, once everything is warm."""
    for _ in range(3):
        call()
    entered = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal entered
        entered += event == "call"

    before = sys.getprofile()
    gc.disable()  # what libraries have called by a collection is none of the call's
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    with Operations() as operations:
        call()
    return entered - 1, operations.count


def full(*, streams: int = 0, **options: Any) -> Any:
    """A buffer of ours that is half full."""
    buffer = make_replay_buffer(1024, batch_size=32, **options)
    buffer.extend(batch(streams, 512 // streams) if streams else batch(512))
    return buffer


def samples(**options: Any) -> Callable[[], Any]:
    return full(**options).sample


def extends(*, streams: int = 0, **options: Any) -> Callable[[], Any]:
    buffer, data = full(streams=streams, **options), batch(streams, 8) if streams else batch(32)
    return lambda: buffer.extend(data)


def updates(**options: Any) -> Callable[[], Any]:
    buffer = full(**options)
    sample = buffer.sample()
    index, priority = sample["index"], torch.rand(32)
    return lambda: buffer.update_priority(index, priority)


def shell(kind: type, sampler: Any) -> Any:
    """TorchRL's buffer with our parts, half full."""
    buffer = kind(storage=DeviceStorage(1024), sampler=sampler, writer=DeviceWriter(), batch_size=32)
    buffer.extend(batch(512))
    return buffer


def theirs(kind: type) -> Any:
    """TorchRL's buffer with TorchRL's parts."""
    buffer = kind(storage=LazyTensorStorage(1024), sampler=RandomSampler(), batch_size=32)
    buffer.extend(batch(512))
    return buffer


SLICES = {"sampler": "slice", "slice_len": 4}

CEILINGS: dict[str, tuple[Callable[[], Callable[[], Any]], int, int]] = {
    "sample": (samples, 45, 16),
    "extend": (extends, 70, 11),
    "extend of streams": (lambda: extends(streams=4), 70, 17),
    "sample of epochs": (lambda: samples(sampler="epoch"), 45, 13),
    "sample by priority": (lambda: samples(sampler="prioritized"), 56, 63),
    "update of priorities": (lambda: updates(sampler="prioritized"), 30, 68),
    "extend by priority": (lambda: extends(sampler="prioritized"), 95, 58),
    "sample of slices": (lambda: samples(streams=4, **SLICES), 85, 84),
    "sample of slices by priority": (lambda: samples(streams=4, alpha=0.6, **SLICES), 98, 115),
    "n-step sample": (lambda: samples(streams=4, n_step=3), 65, 66),
    "compact sample": (lambda: samples(streams=4, compact=True), 65, 33),
    "sample, ReplayBuffer": (lambda: shell(ReplayBuffer, DeviceRandomSampler()).sample, 52, 16),
    "sample, TensorDictReplayBuffer": (lambda: shell(TensorDictReplayBuffer, DeviceRandomSampler()).sample, 115, 16),
    "sample by priority, ReplayBuffer": (lambda: shell(ReplayBuffer, DevicePrioritizedSampler()).sample, 56, 63),
}
"""What is done, and how many Python functions and operations of torch it may take."""


@pytest.mark.parametrize("name", list(CEILINGS))
def test_ceilings(name: str):
    make, functions, operations = CEILINGS[name]
    entered, dispatched = cost(make())
    assert entered <= functions, f"{name}: {entered} Python functions, at most {functions}"
    assert dispatched <= operations, f"{name}: {dispatched} operations, at most {operations}"


RECORDED: dict[str, tuple[Callable[[], Callable[[], Any]], int, int]] = {
    "sample": (samples, 45, 8),
    "sample by priority": (lambda: samples(sampler="prioritized"), 48, 10),
    "update of priorities": (lambda: updates(sampler="prioritized"), 38, 2),
    "extend by priority": (lambda: extends(sampler="prioritized"), 122, 6),
    "sample of slices": (lambda: samples(streams=4, **SLICES), 60, 10),
    "sample of slices by priority": (lambda: samples(streams=4, alpha=0.6, **SLICES), 62, 12),
    "n-step sample": (lambda: samples(streams=4, n_step=3), 50, 10),
    "compact sample": (lambda: samples(streams=4, compact=True), 47, 8),
    "compact extend": (lambda: extends(streams=4, compact=True), 115, 6),
    "compact extend by priority": (lambda: extends(streams=4, compact=True, sampler="prioritized"), 150, 8),
}
"""The same for calls that are graphs. Operations are copies of inputs, one a dtype, and views; besides, one replay."""


@pytest.mark.parametrize("name", list(RECORDED))
def test_ceilings_of_recorded_calls(name: str, monkeypatch: pytest.MonkeyPatch):
    replays = []

    def note(graph: Any) -> None:
        replays.append(graph)

    for module in (held, in_place):
        monkeypatch.setattr(module, "may_record", lambda: True)  # although the operations are counted
    with emulated_graphs(monkeypatch):
        make, functions, operations = RECORDED[name]
        call = make()
        for _ in range(5):
            call()
        # only what is around it counts
        monkeypatch.setattr(emulated_graph.EmulatedGraph, "replay", note)
        entered, dispatched = cost(call)
    assert len(replays) == 5 * (2 if "extend by priority" in name else 1)  # of rows, and of priorities
    assert entered <= functions, f"{name}: {entered} Python functions, at most {functions}"
    assert dispatched <= operations, f"{name}: {dispatched} operations, at most {operations}"


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer], ids=lambda kind: kind.__name__)
def test_our_parts_ask_less_of_the_host_than_torchrls(kind: type):
    ours, others, data = shell(kind, DeviceRandomSampler()), theirs(kind), batch(32)
    assert cost(ours.sample)[0] < 0.6 * cost(others.sample)[0]
    assert cost(lambda: ours.extend(data))[0] < 0.5 * cost(lambda: others.extend(data))[0]


def test_the_counts_do_not_grow_with_the_batch():
    buffer, slices, data = full(), full(streams=4, **SLICES), batch(500)
    assert cost(lambda: buffer.sample(500))[1] <= CEILINGS["sample"][2]
    assert cost(lambda: buffer.extend(data))[1] <= CEILINGS["extend"][2]
    assert cost(lambda: slices.sample(400))[1] <= CEILINGS["sample of slices"][2]


class Kernels:
    """The kernels of rows in torch operations, which notes what is launched: what CUDA's path asks of them."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def launch_gather(self, source: Any, index: Any, out: Any) -> None:
        self.launched.append("gather")
        out.copy_(source.index_select(0, index))

    def launch_draw_and_gather(
        self, source: Any, uniform: Any, cursor: Any, length: Any, steps: int, streams: int
    ) -> tuple[Any, Any]:
        self.launched.append("draw and gather")
        row = (uniform * length * streams).to(torch.int64)
        index = (row + (cursor - length) * streams) % (steps * streams)
        return index, source[index]

    def launch_write(
        self, ring: Any, counters: Any, fields: Any, offsets: Any, sizes: Any, shape: tuple[int, int], index: Any
    ) -> None:
        self.launched.append("write")
        rows, streams = shape
        slots = (counters[0] * streams + torch.arange(rows)) % ring.shape[0]
        for field, offset, size in zip(fields, offsets, sizes, strict=True):
            ring[slots, offset : offset + size] = field.contiguous().view(rows, -1).view(torch.uint8)
        index.view(-1).copy_(slots)
        counters[0] += rows // streams
        counters[1] = min(int(counters[1]) + rows // streams, ring.shape[0] // streams)


@pytest.mark.parametrize("streams", [0, 3])
def test_kernels_are_launched_once(monkeypatch: pytest.MonkeyPatch, streams: int):
    """The path of CUDA on a CPU: one launch a write and one a sample, and the rows, slots and counters of the other."""
    received, kernels = [], Kernels()
    for answer in (None, kernels):
        monkeypatch.setattr(rows_module, "row_kernels", lambda _, answer=answer: answer)
        torch.manual_seed(0)
        buffer = make_replay_buffer(60, batch_size=16)
        found = []
        for count in (7, 1, 20, 13):
            data = batch(streams, count) if streams else batch(count)
            found += [buffer.extend(data.clone()), buffer.sample(), buffer.storage.ring.counters.clone()]
            assert buffer.storage.ring.read() == tuple(buffer.storage.ring.counters[:2].tolist())
        received.append(found)
    assert kernels.launched == ["write", "draw and gather"] * 4
    for expected, given in zip(*received, strict=True):
        assert (expected == given).all()


def test_a_batch_with_another_layout_is_refused_before_the_launch(monkeypatch: pytest.MonkeyPatch):
    kernels = Kernels()
    monkeypatch.setattr(rows_module, "row_kernels", lambda _: kernels)
    buffer = make_replay_buffer(60, batch_size=16)
    buffer.extend(batch(7))
    for wrong in (batch(7).double(), batch(7).exclude("action"), batch(7).set("more", torch.zeros(7))):
        with pytest.raises(ValueError, match="another layout"):
            buffer.extend(wrong)
    assert kernels.launched == ["write"]
    assert len(buffer) == 7
