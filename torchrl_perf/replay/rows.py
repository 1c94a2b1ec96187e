"""Packed rows of a ring: the buffers, their live views, reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_perf.kernels import gather_rows, row_kernels, write_rows
from torchrl_perf.replay.layout import Field, Key, Leaves, RowLayout
from torchrl_perf.replay.priority_tree import PriorityTree, Rows
from torchrl_perf.replay.ring import Ring


class PackedRows:
    """One or two buffers of packed rows, addressed by slot.

    Args:
        parts: fields of the first buffer, and of a second one if some fields are read at other slots than the rest.
        ring: counters of the rows.
        flat: whether batches come without the dimension of the streams.
        memory: uint8 ``[capacity, row_bytes]`` to use if there is one part; allocated by default.

    Attributes:
        device: where they lie, with its number.
        views: live view ``[capacity, *shape]`` of each field.
    """

    def __init__(self, parts: Sequence[Sequence[Field]], ring: Ring, flat: bool, memory: Tensor | None = None) -> None:
        self.ring, self.flat = ring, flat
        self.device = ring.counters.device
        self.parts: list[tuple[RowLayout, Tensor]] = []
        self.views: dict[Key, Tensor] = {}
        for fields in parts:
            layout = RowLayout(fields)
            shape = ring.capacity, layout.row_bytes
            rows = torch.zeros(shape, dtype=torch.uint8, device=ring.device) if memory is None else memory
            self.parts.append((layout, rows))
            self.views |= zip(layout.keys, layout.views(rows), strict=True)
        by_time = (ring.steps,) if flat else (ring.steps, ring.num_streams)
        self._by_time = {key: view.unflatten(0, by_time) for key, view in self.views.items()}
        filled = [field for field in self.parts[0][0].fields if field.nbytes]
        self._filled_keys = [field.key for field in filled]
        self._offsets, self._sizes = tuple(field.offset for field in filled), tuple(field.nbytes for field in filled)

    @staticmethod
    def row_bytes(parts: Sequence[Sequence[Field]]) -> int:
        """Bytes of one row in all buffers."""
        return sum(RowLayout(fields).row_bytes for fields in parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(rows.nbytes for _, rows in self.parts)

    def append(self, leaves: Leaves, shape: tuple[int, ...]) -> Tensor | None:
        """Writes all fields behind the newest rows and counts them, in one launch.

        Args:
            leaves: tensors ``[N, T, *shape]`` (``[T, *shape]`` where flat), ``0 < T <= steps``.
            shape: ``[N, T]`` (``[T]``).

        Returns:
            Their slots, int64, in that shape; None where there is no such launch: nothing is written then.
        """
        kernels = row_kernels(self.parts[0][1])
        if kernels is None or len(self.parts) > 1 or not self._sizes:
            return None
        memory, streams = self.parts[0][1], self.ring.num_streams
        values = [self._in_order(leaves[key]) for key in self._filled_keys]
        index = torch.empty(shape[::-1], dtype=torch.int64, device=memory.device)
        kernels.launch_write(
            memory, self.ring.counters, values, self._offsets, self._sizes, (index.numel(), streams), index
        )
        self.ring.count_on_host(shape[-1])
        return index if self.flat else index.t()

    def write(self, leaves: Leaves, index: Tensor, skipped: int) -> None:
        """Writes the fields that occur in ``leaves``; call before ``ring.advance``.

        Args:
            leaves: tensors ``[N, T, *shape]`` (``[T, *shape]`` where flat), ``T <= steps``.
            index: their slots, int64 ``[N, T]`` (``[T]``).
            skipped: time rows between the cursor and the first of these.
        """
        if index.is_cuda or self.ring.recording:
            self._write_on_device(leaves, skipped)
        else:
            self._write_runs(leaves, index.shape[-1], skipped)

    def _write_on_device(self, leaves: Leaves, skipped: int) -> None:
        """One launch per buffer, at the cursor on the device, so that each replay of a recorded write advances."""
        cursor = self.ring.cursor + skipped if skipped else self.ring.cursor
        for layout, rows in self.parts:
            fields = [field for field in layout.fields if field.key in leaves and field.nbytes]
            if fields:
                values = [self._in_order(leaves[field.key]) for field in fields]
                values = values if self.flat else [value.flatten(0, 1) for value in values]
                offsets = [field.offset for field in fields]
                write_rows(rows, cursor, values, offsets, num_streams=self.ring.num_streams)

    def _in_order(self, leaf: Tensor) -> Tensor:
        """``[N, T, *]`` as ``[T, N, *]``, contiguous: a view where memory is time-major. Flat ones are contiguous."""
        leaf = leaf if self.flat else leaf.transpose(0, 1)
        return leaf if leaf.is_contiguous() else leaf.contiguous()

    def _write_runs(self, leaves: Leaves, time_rows: int, skipped: int) -> None:
        """Copies of one or two runs: on a CPU, where nothing is recorded, the host knows the slots."""
        first = (self.ring.host_cursor + skipped) % self.ring.steps
        fits = min(time_rows, self.ring.steps - first)
        runs = [(first, 0, fits), (0, fits, time_rows - fits)][: 1 if fits == time_rows else 2]
        targets, sources = [], []
        for key, view in self._by_time.items():
            if key in leaves:
                leaf = leaves[key] if self.flat else leaves[key].transpose(0, 1)
                for slot, row, count in runs:
                    targets.append(view.narrow(0, slot, count))
                    sources.append(leaf if count == time_rows else leaf.narrow(0, row, count))
        if targets:
            torch._foreach_copy_(targets, sources)

    def read(self, slot: Tensor, last: Tensor, batch_size: tuple[int, ...]) -> Leaves:
        """Rows at ``slot [B]`` (those of the second buffer at ``last [B]``) as leaves ``[*batch_size, *shape]``."""
        leaves: Leaves = {}
        for number, (layout, rows) in enumerate(self.parts):
            views = layout.views(gather_rows(rows, last if number else slot), batch_size)
            leaves.update(zip(layout.keys, views, strict=True))
        return leaves

    def values(self, slot: Tensor, batch_size: tuple[int, ...]) -> list[Tensor]:
        """Values ``[*batch_size, *shape]`` of the rows at ``slot [B]`` of a single buffer, in its layout's order."""
        layout, memory = self.parts[0]
        return layout.views(gather_rows(memory, slot), batch_size)

    def draw(self, count: int, generator: torch.Generator | None) -> tuple[Tensor, list[Tensor]]:
        """Slots ``[count]`` drawn uniformly from a single buffer, and their values, in one launch on CUDA."""
        (layout, memory), ring = self.parts[0], self.ring
        kernels = row_kernels(memory)
        if kernels is None:
            slot = ring.random_slots(count, generator)
            return slot, layout.views(gather_rows(memory, slot), (count,))
        slot, rows = kernels.launch_draw_and_gather(
            memory, ring.uniform(count, generator), ring.cursor, ring.length, ring.steps, ring.num_streams
        )
        return ring.vouch(slot), layout.views(rows, (count,))

    def draw_by_weight(self, tree: PriorityTree, uniform: Tensor, beta: Tensor) -> tuple[Rows, list[Tensor]]:
        """Slots of a single buffer drawn by a tree's weights, and their values, in one launch on CUDA."""
        (layout, memory), ring = self.parts[0], self.ring
        drawn, rows = tree.draw_memory(uniform, beta, ring, memory)
        ring.vouch(drawn.index)
        return drawn, layout.views(rows, (uniform.shape[0],))

    def state(self, slots: Tensor) -> list[Tensor]:
        """Copies of the rows at ``slots``, uint8, one tensor a buffer."""
        return [gather_rows(rows, slots) for _, rows in self.parts]

    def load_state(self, state: Sequence[Tensor], slots: Tensor) -> None:
        """Restores :meth:`state`."""
        for (_, rows), saved in zip(self.parts, state, strict=True):
            rows.index_copy_(0, slots, saved.to(rows.device))
