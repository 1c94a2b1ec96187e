"""The ring's counters: where the next row goes and which rows are valid, on the device and mirrored on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_perf.functional.priority_tree import uniform_rows
from torchrl_perf.kernels import tree_kernels


class Ring:
    """Counters of a ring of ``steps`` time rows, each of which holds one row of ``num_streams`` streams (envs).

    Slot number of a row: ``time_slot * num_streams + stream`` with ``time_slot = absolute_time % steps``. The valid
    rows are those of the newest ``length`` time rows.

    Attributes:
        steps: number of time rows.
        num_streams: number of streams N.
        capacity: number of slots, ``steps * num_streams``.
        counters: int64, ``[3]``, on the device: cursor, length and a zero.
        cursor: int64, 0-d, on the device: time rows written since the start; the next goes to ``cursor % steps``.
        length: int64, 0-d, on the device: number of valid time rows, at most ``steps``.
        host_cursor: mirror of ``cursor`` on the host, advanced only by Python calls.
        host_length: mirror of ``length`` on the host, likewise.
        ordered: whether the rows lie in the order of time. False once rows were written to slots chosen by a TorchRL
            writer (``TensorDictMaxValueWriter``, ``ConsumingSampler``); ages and generations then only tell which slots
            are filled.
        recorded: True once the mirrors can no longer be trusted, because a write was recorded in a CUDA graph (whose
            replays the host does not see) or because rows were forgotten on the device (see
            :class:`~torchrl_perf.replay.DeviceStorage`, ``compact``). Sizes are then read from the device.
        recording: whether a graph is being recorded whose replays the mirrors will count.
    """

    def __init__(self, steps: int, num_streams: int, device: torch.device) -> None:
        self.steps, self.num_streams, self.device = steps, num_streams, device
        self.capacity = steps * num_streams
        # Side by side, so that one addition counts both; then what a kernel that counts needs, zero between its calls.
        self.counters = torch.zeros(3, dtype=torch.int64, device=device)
        self.cursor, self.length = self.counters[0], self.counters[1]
        self._both = self.counters[:2]
        self.host_cursor = self.host_length = 0
        self.recorded, self.ordered, self.recording = False, True, False
        self.may_forget = False  # whether rows may have been forgotten on the device, so that filled slots have gaps
        self._offsets: dict[tuple[int, bool], Tensor] = {}

    def slots(self, time_rows: int, flat: bool = False) -> Tensor:
        """Slots of the next ``time_rows`` time rows.

        Args:
            time_rows: number of time rows T; more than ``steps`` give slots more than once.
            flat: whether to leave the dimension of the streams out (for one stream).

        Returns:
            int64 ``[N, T]`` in time-major memory, or ``[T]`` with ``flat``.
        """
        offsets = self._offsets.get((time_rows, flat))
        if offsets is None:
            offsets = torch.arange(time_rows * self.num_streams, device=self.device)
            if not flat:
                offsets = offsets.view(time_rows, self.num_streams).t()
            # A tensor made inside a graph has no value until the graph is replayed, so it must not be cached.
            if not capturing():
                self._offsets[time_rows, flat] = offsets
        if self.device.type == "cpu" and not self.recorded and not torch.compiler.is_compiling():
            first = self.host_cursor % self.steps  # known to the host: nothing to compute where the ring does not wrap
            slots = torch.add(offsets, first * self.num_streams)
            return slots if first + time_rows <= self.steps else slots.remainder_(self.capacity)
        return torch.add(offsets, self.cursor, alpha=self.num_streams).remainder_(self.capacity)

    def age(self, slot: Tensor) -> Tensor:
        """Number of time rows written after each slot's present row: 0 for the newest. int64, shaped like ``slot``."""
        return self._since(slot).remainder_(self.steps)

    def generation(self, slot: Tensor) -> Tensor:
        """How often each slot was written before its present content; int64, shaped like ``slot``, -1 if never.

        Closed form in the cursor: nothing is stored per slot. A slot that is written again has another generation.
        """
        return self._since(slot).div_(self.steps, rounding_mode="floor")

    def age_and_generation(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`age` and :meth:`generation` at once."""
        since = self._since(slot)
        return since.remainder(self.steps), since.div_(self.steps, rounding_mode="floor")

    def _since(self, slot: Tensor) -> Tensor:
        """Time rows written since the ring's first round reached each slot."""
        time_slot = slot.div(self.num_streams, rounding_mode="floor") if self.num_streams > 1 else slot
        return self.cursor - 1 - time_slot

    def advance(self, time_rows: int) -> None:
        """Count ``time_rows`` time rows as written. No host wait; may be recorded in a CUDA graph."""
        is_known = not self.recorded and not capturing() and not torch.compiler.is_compiling()
        if is_known and self.host_length == self.steps:
            self.cursor.add_(time_rows)
        else:
            self._both.add_(time_rows)
            self.length.clamp_(max=self.steps)
        self.count_on_host(time_rows)

    def count_on_host(self, time_rows: int) -> None:
        """Bring the mirrors up to date with a write that counts itself on the device."""
        if capturing():  # nothing is written now, and the host does not see the replays
            self.recorded = True
        else:
            self.host_cursor += time_rows
            self.host_length = min(self.host_length + time_rows, self.steps)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context to record a graph in: counters are read on the device alone, and the mirrors stay as they are.

        Whoever replays the graph brings the mirrors up to date, see :meth:`count_on_host`.
        """
        before = self.recorded, self.host_cursor, self.host_length, self.may_forget
        self.recorded = self.recording = True
        try:
            yield
        finally:
            self.recorded, self.host_cursor, self.host_length, self.may_forget = before
            self.recording = False

    def fill(self, rows: int) -> None:
        """Record that the slots below ``rows`` hold rows in no known order of time; for a ring of one stream."""
        self.ordered = False
        more = min(rows, self.steps) - self.host_length
        if more > 0:
            self.advance(more)

    def forget_until(self, time: Tensor) -> None:
        """Forget the rows up to an absolute time (int64, 0-d; -1 for none). No host wait."""
        torch.minimum(self.length, self.cursor - 1 - time, out=self.length)

    def read(self) -> tuple[int, int]:
        """``(cursor, length)`` as Python numbers: the mirrors, or a read of the device if those are unreliable."""
        if self.recorded:
            self.host_cursor, self.host_length = int(self.cursor), int(self.length)
        return self.host_cursor, self.host_length

    def runs(self) -> list[tuple[int, int]]:
        """The valid slots as runs ``(first, last + 1)`` in ascending order: none, one, or two."""
        cursor, length = self.read()
        N, first = self.num_streams, (cursor - length) % self.steps
        if length == 0:
            return []
        if length == self.steps:
            return [(0, self.capacity)]
        if first + length <= self.steps:
            return [(first * N, (first + length) * N)]
        return [(0, (first + length - self.steps) * N), (first * N, self.capacity)]

    def contains(self, slot: int | Tensor) -> bool | Tensor:
        """Whether a slot holds a valid row: a bool for an int (negative: from the end), else a bool tensor."""
        if isinstance(slot, Tensor):
            return (slot >= 0) & (slot < self.capacity) & (self.age(slot) < self.length)
        if slot < 0:
            return -slot <= self.read()[1] * self.num_streams
        return any(first <= slot < last for first, last in self.runs())

    def valid_slots(self) -> Tensor:
        """Slots of the valid rows in ascending order, int64 ``[len]`` on the device."""
        runs = [torch.arange(first, last, device=self.device) for first, last in self.runs()]
        return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64, device=self.device)

    def last_slot(self) -> int | None:
        """Slot of the newest row's last stream, None if nothing was written."""
        cursor = self.read()[0] * self.num_streams
        return (cursor - 1) % self.capacity if cursor else None

    def random_slots(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """``count`` valid slots drawn uniformly with replacement, int64 ``[count]``, without a host wait."""
        return self.vouch(self.slots_at(self.uniform(count, generator)))

    def uniform(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Random numbers to draw slots with, ``[count]`` float64: each row of a large ring can be told apart."""
        return torch.rand(count, dtype=torch.float64, device=self.device, generator=generator)

    def slots_at(self, uniform: Tensor, newer: int = 0) -> Tensor:
        """Slots drawn uniformly among the rows that at least ``newer`` rows of their stream follow.

        Args:
            uniform: ``[B]`` float64 in [0, 1).
            newer: number of rows; where a stream holds no more than that, the rows so far back are drawn none the less.

        Returns:
            int64 ``[B]``.
        """
        if self.device.type != "cpu" or self.recorded or torch.compiler.is_compiling():
            length = (self.length - newer).clamp_min_(1) if newer else self.length
            return slots_among(
                uniform, self.cursor - newer if newer else self.cursor, length, self.steps, self.num_streams
            )
        # The host knows the counters: a third of the operations.
        length = max(self.host_length - newer, 1)
        slots = (uniform * (length * self.num_streams)).to(torch.int64).clamp_(max=length * self.num_streams - 1)
        first = (self.host_cursor - newer - length) % self.steps
        return slots.add_(first * self.num_streams).remainder_(self.capacity) if first else slots

    def vouch(self, slots: Tensor) -> Tensor:
        """Mark slots as drawn from this ring, so that reading them needs no check; returns the same tensor."""
        slots.drawn_from = self  # pyright: ignore[reportAttributeAccessIssue]  # TorchRL's buffers pass nothing else on
        return slots

    def vouches_for(self, slots: Any) -> bool:
        """Whether slots were drawn from this ring."""
        return getattr(slots, "drawn_from", None) is self

    def clear(self) -> None:
        """Forget every row.

        The cursor goes on at the beginning of the round after the next, so that the next row has slot 0 and no
        generation from before comes back.
        """
        started = self.cursor > 0
        rounds = (self.cursor + self.steps - 1).div(self.steps, rounding_mode="floor") + 1
        self.cursor.copy_(torch.where(started, rounds * self.steps, 0))
        self.length.zero_()
        self.host_length, self.ordered = 0, True
        if self.host_cursor:
            self.host_cursor = (-(-self.host_cursor // self.steps) + 1) * self.steps

    def state_dict(self) -> dict[str, int]:
        """Counters as plain numbers."""
        cursor, length = self.read()
        counters = {"cursor": cursor, "length": length, "recorded": self.recorded, "ordered": self.ordered}
        return {"steps": self.steps, "num_streams": self.num_streams, **counters}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores :meth:`state_dict`, in place: recorded graphs stay valid."""
        self.host_cursor, self.host_length = state["cursor"], state["length"]
        # It switches samplers to another way of drawing, so a resumed run needs it too; a graph of this ring keeps it.
        self.recorded |= bool(state["recorded"])
        self.ordered = bool(state.get("ordered", True))
        self.cursor.fill_(self.host_cursor)
        self.length.fill_(self.host_length)


def slots_among(uniform: Tensor, cursor: Tensor, length: Tensor, steps: int, num_streams: int) -> Tensor:
    """:func:`~torchrl_perf.functional.priority_tree.uniform_rows`, in one launch on CUDA."""
    kernels = tree_kernels(cursor)
    draw = uniform_rows if kernels is None else kernels.launch_uniform
    return draw(uniform, cursor, length, steps, num_streams)


def capturing() -> bool:
    """Whether the current CUDA stream records a graph; asking makes no CUDA context."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def slots_of(index: Any, ring: Ring) -> Tensor:
    """Slots that an index means: int (negative: from the end of the valid rows), slice of the valid rows, or slots.

    Indices known to the host are checked: ints, lists, ranges, arrays and tensors on a CPU. A tensor on another device
    is not, since that would be a host wait; its negative indices count from the end of a ring that holds its rows from
    slot 0 on.

    Returns:
        int64 on the ring's device, 0-d for an int.

    Raises:
        IndexError: for a row that is not filled, where the host knows the index.
        TypeError: for an index of another kind, such as a mask.
    """
    if isinstance(index, tuple) and len(index) == 1:  # from TorchRL's slice samplers
        index = index[0]
    if isinstance(index, slice):
        valid = ring.valid_slots()
        chosen = range(valid.shape[0])[index]
        return valid[torch.arange(chosen.start, chosen.stop, chosen.step, device=ring.device)]
    if isinstance(index, (int, np.integer)) and not isinstance(index, (bool, np.bool_)):
        index = int(index)
        if not ring.contains(index):
            raise IndexError(_not_filled(index, ring))
        return ring.valid_slots()[index] if index < 0 else torch.tensor(index, device=ring.device)
    slots = index if isinstance(index, Tensor) else torch.as_tensor(np.asarray(index))
    if slots.dtype == torch.bool or (slots.is_floating_point() and slots.numel()):
        raise TypeError(
            f"DeviceStorage: expected slots (int64), received an index of dtype {slots.dtype}. Remedy: slots as extend "
            "and sample return them."
        )
    if slots.is_cuda and ring.may_forget and not capturing():
        slots = slots.to("cpu")  # the only wait: TorchRL's samplers assume rows 0 to len - 1, which may be gone
    if slots.is_cuda:
        return torch.where(slots < 0, slots + ring.length * ring.num_streams, slots).to(torch.int64)
    return _checked(slots.to(torch.int64), ring).to(ring.device)


def _checked(slots: Tensor, ring: Ring) -> Tensor:
    """Slots on a CPU, the negative ones counted from the end of the valid rows.

    Raises:
        IndexError: for one that is not filled.
    """
    # Through NumPy rather than a torch operation, which an audit would count as a wait; tensors on a GPU do not come
    # here.
    numbers = np.from_dlpack(slots)
    if not numbers.size or capturing():  # while a graph is recorded the counters cannot be read
        return slots
    lowest, highest, runs = int(numbers.min()), int(numbers.max()), ring.runs()
    if len(runs) == 1 and runs[0][0] <= lowest and highest < runs[0][1]:
        return slots
    count = sum(last - first for first, last in runs)
    valid = np.concatenate([np.arange(first, last) for first, last in runs] or [np.zeros(0, np.int64)])
    filled = (numbers < 0) & (numbers >= -count) | np.isin(numbers, valid)
    if not filled.all():
        raise IndexError(_not_filled(int(numbers[~filled].flat[0]), ring))
    return torch.as_tensor(np.where(numbers < 0, valid[np.where(numbers < 0, numbers, -1)], numbers))


def _not_filled(index: int, ring: Ring) -> str:
    count = ring.read()[1] * ring.num_streams
    return (
        f"DeviceStorage: expected a row that is filled, received {index}: row {index} is not among the {count} valid "
        "rows. Remedy: extend first, or slots as extend and sample return them."
    )
