"""The memory of a storage: the layout of its rows and their writes, without a host wait."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.utils import unravel_key
from torch import Tensor
from torchrl.data.replay_buffers.storages import TensorStorage

from torchrl_perf.replay import _checks as checks
from torchrl_perf.replay.compact import NEXT_FRAME, FrameStore, observation_keys
from torchrl_perf.replay.layout import (
    LARGEST_CACHE,
    OWN_KEYS,
    Field,
    Key,
    Leaves,
    Skeleton,
    describe,
    fields_of,
    leaves_of,
    readable_key,
)
from torchrl_perf.replay.memory import logger, reserve
from torchrl_perf.replay.ring import Ring, capturing, slots_of
from torchrl_perf.replay.rows import PackedRows
from torchrl_perf.replay.windows import NStepWindow
from torchrl_perf.runtime.self_capture import InPlaceReplays
from torchrl_perf.runtime.upstream.buffers import sampler_of


class RowMemory(TensorStorage):
    """Rows in the layout of the first batch, and their writes; :class:`DeviceStorage` reads them and talks to TorchRL.

    Args:
        max_size: number of rows.
        device: where the rows live.
        num_streams: N, or None for that of the first batch.
        compact: whether observations are stored once.
        n_step: rows of the windows that are read.
        gamma: discount of the windows.
        final_fraction: size of the side ring as a fraction of ``max_size``.

    Attributes:
        ring: counters, see :class:`~torchrl_perf.replay.ring.Ring`.
        initialized: whether the layout is known and the memory allocated.
        capture: whether writes of many launches become CUDA graphs once they repeat; a buffer that does so says it.
    """

    _ring: Ring | None = None  # made with the first batch; TorchRL reads ``_len`` before

    def __init__(
        self,
        max_size: int,
        device: torch.device,
        num_streams: int | None,
        compact: bool,
        n_step: int,
        gamma: float,
        final_fraction: float,
    ) -> None:
        super().__init__(None, max_size, device=device, compilable=True)
        self.compact, self.n_step, self.gamma, self.final_fraction = compact, n_step, gamma, final_fraction
        self.num_streams = num_streams
        self.capture, self._writes = False, InPlaceReplays("DeviceStorage.write")
        self._revision = self._known_version = self._outside_writes = 0
        self._forget_layout()

    def _forget_layout(self) -> None:
        self.initialized, self.flat = False, False
        # batch dims of one row, if a TorchRL writer stores [B, *row_shape]
        self.row_shape: tuple[int, ...] = ()
        self._ring = None
        self.fields: dict[Key, Field] = {}
        self.rows: PackedRows = None  # type: ignore[assignment]  # made with the layout
        self._views: dict[Key, Tensor] = {}  # live, [capacity, *shape], of all that is stored
        self.frames: FrameStore | None = None
        self._memories: list[Tensor] = []  # the tensors that hold the rows
        self._window: NStepWindow | None = None
        self._is_plain = False  # whether rows are read from one place, as they were written
        self._skeleton: Skeleton | None = None
        self._batches: dict[tuple[int, ...], list[tuple[Key, torch.dtype, tuple[int, ...]]]] = {}

    # --- parts

    @property
    def ring(self) -> Ring:
        """Counters of the ring.

        Raises:
            RuntimeError: before the first batch, which says how many streams there are.
        """
        if self._ring is None:
            raise RuntimeError(
                "DeviceStorage: expected the first extend, which makes the ring, received none yet. Remedy: extend."
            )
        return self._ring

    @property
    def nbytes(self) -> int:
        """Bytes allocated, 0 before the first batch."""
        if not self.initialized:
            return 0
        frames = self.frames
        extra = 0 if frames is None else frames.frames.nbytes + frames.final_time.nbytes + 8
        return self.rows.nbytes + extra

    @property
    def attached(self) -> list[Any]:
        """The buffers that read from here, in the order in which they came."""
        return self._attached_entities

    def field(self, key: NestedKey) -> Tensor:
        """Live strided view ``[steps, N, *shape]`` of a stored entry, in its dtype.

        Raises:
            KeyError: for an entry that is not stored; next observations are not with ``compact``.
        """
        name = (key,) if isinstance(key, str) else tuple(key)
        view = self._views.get(name)
        if view is None or name == NEXT_FRAME:
            stored = ", ".join(sorted(readable_key(known) for known in self._views if known != NEXT_FRAME))
            raise KeyError(
                f"DeviceStorage: expected one of {stored}, received {readable_key(name)}. Remedy: with compact=True "
                "next observations are not stored: read rows with storage.get(index)."
            )
        return view.unflatten(0, (self.ring.steps, self.ring.num_streams))

    def allocate(self, fields: list[Field], batch_size: tuple[int, ...]) -> None:
        """Takes the layout of the first batch, checks that the memory suffices and allocates it."""
        if capturing():
            raise RuntimeError(
                "DeviceStorage: expected the first extend outside of a CUDA graph, since it allocates the rows, "
                "received it while one records. Remedy: extend once before capturing."
            )
        streams, flat = checks.check_streams(batch_size, self.max_size, self.num_streams), len(batch_size) == 1
        # In inference mode these would be inference tensors, which cannot be written outside of it.
        with torch.inference_mode(False):
            ring = Ring(self.max_size // streams, streams, self.device)
        single, framed = self.divide(fields)
        final_rows = self.final_rows(streams)
        needed = ring.capacity * PackedRows.row_bytes(single)
        needed += FrameStore.nbytes(framed, ring, final_rows) if framed else 0
        remedy = "a smaller max_size, compact=True (observations stored once), smaller dtypes (uint8 images)"
        reserve(needed, self.device, f"DeviceStorage: {ring.capacity} rows", remedy)
        if ring.capacity != self.max_size:
            logger.info("DeviceStorage: %d rows, not %d: a multiple of %d envs", ring.capacity, self.max_size, streams)
        with torch.inference_mode(False):
            self.rows = PackedRows(single, ring, flat)
            self._views = dict(self.rows.views)
            if framed:
                self.frames = FrameStore(framed, ring, final_rows)
                self._views |= self.frames.rows.views
                self._memories = [self.frames.frames]
            self._memories += [rows for _, rows in self.rows.parts]
            if self.n_step > 1:
                reward, done = self._views["next", "reward"], self._views["next", "done"]
                self._window = NStepWindow(self.n_step, self.gamma, ring, reward, done)
        self._ring, self.flat, self.max_size = ring, flat, ring.capacity
        self.fields = {field.key: field for field in fields}
        self._batches.clear()
        self._is_plain = not framed and self.n_step == 1
        self._skeleton = Skeleton(self.rows.parts[0][0].keys) if self._is_plain else None
        self.initialized = True

    def final_rows(self, streams: int) -> int:
        """Rows of the side ring: at least one for each stream, enough for a time row in which all episodes end."""
        capacity = self.max_size // streams * streams
        return max(streams, math.ceil(self.final_fraction * capacity)) if self.compact else 0

    def divide(self, fields: list[Field]) -> tuple[list[list[Field]], list[Field]]:
        """Fields by buffer: the rows (root and next separately if n-step reads them at other slots), and the frames."""
        checks.check_fields(fields)
        framed: list[Field] = []
        if self.compact:
            keys = observation_keys({field.key: field for field in fields})
            if not keys:
                raise ValueError(
                    "DeviceStorage: expected an entry both at the root and under 'next' for compact=True, which "
                    f"stores it once, received {describe(fields)}. Remedy: compact=False."
                )
            framed = [field for field in fields if field.key in keys]
            dropped = {*keys, *(("next", *key) for key in keys)}
            fields = [field for field in fields if field.key not in dropped]
            fields.append(Field(NEXT_FRAME, torch.int64, ()))
        if self.n_step == 1:
            return [fields], framed
        checks.check_n_step_fields(fields)
        root = [field for field in fields if field.key[0] != "next"]
        return [root, [field for field in fields if field.key[0] == "next"]], framed

    # --- writing

    def write(self, data: TensorDictBase) -> Tensor:
        """Adds a batch after the newest rows. No host wait; may be recorded in a CUDA graph after a first call.

        Args:
            data: ``[N, T]`` or ``[B]``; root keys of samples ("index", ...) are left out.

        Returns:
            Slots of the rows, int64, in the shape of the batch.

        Raises:
            ValueError: for another layout than that of the first batch; nothing is written then.
            RuntimeError: for the first batch inside a CUDA graph capture.
        """
        return self.append(leaves_of(data, OWN_KEYS), tuple(data.batch_size))

    def append(self, leaves: Leaves, batch_size: tuple[int, ...], row_shape: tuple[int, ...] = ()) -> Tensor:
        """Adds leaves ``[*batch_size, *row_shape, ...]`` behind the newest rows; their slots."""
        self.agree(leaves, batch_size, row_shape)
        ring, time_rows = self.ring, batch_size[-1]
        self.count_outside_writes()  # before this write hides those so far
        index = None
        if 0 < time_rows <= ring.steps and self.frames is None:
            index = self.rows.append(leaves, batch_size)
        if index is None:
            with torch.no_grad():
                index = ring.slots(time_rows, self.flat)
                if self.capture and 0 < time_rows <= ring.steps and self._writes.serves(ring.cursor.device):
                    self._write_again(leaves, index, time_rows)
                elif time_rows:
                    self._write_rows(leaves, index, time_rows)
        self.count_own_write()
        return index

    def agree(self, leaves: Leaves, batch_size: tuple[int, ...], row_shape: tuple[int, ...] = ()) -> None:
        """Checks a batch against the layout, or takes its layout if it is the first; moves leaves to the device."""
        if not self.initialized:
            self._begin(leaves, batch_size, row_shape)
        if row_shape != self.row_shape:
            raise checks.row_shape_error(row_shape, self.row_shape)
        expected = self._batches.get(batch_size)
        if expected is None:
            expected = self._expect(batch_size)
        fits, device = len(leaves) == len(expected), self.rows.device
        for key, dtype, shape in expected:
            leaf = leaves.get(key)
            if leaf is None or leaf.dtype != dtype or leaf.shape != shape:
                fits = False
                break
            if leaf.device != device:
                leaves[key] = leaf.to(device)
        if not fits:
            raise checks.layout_error(self.fields.values(), fields_of(leaves, len(batch_size)))

    def _begin(self, leaves: Leaves, batch_size: tuple[int, ...], row_shape: tuple[int, ...]) -> None:
        """Takes the layout of the first batch."""
        streams = checks.check_streams(batch_size, self.max_size, self.num_streams)
        checks.check_streams_known(len(batch_size) == 1, self.n_step, self.compact)
        for buffer in self._attached_entities:
            checks.check_sampler(buffer, leaves.keys(), streams, self.max_size)
        self.allocate(fields_of(leaves, len(batch_size)), batch_size)
        self.row_shape = row_shape

    def _expect(self, batch_size: tuple[int, ...]) -> list[tuple[Key, torch.dtype, tuple[int, ...]]]:
        """Key, dtype and shape of the leaves of a batch of that size; worked out once a size."""
        checks.check_batch(batch_size, self.ring.num_streams, self.flat)
        if len(self._batches) >= LARGEST_CACHE:
            self._batches.clear()
        expected = [(key, field.dtype, (*batch_size, *field.shape)) for key, field in self.fields.items()]
        self._batches[batch_size] = expected
        return expected

    def _write_rows(self, leaves: Leaves, index: Tensor, time_rows: int) -> None:
        ring, frames = self.ring, self.frames
        skipped = max(time_rows - ring.steps, 0)
        if skipped:
            index, dim = index[..., skipped:], index.dim() - 1
            leaves = {key: leaf.narrow(dim, skipped, ring.steps) for key, leaf in leaves.items()}
        forgotten = None
        if frames is not None:
            owner, frame, forgotten = frames.write(leaves, index, skipped, ring)
            self._views[NEXT_FRAME].index_put_((owner,), frame)
        self.rows.write(leaves, index, skipped)
        ring.advance(time_rows)
        if frames is not None and forgotten is not None:
            ring.forget_until(forgotten)
            self._count_side_rows(index.numel())

    def _write_again(self, leaves: Leaves, index: Tensor, time_rows: int) -> None:
        """Writes rows that take many launches: once batches of a size repeat, by the replay of a graph."""
        keys = list(self.fields)

        def write(given: list[Tensor]) -> None:
            self._write_rows(dict(zip(keys, given, strict=False)), given[-1], time_rows)

        given = [*(leaves[key] for key in keys), index]
        if self._writes(write, given, (), device=index.device, while_recording=self._unwritten):
            self.ring.count_on_host(time_rows)
            self._count_side_rows(index.numel())

    @contextmanager
    def _unwritten(self) -> Iterator[None]:
        """Context in which a write is recorded, and nothing counted."""
        written = 0 if self.frames is None else self.frames.host_written
        try:
            with self.ring.unchanged():
                yield
        finally:
            if self.frames is not None:
                self.frames.host_written = written

    def _count_side_rows(self, rows: int) -> None:
        """Note that rows may have been forgotten on the device, once that many were written."""
        if self.frames is not None:
            self.ring.may_forget = self.frames.may_forget(rows)
            self.ring.recorded |= self.ring.may_forget

    def put(self, index: Any, data: TensorDictBase) -> None:
        """Writes stored rows in place, and tells the samplers of every buffer that reads them.

        Args:
            index: slots: an int, a slice of the valid rows, a list or an int64 tensor of the shape of ``data``.
            data: the entries to write, any of those stored; with ``compact`` no observations, which rows share.

        Raises:
            IndexError: for a row that is not filled, where the host knows the index.
            RuntimeError: before the first extend.
            ValueError: for entries that are not stored, or of another dtype or shape.
        """
        slots = slots_of(index, self.ring)
        leaves = leaves_of(data, OWN_KEYS)
        own = {key: field for key, field in self.fields.items() if key in self.rows.views}
        checks.check_entries(leaves, slots.shape, own)
        self.put_leaves(slots, leaves)

    def put_entry(self, key: NestedKey, value: Any, index: Any) -> None:
        """Writes one entry of stored rows in place; a number or a smaller tensor is repeated as torch does it.

        Raises:
            IndexError, ValueError: see :meth:`put`.
        """
        slots = slots_of(index, self.ring)
        name = (key,) if isinstance(key, str) else tuple(unravel_key(key))
        field = self.fields.get(name)
        if field is not None:
            if isinstance(value, bool | int | float):
                value = torch.full((), value, dtype=field.dtype, device=self.device)  # no copy from the host
            value = torch.as_tensor(value)
            whole = (*slots.shape, *field.shape)
            if value.shape != whole and checks.broadcasts(value.shape, whole):
                value = value.expand(whole)
        own = {key: field for key, field in self.fields.items() if key in self.rows.views}
        leaves = {name: value}
        checks.check_entries(leaves, slots.shape, own)
        self.put_leaves(slots, leaves)

    def put_leaves(self, slots: Tensor, leaves: Leaves) -> None:
        """Writes checked entries at slots, and tells the samplers of every buffer that reads them."""
        self.count_outside_writes()  # before this write hides those so far
        with torch.no_grad():
            for key, leaf in leaves.items():
                self._views[key].index_put_((slots,), leaf.to(self.device))
        self.count_own_write()
        for buffer in self.attached:
            refresh = getattr(sampler_of(buffer), "refresh", None)
            if refresh is not None:
                refresh(self, slots, leaves.keys())

    # --- writes through views

    def count_outside_writes(self) -> int:
        """How often somebody wrote into the rows through a view (``buffer[:]``, :meth:`field`), as far as was noticed.

        Views share torch's count of in-place writes with the rows, and the host knows it: samplers whose state depends
        on the rows ask here before each draw, without a host wait. Writes that torch does not count are missed: through
        ``tensor.data``, NumPy, a custom kernel, or the replay of a CUDA graph; after those call the sampler's
        ``refresh(storage)``.
        """
        if not torch.compiler.is_compiling():
            version = sum([memory._version for memory in self._memories])
            if version != self._known_version:
                self._known_version = version
                self._outside_writes += 1
                self._revision += 1
        return self._outside_writes

    def count_own_write(self) -> None:
        """Record a write by the storage itself, which is not one through a view."""
        self._revision += 1
        if not torch.compiler.is_compiling():
            self._known_version = sum([memory._version for memory in self._memories])

    def _bump_mutation_revision(self) -> None:
        self._revision += 1

    def __len__(self) -> int:
        """Number of valid rows."""
        return 0 if self._ring is None else self._ring.read()[1] * self._ring.num_streams

    def clear(self) -> None:
        """Forgets all rows; layout and memory stay."""
        if self._ring is not None:
            self._ring.clear()
        if self.frames is not None:
            self.frames.clear()
        self._revision += 1

    def _empty(self) -> None:
        """Forgets all rows, by TorchRL's name."""
        self.clear()
