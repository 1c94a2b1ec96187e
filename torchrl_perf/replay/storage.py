"""The storage: a ring of packed rows on the device, written and read without a host wait."""

from __future__ import annotations

import math
from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.utils import unravel_key
from torch import Tensor
from torchrl.data.replay_buffers.storages import TensorStorage

from torchrl_perf.replay import _checks as checks
from torchrl_perf.replay.compact import NEXT_FRAME, FrameStore, observation_keys
from torchrl_perf.replay.copied_rows import CopiedRows
from torchrl_perf.replay.layout import OWN_KEYS, Field, Key, Leaves, build, describe, fields_of, leaves_of, readable_key
from torchrl_perf.replay.memory import logger, reserve
from torchrl_perf.replay.ring import Ring, capturing, slots_of
from torchrl_perf.replay.rows import PackedRows
from torchrl_perf.replay.state import DeviceStorageCheckpointer, load_storage_state, storage_state
from torchrl_perf.replay.torchrl_writers import set_rows
from torchrl_perf.replay.windows import NStepWindow

LAZY_TENSOR_STORAGE: dict[str, tuple[Any, str]] = {
    "ndim": (1, "rows have slots, and a batch [N, T] is N streams of time rows by itself"),
    "compilable": (None, "counters are plain numbers and device tensors in any case"),
    "consolidated": (False, "all entries of a row lie side by side in any case"),
    "shared_init": (False, "the rows belong to one process"),
    "cleanup_memmap": (True, "the rows belong to one process"),
}
"""Options of TorchRL's storage: their defaults, and why others have no meaning here."""

OPTIONS = ("max_size", "device", "compact", "n_step", "gamma", "final_fraction")


class DeviceStorage(TensorStorage):
    """Ring of rows on the device for TorchRL's replay buffers: no host wait in writes and reads, capturable.

    The layout is taken from the first batch. A batch ``[N, T]`` (envs, time) adds T time rows of N streams; a batch
    ``[B]`` adds B rows of which no order is known. Later batches must agree. All entries of a row are packed into
    bytes side by side, so that one gather serves all; what :meth:`get` returns are views into the gathered rows.
    Tensors are copied, detached, in their dtype. A batch longer than the ring leaves its newest rows.

    Args:
        max_size: number of rows; rounded down to a multiple of N.
        device: where the rows live.
        num_streams: N, where it shall be checked; by default the first batch says.
        compact: store entries that occur at the root and under "next" (observations; not reward and done flags) once.
            The next observation of a row is the following row's of its stream where both are equal bit for bit, else
            it is kept in a side ring. About half the memory: rows of 2 x 376 + 18 floats take 0.57 of the bytes.
        n_step: rows of the n-step windows that :meth:`get` makes; 1 for plain rows. Needs ``[N, T]`` batches.
        gamma: discount of the n-step windows.
        final_fraction: size of the side ring as a fraction of ``max_size`` (at least N rows). Where more rows end
            an episode or a batch than that, the oldest rows are forgotten (``ring.length`` shrinks): fewer rows, never
            wrong ones. Without ``compact`` there is no side ring, and nothing for it to size.
        **options: of ``LazyTensorStorage``, at their defaults.

    Attributes:
        ring: counters, see :class:`~torchrl_perf.replay.ring.Ring`.
        initialized: whether the layout is known and the memory allocated.

    Raises:
        ValueError: for options out of range, for a capacity that does not fit in memory, and for batches of another
            layout; nothing is written then.
    """

    supports_conditional_update = False
    _ring: Ring | None = None  # made with the first batch; TorchRL asks for `_len` before
    _default_checkpointer = DeviceStorageCheckpointer

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        num_streams: int | None = None,
        compact: bool = False,
        n_step: int = 1,
        gamma: float = 0.99,
        final_fraction: float = 0.125,
        **options: Any,
    ) -> None:
        checks.refuse_options("DeviceStorage", options, LAZY_TENSOR_STORAGE)
        max_size, num_streams = checks.check_options(max_size, num_streams, n_step, gamma, final_fraction)
        super().__init__(None, max_size, device=checks.check_device(device), compilable=True)
        self.compact, self.n_step, self.gamma, self.final_fraction = compact, n_step, gamma, final_fraction
        self._num_streams = num_streams
        self._revision = self._known_version = self._outside_writes = 0
        self._forget_layout()

    def _forget_layout(self) -> None:
        self.initialized, self._flat = False, False
        self._row_shape: tuple[
            int, ...
        ] = ()  # batch dims of one row, where a writer of TorchRL's stores [B, *row_shape]
        self._ring = None
        self._fields: dict[Key, Field] = {}
        self._rows: PackedRows = None  # type: ignore[assignment]  # made with the layout
        self._views: dict[Key, Tensor] = {}  # live, [capacity, *shape], of all that is stored
        self._frames: FrameStore | None = None
        self._memories: list[Tensor] = []  # all that rows lie in
        self._window: NStepWindow | None = None

    # --- what it is made of

    @property
    def ring(self) -> Ring:
        """Counters of the ring.

        Raises:
            RuntimeError: before the first batch, which says how many streams there are.
        """
        if self._ring is None:
            raise RuntimeError("DeviceStorage: the ring is made by the first extend, which has not come yet.")
        return self._ring

    @property
    def nbytes(self) -> int:
        """Bytes allocated, 0 before the first batch."""
        if not self.initialized:
            return 0
        frames = self._frames
        extra = 0 if frames is None else frames.frames.nbytes + frames.final_time.nbytes + 8
        return self._rows.nbytes + extra

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
                f"DeviceStorage: no entry {readable_key(name)} is stored; there are {stored}. With compact=True next "
                "observations are not stored: read rows with storage.get(index)."
            )
        return view.unflatten(0, (self.ring.steps, self.ring.num_streams))

    def _allocate(self, fields: list[Field], batch_size: tuple[int, ...]) -> None:
        """Takes the layout of the first batch, checks that it fits and allocates."""
        if capturing():
            raise RuntimeError(
                "DeviceStorage: the first extend allocates the rows and cannot be recorded in a CUDA graph. Remedy: "
                "extend once before capturing."
            )
        streams, flat = checks.check_streams(batch_size, self.max_size, self._num_streams), len(batch_size) == 1
        # In inference mode these would be inference tensors, which nobody may write outside of it.
        with torch.inference_mode(False):
            ring = Ring(self.max_size // streams, streams, self.device)
        single, framed = self._divide(fields)
        final_rows = self._final_rows(streams)
        needed = ring.capacity * PackedRows.row_bytes(single)
        needed += FrameStore.nbytes(framed, ring, final_rows) if framed else 0
        remedy = "a smaller max_size, compact=True (observations stored once), smaller dtypes (uint8 images)"
        reserve(needed, self.device, f"DeviceStorage: {ring.capacity} rows", remedy)
        if ring.capacity != self.max_size:
            logger.info("DeviceStorage: %d rows, not %d: a multiple of %d envs", ring.capacity, self.max_size, streams)
        with torch.inference_mode(False):
            self._rows = PackedRows(single, ring, flat)
            self._views = dict(self._rows.views)
            if framed:
                self._frames = FrameStore(framed, ring, final_rows)
                self._views |= self._frames.rows.views
                self._memories = [self._frames.frames]
            self._memories += [rows for _, rows in self._rows.parts]
            if self.n_step > 1:
                reward, done = self._views["next", "reward"], self._views["next", "done"]
                self._window = NStepWindow(self.n_step, self.gamma, ring, reward, done)
        self._ring, self._flat, self.max_size = ring, flat, ring.capacity
        self._fields = {field.key: field for field in fields}
        self.initialized = True

    def _final_rows(self, streams: int) -> int:
        """Rows of the side ring: at least one for each stream, so that a time row at which all end is kept."""
        capacity = self.max_size // streams * streams
        return max(streams, math.ceil(self.final_fraction * capacity)) if self.compact else 0

    def _divide(self, fields: list[Field]) -> tuple[list[list[Field]], list[Field]]:
        """Fields by buffer: those of the rows (root and next apart where n-step reads them apart), and the frames."""
        checks.check_fields(fields)
        framed: list[Field] = []
        if self.compact:
            keys = observation_keys({field.key: field for field in fields})
            if not keys:
                raise ValueError(
                    "DeviceStorage: compact=True stores entries once that are at the root and under 'next', but the "
                    f"batch has none: {describe(fields)}. Remedy: compact=False."
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
        """Adds a batch behind the newest rows. No host wait; may be recorded in a CUDA graph after a first call.

        Args:
            data: ``[N, T]`` or ``[B]``; root keys of samples ("index", ...) are left out.

        Returns:
            Slots of the rows, int64, in the shape of the batch.

        Raises:
            ValueError: for another layout than that of the first batch; nothing is written then.
            RuntimeError: for the first batch inside a CUDA graph capture.
        """
        return self._append(leaves_of(data, OWN_KEYS), tuple(data.batch_size))

    def _append(self, leaves: Leaves, batch_size: tuple[int, ...], row_shape: tuple[int, ...] = ()) -> Tensor:
        """Adds leaves ``[*batch_size, *row_shape, ...]`` behind the newest rows; their slots."""
        self._agree(leaves, batch_size, row_shape)
        ring, time_rows = self.ring, batch_size[-1]
        self.count_outside_writes()  # before this write hides those so far
        with torch.no_grad():
            index = ring.slots(time_rows, self._flat)
            if time_rows:
                self._write_rows(leaves, index, time_rows)
        self._revision += 1
        self._known_version = self._version()
        return index

    def _agree(self, leaves: Leaves, batch_size: tuple[int, ...], row_shape: tuple[int, ...] = ()) -> None:
        """Checks a batch against the layout, or takes its layout if it is the first; moves leaves to the device."""
        dims = len(batch_size)
        if not self.initialized:
            streams = checks.check_streams(batch_size, self.max_size, self._num_streams)
            checks.check_streams_known(dims == 1, self.n_step, self.compact)
            for buffer in self._attached_entities:
                checks.check_sampler(buffer, leaves.keys(), streams, self.max_size)
            self._allocate(fields_of(leaves, dims), batch_size)
            self._row_shape = row_shape
        if row_shape != self._row_shape:
            raise checks.row_shape_error(row_shape, self._row_shape)
        checks.check_batch(batch_size, self.ring.num_streams, self._flat)
        fields = self._fields
        if len(leaves) != len(fields):
            raise checks.layout_error(fields.values(), fields_of(leaves, dims))
        for key, leaf in leaves.items():
            field = fields.get(key)
            if field is None or leaf.dtype != field.dtype or leaf.shape[dims:] != field.shape:
                raise checks.layout_error(fields.values(), fields_of(leaves, dims))
            if leaf.device != self.device:
                leaves[key] = leaf.to(self.device)

    def _write_rows(self, leaves: Leaves, index: Tensor, time_rows: int) -> None:
        ring, frames = self.ring, self._frames
        skipped = max(time_rows - ring.steps, 0)
        if skipped:
            index, dim = index[..., skipped:], index.dim() - 1
            leaves = {key: leaf.narrow(dim, skipped, ring.steps) for key, leaf in leaves.items()}
        forgotten = None
        if frames is not None:
            owner, frame, forgotten = frames.write(leaves, index, skipped, ring)
            self._views[NEXT_FRAME].index_put_((owner,), frame)
        self._rows.write(leaves, index, skipped)
        ring.advance(time_rows)
        if frames is not None and forgotten is not None:
            ring.forget_until(forgotten)
            ring.may_forget = frames.may_forget(index.numel())
            ring.recorded |= ring.may_forget

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes rows where a writer of TorchRL's wants them; see :mod:`torchrl_perf.replay.torchrl_writers`.

        Args:
            cursor: slots: an int, a list, a range, a slice of the valid rows, or an int64 tensor.
            data: as many rows; some of the stored entries alone are written in place.
            set_cursor: True for rows that come after those stored, False for rows that take the place of others.

        Raises:
            IndexError: for slots that are neither filled nor next.
            ValueError: for entries that are not stored, or of another dtype or shape, or with ``compact`` or
                ``n_step``, which need the streams of rows; nothing is written then.
        """
        set_rows(self, cursor, data, set_cursor=set_cursor)

    def __setitem__(self, index: Any, value: TensorDictBase) -> None:
        """Writes stored rows in place; see :meth:`put`."""
        self.put(index, value)

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
        own = {key: field for key, field in self._fields.items() if key in self._rows.views}
        checks.check_entries(leaves, slots.shape, own)
        self._put_leaves(slots, leaves)

    def put_entry(self, key: NestedKey, value: Any, index: Any) -> None:
        """Writes one entry of stored rows in place; a number or a smaller tensor is repeated as torch does it.

        Raises:
            IndexError, ValueError: see :meth:`put`.
        """
        slots = slots_of(index, self.ring)
        name = (key,) if isinstance(key, str) else tuple(unravel_key(key))
        field = self._fields.get(name)
        if field is not None:
            if isinstance(value, bool | int | float):
                value = torch.full((), value, dtype=field.dtype, device=self.device)  # no copy from the host
            value = torch.as_tensor(value)
            whole = (*slots.shape, *field.shape)
            if value.shape != whole and checks.broadcasts(value.shape, whole):
                value = value.expand(whole)
        own = {key: field for key, field in self._fields.items() if key in self._rows.views}
        leaves = {name: value}
        checks.check_entries(leaves, slots.shape, own)
        self._put_leaves(slots, leaves)

    def _put_leaves(self, slots: Tensor, leaves: Leaves) -> None:
        self.count_outside_writes()  # before this write hides those so far
        with torch.no_grad():
            for key, leaf in leaves.items():
                self._views[key].index_put_((slots,), leaf.to(self.device))
        self._revision += 1
        self._known_version = self._version()
        for buffer in self._attached_entities:
            refresh = getattr(getattr(buffer, "_sampler", None), "refresh", None)
            if refresh is not None:
                refresh(self, slots, leaves.keys())

    # --- writes through views

    def count_outside_writes(self) -> int:
        """How often somebody wrote into the rows through a view (``buffer[:]``, :meth:`field`), as far as was noticed.

        Views share torch's count of writes in place with the rows, and the host knows it: samplers that keep something
        of the rows ask here before each draw, without a host wait. Not seen are writes that torch does not count:
        through ``tensor.data``, NumPy, a kernel of one's own, or the replay of a CUDA graph; after those call the
        sampler's ``refresh(storage)``.
        """
        version = self._version()
        if version != self._known_version:
            self._known_version = version
            self._outside_writes += 1
            self._revision += 1
        return self._outside_writes

    def _version(self) -> int:
        """What torch counts up with each write into the rows through any view of them; the host knows it."""
        if torch.compiler.is_compiling():
            return self._known_version
        version = 0
        for memory in self._memories:
            version += memory._version
        return version

    # --- reading

    def get(self, index: Any) -> Any:
        """Rows by slot.

        Args:
            index: int64 tensor of any shape (slots; no host wait), a list, range or array of slots, a slot as an int
                (negative: from the end of the valid rows), or a slice of the valid rows in ascending order of slot.
                Slots on a GPU are not looked at: a row that is not filled reads as what its memory holds. A key gives
                that entry of all rows.

        Returns:
            The rows, in the shape of ``index``. A slice gives live views of plain rows, as TorchRL's storages do; with
            ``compact`` or ``n_step`` it gives :class:`~torchrl_perf.replay.copied_rows.CopiedRows`, which refuse writes
            that would not reach the storage; everything else is a copy. With ``n_step`` above 1, ("next", "reward") is
            the discounted sum of the window, the other "next" entries are those of its last row, and
            "steps_to_next_obs" (int64 ``[*, 1]``) and "gamma" (``gamma ** steps``, ``[*, 1]``, float64 where rewards
            are, else float32) are added.

        Raises:
            IndexError: for a row that is not filled, where the host knows the index.
            RuntimeError: before the first extend.
        """
        ring = self.ring
        if ring.vouches_for(index) or torch.compiler.is_compiling():  # drawn by a sampler: nothing to check
            return self._gather(index)
        if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
            return self.get(slice(None)).get(index)  # as TorchRL's sample units ask
        if isinstance(index, slice):
            runs = ring.runs()
            if (index.step or 1) > 0 and not self.compact and self.n_step == 1 and len(runs) == 1:
                return self._live(runs[0], index)
            slots = slots_of(index, ring)
            return CopiedRows.of(self._gather(slots), self, slots)
        return self._gather(slots_of(index, ring))

    def _gather(self, index: Tensor) -> TensorDict:
        """Copies of the rows at slots of any shape."""
        shape, slot = index.shape, index.reshape(-1)
        window, last = self._window, slot
        if window is not None:
            reward, steps, gamma, last = window.read(slot)
        leaves = self._rows.read(slot, last, shape)
        if self._frames is not None:
            leaves.update(self._frames.read(slot, leaves.pop(NEXT_FRAME).reshape(-1), shape))
        if window is not None:
            leaves["next", "reward"] = reward.view(*shape, *reward.shape[1:])
            leaves["steps_to_next_obs",] = steps.view(*shape, 1)
            leaves["gamma",] = gamma.view(*shape, 1)
        return build(leaves, (*shape, *self._row_shape), self.device)

    def _live(self, run: tuple[int, int], rows: slice) -> TensorDict:
        leaves = {key: view[run[0] : run[1]][rows] for key, view in self._views.items()}
        return build(leaves, (len(range(run[1] - run[0])[rows]), *self._row_shape), self.device)

    def _rand_given_ndim(self, batch_size: int) -> Tensor:
        return self.ring.random_slots(batch_size, self._rng)

    def contains(self, item: int | Tensor) -> bool | Tensor:
        """Whether a slot holds a valid row: a bool for an int (negative: from the end), else a bool tensor."""
        return self.initialized and self.ring.contains(item)

    def __iter__(self) -> Iterator[TensorDict]:
        for first, last in self.ring.runs() if self.initialized else ():
            for slot in range(first, last):
                yield self.get(torch.tensor(slot, device=self.device))

    def __len__(self) -> int:
        """Number of valid rows."""
        return 0 if self._ring is None else self._ring.read()[1] * self._ring.num_streams

    def _empty(self) -> None:
        if self._ring is not None:
            self._ring.clear()
        if self._frames is not None:
            self._frames.clear()
        self._revision += 1

    def state_dict(self) -> dict[str, Any]:
        """Copies of the valid rows, counters and a description of the layout; loads with ``weights_only=True``."""
        return storage_state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, in place where memory is allocated: recorded graphs stay valid.

        ``DeviceReplayBuffer`` looks at the state of every part before it loads the first one. TorchRL's own buffers
        load part after part: a state whose sampler or writer is refused there has been loaded into the storage.

        Raises:
            ValueError: for the state of another capacity, number of streams or layout; nothing is changed then.
        """
        load_storage_state(self, state_dict)

    # --- what TorchRL reads of a storage

    @property
    def checkpointer(self) -> Any:
        """What ``dumps`` and ``loads`` of TorchRL's buffers use: :class:`DeviceStorageCheckpointer`, and no other."""
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        checks.check_checkpointer(value, DeviceStorageCheckpointer)
        self._checkpointer = DeviceStorageCheckpointer() if value is None else value

    @property
    def _len(self) -> int:
        return len(self)

    @_len.setter
    def _len(self, value: int) -> None:
        """The ring counts; a writer of TorchRL's that filled slots of its choice says so here."""
        if self._ring is not None and value > len(self):
            self._ring.fill(value)

    def attach(self, buffer: Any) -> None:
        """Learns of a buffer that reads from here.

        Raises:
            ValueError: for a buffer with ``dim_extend`` above 0.
        """
        checks.check_dim_extend(getattr(buffer, "_dim_extend", None))
        super().attach(buffer)

    @property
    def shape(self) -> torch.Size:
        """``[rows]``: the rows are addressed by slot, whatever the number of streams."""
        return torch.Size([len(self)])

    @property
    def _total_shape(self) -> torch.Size:
        """The shape of a full storage, which TorchRL's prioritized slice sampler reads."""
        return torch.Size([self.max_size])

    @property
    def _mutation_revision(self) -> int:
        self.count_outside_writes()
        return self._revision

    def _bump_mutation_revision(self) -> None:
        self._revision += 1

    @property
    def _last_cursor_index(self) -> int | None:
        return self.ring.last_slot() if self.initialized else None

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                "DeviceStorage: the rows belong to one process, expected no start of another with the storage in its "
                "arguments. Remedy: collect in other processes, extend and sample in this one."
            )
        options = {name: getattr(self, name) for name in OPTIONS}
        options["num_streams"] = self._num_streams
        return {"options": options, "state": self.state_dict(), "buffers": self._attached_entities}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["options"])
        self.load_state_dict(state["state"])
        self._attached_entities_list = state["buffers"]

    def __repr__(self) -> str:
        options = f"compact={self.compact}, n_step={self.n_step}" if self.compact or self.n_step > 1 else "plain rows"
        return f"{type(self).__name__}(rows={len(self)}/{self.max_size}, {options}, device={self.device})"
