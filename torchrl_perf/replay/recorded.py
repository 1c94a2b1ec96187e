"""Calls of a buffer as CUDA graphs: samples into memory that nobody holds, what samplers learn, and priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from torchrl_perf.replay.layout import Skeleton
from torchrl_perf.replay.prioritized import DevicePrioritizedSampler
from torchrl_perf.replay.random import DeviceRandomSampler
from torchrl_perf.replay.slices import DeviceSliceSampler
from torchrl_perf.replay.writer import DeviceWriter
from torchrl_perf.runtime.self_capture import HeldReplays, InPlaceReplays
from torchrl_perf.runtime.upstream.tensordicts import leaves_of

if TYPE_CHECKING:
    from torchrl_perf.replay.storage import DeviceStorage

__all__ = ["Parts", "RecordedCalls"]

RECORDED = (DeviceRandomSampler, DevicePrioritizedSampler, DeviceSliceSampler)
"""Samplers whose draws the host has no part in; an epoch's order and position are the host's, and a subclass may be."""

Info = dict[NestedKey, Any]


class Parts(NamedTuple):
    """The parts of a buffer, which may be replaced between calls."""

    storage: DeviceStorage
    sampler: Any
    writer: Any
    generator: torch.Generator | None

    def are_steady(self) -> bool:
        """Whether the host has no part in a draw now, but for its launches."""
        return (
            self.storage.initialized
            and type(self.sampler) in RECORDED
            and type(self.writer) is DeviceWriter
            and self.sampler.is_steady(self.storage)
        )


class _Form:
    """How a sample and its info are made of tensors: nothing is looked up again.

    Attributes:
        tensors: the rows' in the order of the skeleton ``rows``, then those of the info.
        batch_size: of the rows.
        rows: the rows as they are stored.
        whole: the rows with the info among their entries.
        info: keys of the info, and numbers of their tensors.
    """

    def __init__(self, rows: TensorDict, info: Info) -> None:
        found = leaves_of(rows)
        keys = [(key,) if isinstance(key, str) else key for key in found]
        self.tensors, self.batch_size = [*found.values(), *info.values()], rows.batch_size
        self.rows = Skeleton(keys)
        self.info = [(key, len(keys) + number) for number, key in enumerate(info)]
        places = {key: number for number, key in enumerate(keys)}
        places |= {(key,) if isinstance(key, str) else tuple(key): number for key, number in self.info}
        self.whole = Skeleton(list(places), list(places.values()))


class RecordedCalls:
    """The graphs of one buffer. Each call says what it did, or that the caller shall do it plainly."""

    def __init__(self) -> None:
        self._samples = HeldReplays("DeviceReplayBuffer.sample")
        self._lessons = InPlaceReplays("DeviceReplayBuffer.extend")
        self._updates = InPlaceReplays("DeviceReplayBuffer.update_priority")

    @property
    def samples(self) -> int:
        """Graphs of samples that there are."""
        return self._samples.recorded

    def sample(
        self, parts: Parts, batch_size: int, draw: Callable[[int], tuple[TensorDict, Info]], *, whole: bool = True
    ) -> tuple[TensorDict, Info] | None:
        """Rows and their info, as ``draw(batch_size)`` gives them; None where that is to be called.

        Args:
            parts: of the buffer.
            batch_size: rows B.
            draw: what is recorded.
            whole: whether the info is among the entries of the rows.
        """
        storage, sampler, writer, generator = parts
        if not (self._samples.serves(storage.device) and parts.are_steady()):
            return None
        ring, device = storage.ring, storage.rows.device

        def again() -> tuple[list[Tensor], _Form]:
            with ring.unchanged():
                form = _Form(*draw(batch_size))
            tensors, form.tensors = form.tensors, []
            return tensors, form

        key = (batch_size, ring, sampler, generator, writer.tracks_generations)
        place = self._samples.place(again, key, device, () if generator is None else (generator,))
        if place is None:
            return None
        tensors, form = place.again(), place.note
        info = {key: tensors[number] for key, number in form.info}
        # TorchRL's buffers pass only the index on to a storage, or a sampler; it says where it is from
        index = ring.vouch(info["index"])
        generation = info.get("index_generation")
        if generation is not None:
            index.generation = generation
        return (form.whole if whole else form.rows).build(tensors, form.batch_size, device), info

    def mark_update(self, parts: Parts, index: int | Tensor) -> bool:
        """Tells the sampler of new rows, if that is more than the caller's plain call; whether it did."""
        storage, sampler = parts.storage, parts.sampler
        if type(sampler) not in RECORDED or not sampler.learns_rows or not isinstance(index, Tensor):
            return False
        if not (self._lessons.serves(index.device) and index.numel() and parts.are_steady()):
            return False

        def learn(given: list[Tensor]) -> None:
            sampler.mark_update(given[0], storage=storage)

        key = storage.ring, sampler, getattr(sampler, "eps", None)
        self._lessons(learn, [index], key, device=index.device, while_recording=storage.ring.unchanged)
        return True

    def update_priority(self, parts: Parts, index: Any, priority: Any, generation: Any) -> bool:
        """Sets priorities, if they are tensors on the device; whether it did."""
        storage, sampler = parts.storage, parts.sampler
        if not (
            self._updates.serves(storage.device) and parts.are_steady() and getattr(sampler, "eps", None) is not None
        ):
            return False
        generation = getattr(index, "generation", None) if generation is None else generation
        given, device = (index, priority, generation), storage.rows.device
        if not all(isinstance(each, Tensor) and each.device == device for each in given if each is not None):
            return False

        def update(given: list[Any]) -> None:
            options = {} if given[2] is None else {"generation": given[2]}
            sampler.update_priority(given[0], given[1], storage=storage, **options)

        key = (storage.ring, sampler, sampler.eps)
        self._updates(update, given, key, device=device, while_recording=storage.ring.unchanged)
        return True
