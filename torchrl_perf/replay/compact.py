"""One copy of each observation: next observations are found by row number, true final ones are stored separately."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrl_perf.kernels import gather_rows
from torchrl_perf.replay.layout import Field, Key, Leaves, RowLayout
from torchrl_perf.replay.ring import Ring
from torchrl_perf.replay.rows import PackedRows

NOT_OBSERVATIONS = frozenset({"reward", "done", "terminated", "truncated"})

NEXT_FRAME: Key = ("next", "_frame")
"""Hidden int64 entry of a row: the frame that holds its next observation."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def observation_keys(fields: Mapping[Key, Field]) -> list[Key]:
    """Keys that occur at the root and under "next" with one dtype and shape: what ``compact`` stores once."""
    found = []
    for key, field in fields.items():
        other = fields.get(("next", *key))
        same = other is not None and other.dtype == field.dtype and other.shape == field.shape
        if same and key[0] != "next" and key[-1] not in NOT_OBSERVATIONS:
            found.append(key)
    return found


class FrameStore:
    """Observations of a ring of rows, each stored once.

    ``frames`` holds one row of packed observations per slot; then one time row for the next observations of the newest
    rows; then a side ring of ``final_rows`` true final observations; then one row that is written but never read.
    Every stored row names the frame of its next observation (:data:`NEXT_FRAME`): the following row of its stream
    where the two are equal bit for bit, else a row of the side ring.

    Args:
        fields: observation fields, with root keys.
        ring: counters of the rows.
        final_rows: size of the side ring, at least the number of streams.
    """

    def __init__(self, fields: Sequence[Field], ring: Ring, final_rows: int) -> None:
        self.layout, self.final_rows = RowLayout(fields), final_rows
        self.keys = self.layout.keys
        self.head, self.side = ring.capacity, ring.capacity + ring.num_streams
        rows, device = self.side + final_rows + 1, ring.device
        self.frames = torch.zeros(rows, self.layout.row_bytes, dtype=torch.uint8, device=device)
        self._views = self.layout.views(self.frames)
        self.rows = PackedRows([fields], ring, False, self.frames[: ring.capacity])
        # absolute time of the row that each entry of the side ring belongs to
        self.final_time = torch.full((final_rows + 1,), -1, dtype=torch.int64, device=device)
        self.final_count = torch.zeros((), dtype=torch.int64, device=device)
        self.host_written = 0

    @staticmethod
    def nbytes(fields: Sequence[Field], ring: Ring, final_rows: int) -> int:
        """Bytes that the store will take."""
        rows = ring.capacity + ring.num_streams + final_rows + 1
        return rows * RowLayout(fields).row_bytes + (final_rows + 2) * 8

    def write(self, leaves: Leaves, index: Tensor, skipped: int, ring: Ring) -> tuple[Tensor, Tensor, Tensor]:
        """Writes the observations of a batch; call before ``ring.advance``.

        Args:
            leaves: the batch's leaves ``[N, T, ...]``, root and next observations among them, ``T <= steps``.
            index: their slots, int64 ``[N, T]``.
            skipped: time rows in front of these that were dropped, because the batch is longer than the ring.
            ring: counters before the batch.

        Returns:
            owner: int64 ``[T + 1, N]``: slots of the rows whose next frame is now known, in order of time (``[T, N]``
                where no older row is left).
            frame: int64, of owner's shape: their next frames.
            forgotten: int64, 0-d: absolute time of the newest row that has lost its final observation, -1 if none.
        """
        slots = index.t()  # [T, N]
        T, N = slots.shape
        keeps_old = not skipped and ring.steps > T
        differs = torch.cat([self._head_differs(leaves, ring, keeps_old), self._row_differs(leaves)])  # [T, N]
        time = torch.arange(skipped - 1, skipped + T - 1, device=index.device).unsqueeze(1) + ring.cursor  # [T, 1]
        entry, forgotten = self._side_entries(differs, time.expand(T, N))
        self.final_time.index_put_((entry,), time.expand(T, N))
        frame = entry + self.side
        for key, view in zip(self.keys, self._views, strict=True):
            following, head = leaves["next", *key], view[self.head : self.side]
            view.index_put_((frame[0],), head.clone())  # of the same memory
            view.index_put_((frame[1:].t(),), following[:, :-1])
            head.copy_(following[:, -1])
        self.rows.write({key: leaves[key] for key in self.keys}, index, skipped)

        newest = torch.arange(self.head, self.side, device=index.device).unsqueeze(0)
        owner = torch.cat([(slots - N).remainder_(ring.capacity), slots[-1:]])
        frame = torch.cat([torch.where(differs, frame, slots), newest])
        first = 0 if ring.steps > T else 1  # the whole ring is written: the slot before is that of the newest row
        return owner[first:], frame[first:], forgotten

    def _head_differs(self, leaves: Leaves, ring: Ring, keeps_old: bool) -> Tensor:
        """Whether the batch does not continue each stream's newest row, bool ``[1, N]``; False without such a row."""
        differs = torch.zeros(ring.num_streams, dtype=torch.bool, device=ring.device)
        if keeps_old:
            for key, view in zip(self.keys, self._views, strict=True):
                differs |= _bits_differ(view[self.head : self.side], leaves[key][:, 0], 1)
            differs &= ring.length > 0
        return differs.unsqueeze(0)

    def _row_differs(self, leaves: Leaves) -> Tensor:
        """Whether each row of the batch, except the last, is not continued by the next row, bool ``[T - 1, N]``."""
        pairs = ((leaves["next", *key][:, :-1], leaves[key][:, 1:]) for key in self.keys)
        return functools.reduce(torch.logical_or, (_bits_differ(a, b, 2) for a, b in pairs)).t()

    def _side_entries(self, differs: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Entries of the side ring for the rows marked in ``differs``, numbered in order of time.

        Unmarked rows, and those that this same batch overwrites again, get the entry that is never read.

        Returns:
            Entries int64 ``[T, N]``, and the absolute time of the newest row that lost its entry (0-d, -1 if none).
        """
        size = self.final_rows
        numbered = differs.reshape(-1).cumsum(0).view_as(differs)
        added = numbered[-1, -1]
        serial = self.final_count + numbered - 1
        self.final_count.add_(added)
        oldest = self.final_count - size  # entries with a smaller serial number are lost
        # The newest of those is about to be overwritten, unless this batch adds none.
        stored = self.final_time.take((oldest - 1).remainder(size))
        lost_before = torch.where((oldest > 0) & (added > 0), stored, -1)
        is_lost = differs & (serial < oldest)
        lost_now = torch.where(is_lost, time, -1).amax()
        entry = torch.where(differs & ~is_lost, serial.remainder(size), size)
        return entry, torch.maximum(lost_before, lost_now)

    def may_forget(self, rows: int) -> bool:
        """Counts ``rows`` more rows; returns whether the side ring may have overflowed since the start."""
        self.host_written += rows
        return self.host_written > self.final_rows

    def read(self, slot: Tensor, frame: Tensor, batch_size: Sequence[int]) -> Leaves:
        """Observations of the rows ``slot [B]`` and those in ``frame [B]``, under "next", in one gather."""
        rows = gather_rows(self.frames, torch.cat([slot, frame]))
        found = dict(zip(self.keys, self.layout.views(rows, batch_size), strict=True))
        following = self.layout.views(rows, batch_size, first=slot.shape[0])
        for key, leaf in zip(self.keys, following, strict=True):
            found["next", *key] = leaf
        return found

    def clear(self) -> None:
        """Forget the side ring."""
        self.final_count.zero_()
        self.final_time.fill_(-1)

    def state_dict(self, slots: Tensor) -> dict[str, Tensor | int]:
        """Copies of the frames of the valid ``slots`` and of the side ring's filled part."""
        count = int(self.final_count)
        filled = min(count, self.final_rows)
        return {
            "frames": gather_rows(self.frames, slots),
            "head": self.frames[self.head : self.side].clone(),
            "final": self.frames[self.side : self.side + filled].clone(),
            "final_time": self.final_time[:filled].clone(),
            "final_count": count,
            "host_written": self.host_written,
        }

    def load_state_dict(self, state: dict, slots: Tensor) -> None:
        """Restores :meth:`state_dict`, in place."""
        filled = state["final"].shape[0]
        self.clear()
        self.frames.index_copy_(0, slots, state["frames"].to(self.frames.device))
        self.frames[self.head : self.side].copy_(state["head"])
        self.frames[self.side : self.side + filled].copy_(state["final"])
        self.final_time[:filled].copy_(state["final_time"])
        self.final_count.fill_(state["final_count"])
        self.host_written = state["host_written"]


def _bits_differ(a: Tensor, b: Tensor, batch_dims: int) -> Tensor:
    """Whether two rows differ in a bit (a NaN equals itself, 0 is not -0), bool over the first ``batch_dims``."""
    if a.dtype == torch.complex128:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    bits = _BITS[a.dtype.itemsize]
    differs = a.view(bits) != b.view(bits)
    if differs.dim() == batch_dims:
        return differs
    differs = differs.flatten(batch_dims)
    if differs.stride(-1) != 1:
        differs = differs.contiguous()
    width = math.gcd(differs.shape[-1], 8) if differs.numel() else 1
    # Eight flags at a time: on a CPU a reduction of single bytes would take the most time.
    return differs.view(_BITS[width]).any(-1) if width > 1 else differs.any(-1)
