"""What fits together in replay: samplers, writers, storages and buffers of TorchRL and ours, and why where not."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchrl.data import (
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from torchrl_perf.replay import (
    DevicePrioritizedSampler,
    DeviceRandomSampler,
    DeviceReplayBuffer,
    DeviceSamplerWithoutReplacement,
    DeviceSliceSampler,
    DeviceStorage,
    DeviceWriter,
)

CAPACITY, SLICE = 24, 3

SAMPLERS: dict[str, Callable[[], Any]] = {
    "RandomSampler": RandomSampler,
    "SamplerWithoutReplacement": SamplerWithoutReplacement,
    "ConsumingSampler": ConsumingSampler,
    "StalenessAwareSampler": lambda: StalenessAwareSampler(max_staleness=1000),
    "SliceSampler(traj_key)": lambda: SliceSampler(slice_len=SLICE, traj_key="episode"),
    "SliceSampler(end_key)": lambda: SliceSampler(slice_len=SLICE, end_key=("next", "done"), cache_values=True),
    "SliceSampler(strict_length=False)": lambda: SliceSampler(slice_len=SLICE, traj_key="episode", strict_length=False),
    "SliceSamplerWithoutReplacement": lambda: SliceSamplerWithoutReplacement(slice_len=SLICE, traj_key="episode"),
    "SliceSampler(fragmented)": lambda: SliceSampler(slice_len=SLICE, traj_key="episode", fragmented=True),
    "StreamingSliceSampler": lambda: StreamingSliceSampler(slice_len=SLICE, traj_key="episode"),
    "DeviceRandomSampler": DeviceRandomSampler,
    "DeviceSamplerWithoutReplacement": DeviceSamplerWithoutReplacement,
    "DevicePrioritizedSampler": DevicePrioritizedSampler,
    "DeviceSliceSampler": lambda: DeviceSliceSampler(SLICE),
    "DeviceSliceSampler(alpha)": lambda: DeviceSliceSampler(SLICE, alpha=0.6),
}
WRITERS: dict[str, Callable[[], Any]] = {
    "DeviceWriter": DeviceWriter,
    "RoundRobinWriter": RoundRobinWriter,
    "TensorDictRoundRobinWriter": TensorDictRoundRobinWriter,
    "TensorDictMaxValueWriter": lambda: TensorDictMaxValueWriter(rank_key="rank"),
    "ImmutableDatasetWriter": ImmutableDatasetWriter,
}
STORAGES: dict[str, Callable[[Any], Any]] = {
    "LazyTensorStorage": lambda _: LazyTensorStorage(CAPACITY),
    "LazyTensorStorage(ndim=2)": lambda _: LazyTensorStorage(CAPACITY, ndim=2),
    "LazyMemmapStorage": lambda folder: LazyMemmapStorage(CAPACITY, scratch_dir=str(folder)),
    "ListStorage": lambda _: ListStorage(CAPACITY),
    "LazyStackStorage": lambda _: LazyStackStorage(CAPACITY),
}
BUFFERS: dict[str, type[ReplayBuffer]] = {
    "ReplayBuffer": ReplayBuffer,
    "TensorDictReplayBuffer": TensorDictReplayBuffer,
    "DeviceReplayBuffer": DeviceReplayBuffer,
}

NO_ORDER = "the writer keeps the best rows, in no order of time, and slices are rows that follow each other"
NO_FREE_SLOTS = "TorchRL's ConsumingSampler needs a writer that writes at given slots: one of the round-robin writers"
OUR_STORAGE = "our samplers draw from counters on the device, which TorchRL's storages do not have: use DeviceStorage"
OUR_WRITER = "our writer appends to the ring of a DeviceStorage: use TorchRL's writer with TorchRL's storages"
NO_EXTENSION = "TorchRL's PrioritizedSampler needs its C++ extension, which no wheel for this torch brings: use ours"


@dataclass(frozen=True)
class Cell:
    """One combination: the storage, sampler, writer and buffer by name, and why it is refused, None where it works."""

    storage: str
    sampler: str
    writer: str
    buffer: str
    refused: str | None = None

    @property
    def name(self) -> str:
        """The combination in words."""
        return f"{self.buffer}({self.storage}, {self.sampler}, {self.writer})"


def _reason(sampler: str, writer: str) -> str | None:
    if sampler == "ConsumingSampler" and "RoundRobin" not in writer:
        return NO_FREE_SLOTS
    if "Slice" in sampler and writer == "TensorDictMaxValueWriter":
        return NO_ORDER
    return None


def cells_on_our_storage() -> list[Cell]:
    """Every sampler and writer on a ``DeviceStorage``, in each buffer."""
    return [
        Cell(DeviceStorage.__name__, sampler, writer, buffer, _reason(sampler, writer))
        for buffer, sampler, writer in itertools.product(BUFFERS, SAMPLERS, WRITERS)
    ]


def cells_on_storages_of_torchrl() -> list[Cell]:
    """Our samplers and our buffer on TorchRL's storages: refused, all of them."""
    ours = [name for name in SAMPLERS if name.startswith("Device")]
    cells = [
        Cell(storage, sampler, "TensorDictRoundRobinWriter", buffer, OUR_STORAGE)
        for storage, sampler, buffer in itertools.product(STORAGES, ours, BUFFERS)
    ]
    return cells + [Cell(storage, "RandomSampler", "DeviceWriter", "ReplayBuffer", OUR_WRITER) for storage in STORAGES]


CELLS = cells_on_our_storage() + cells_on_storages_of_torchrl()
"""All combinations, for the tests and for the page of what fits together."""
