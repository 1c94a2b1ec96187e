"""The storage: a ring of packed rows on the device, written and read without a host wait."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_perf.replay import _checks as checks
from torchrl_perf.replay.compact import NEXT_FRAME
from torchrl_perf.replay.copied_rows import CopiedRows
from torchrl_perf.replay.layout import Skeleton, build
from torchrl_perf.replay.priority_tree import PriorityTree, Rows
from torchrl_perf.replay.ring import slots_of
from torchrl_perf.replay.row_memory import RowMemory
from torchrl_perf.replay.state import DeviceStorageCheckpointer, load_storage_state, storage_state
from torchrl_perf.replay.torchrl_writers import set_rows
from torchrl_perf.runtime.upstream.buffers import dim_extend_of

LAZY_TENSOR_STORAGE: dict[str, tuple[Any, str]] = {
    "ndim": (1, "rows have slots, and a batch [N, T] is N streams of time rows by itself"),
    "compilable": (None, "counters are plain numbers and device tensors in any case"),
    "consolidated": (False, "all entries of a row lie side by side in any case"),
    "shared_init": (False, "the rows belong to one process"),
    "cleanup_memmap": (True, "the rows belong to one process"),
}
"""Options of TorchRL's storage: their defaults, and why others have no meaning here."""

OPTIONS = ("max_size", "device", "compact", "n_step", "gamma", "final_fraction")


class DeviceStorage(RowMemory):
    """Ring of rows on the device for TorchRL's replay buffers: no host wait in writes and reads, capturable.

    The layout is taken from the first batch. A batch ``[N, T]`` (envs, time) adds T time rows of N streams; a batch
    ``[B]`` adds B rows without a known order. Later batches must have the same layout. All entries of a row are packed
    into bytes side by side, so that one gather reads all; :meth:`get` returns views into the gathered rows.
    Tensors are copied, detached, in their dtype. A batch longer than the ring leaves its newest rows.

    Args:
        max_size: number of rows; rounded down to a multiple of N.
        device: where the rows live.
        num_streams: N, to be checked; by default that of the first batch.
        compact: store entries that occur at the root and under "next" (observations; not reward and done flags) once.
            The next observation of a row is the following row's of its stream where both are equal bit for bit, else
            it is kept in a side ring. About half the memory: rows of 2 x 376 + 18 floats take 0.57 of the bytes.
        n_step: rows of the n-step windows that :meth:`get` makes; 1 for plain rows. Needs ``[N, T]`` batches.
        gamma: discount of the n-step windows.
        final_fraction: size of the side ring as a fraction of ``max_size`` (at least N rows). If more rows than that
            end an episode or a batch, the oldest rows are forgotten (``ring.length`` shrinks): fewer rows, never wrong
            ones. Only with ``compact``; without it there is no side ring.
        **options: of ``LazyTensorStorage``, at their defaults.

    Attributes:
        ring: counters, see :class:`~torchrl_perf.replay.ring.Ring`.
        initialized: whether the layout is known and the memory allocated.

    Raises:
        ValueError: for options out of range, for a capacity that does not fit in memory, and for batches of another
            layout; nothing is written then.
    """

    supports_conditional_update = False
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
        super().__init__(max_size, checks.check_device(device), num_streams, compact, n_step, gamma, final_fraction)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes rows to the slots of a TorchRL writer; see :mod:`torchrl_perf.replay.torchrl_writers`.

        Args:
            cursor: slots: an int, a list, a range, a slice of the valid rows, or an int64 tensor.
            data: as many rows; if they have only some of the stored entries, these are written in place.
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

    # --- reading

    def get(self, index: Any) -> Any:
        """Rows by slot.

        Args:
            index: int64 tensor of any shape (slots; no host wait), a list, range or array of slots, a slot as an int
                (negative: from the end of the valid rows), or a slice of the valid rows in ascending order of slot.
                Slots on a GPU are not checked: a row that is not filled reads as whatever its memory holds. A key gives
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
        ring = self._ring or self.ring  # the property raises where there is none
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

    def draw(self, count: int, generator: torch.Generator | None) -> tuple[Tensor, TensorDict]:
        """Rows drawn uniformly with replacement among the valid ones, of which there must be some.

        Plain rows are drawn and read in one launch on CUDA.

        Args:
            count: rows B.
            generator: of random numbers, on the device; None for the device's default.

        Returns:
            Slots ``[B]`` int64, and the rows ``[B]`` as :meth:`get` gives them.
        """
        if not self._is_plain:
            index = self.ring.random_slots(count, generator)
            return index, self._gather(index)
        index, values = self.rows.draw(count, generator)
        return index, self._assemble(values, index.shape)

    def draw_by_weight(self, tree: PriorityTree, uniform: Tensor, beta: Tensor) -> tuple[Rows, TensorDict]:
        """Rows drawn in proportion to the weights of a tree, of which there must be some.

        Plain rows are drawn and read in one launch on CUDA.

        Args:
            tree: weights of the slots.
            uniform: ``[B]`` float64 in [0, 1).
            beta: exponent of the importance weights, 0-d float32.

        Returns:
            Slots, weights and generations, and the rows ``[B]`` as :meth:`get` gives them.
        """
        if not self._is_plain:
            drawn = tree.draw_rows(uniform, beta, self.ring)
            return drawn, self._gather(self.ring.vouch(drawn.index))
        drawn, values = self.rows.draw_by_weight(tree, uniform, beta)
        return drawn, self._assemble(values, drawn.index.shape)

    def _gather(self, index: Tensor) -> TensorDict:
        """Copies of the rows at slots of any shape."""
        shape, slot = index.shape, index if index.ndim == 1 else index.reshape(-1)
        if self._is_plain:
            return self._assemble(self.rows.values(slot, shape), shape)
        window, last = self._window, slot
        if window is not None:
            reward, steps, gamma, last = window.read(slot)
        leaves = self.rows.read(slot, last, shape)
        if self.frames is not None:
            leaves.update(self.frames.read(slot, leaves.pop(NEXT_FRAME).reshape(-1), shape))
        if window is not None:
            leaves["next", "reward"] = reward.view(*shape, *reward.shape[1:])
            leaves["steps_to_next_obs",] = steps.view(*shape, 1)
            leaves["gamma",] = gamma.view(*shape, 1)
        if self._skeleton is None:
            self._skeleton = Skeleton(list(leaves))
        return self._assemble(list(leaves.values()), shape)

    def _assemble(self, values: list[Tensor], shape: torch.Size) -> TensorDict:
        batch_size = torch.Size((*shape, *self.row_shape)) if self.row_shape else shape
        return self._skeleton.build(values, batch_size, self.rows.device)

    def _live(self, run: tuple[int, int], rows: slice) -> TensorDict:
        leaves = {key: view[run[0] : run[1]][rows] for key, view in self._views.items()}
        return build(leaves, (len(range(run[1] - run[0])[rows]), *self.row_shape), self.device)

    def _rand_given_ndim(self, batch_size: int) -> Tensor:
        return self.ring.random_slots(batch_size, self._rng)

    def contains(self, item: int | Tensor) -> bool | Tensor:
        """Whether a slot holds a valid row: a bool for an int (negative: from the end), else a bool tensor."""
        return self.initialized and self.ring.contains(item)

    def __iter__(self) -> Iterator[TensorDict]:
        for first, last in self.ring.runs() if self.initialized else ():
            for slot in range(first, last):
                yield self.get(torch.tensor(slot, device=self.device))

    def state_dict(self) -> dict[str, Any]:
        """Copies of the valid rows, counters and a description of the layout; loads with ``weights_only=True``."""
        return storage_state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, in place where memory is allocated: recorded graphs stay valid.

        ``DeviceReplayBuffer`` checks the state of every part before it loads the first one. TorchRL's own buffers load
        part after part: if the sampler or writer refuses its state, the storage has already loaded.

        Raises:
            ValueError: for the state of another capacity, number of streams or layout; nothing is changed then.
        """
        load_storage_state(self, state_dict)

    # --- attributes that TorchRL reads

    @property
    def checkpointer(self) -> Any:
        """Used by ``dumps`` and ``loads`` of TorchRL's buffers: always a :class:`DeviceStorageCheckpointer`."""
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
        """Number of rows, counted by the ring; a TorchRL writer that filled slots of its choice sets it."""
        if self._ring is not None and value > len(self):
            self._ring.fill(value)

    def attach(self, buffer: Any) -> None:
        """Registers a buffer that reads from this storage.

        Raises:
            ValueError: for a buffer with ``dim_extend`` above 0.
        """
        checks.check_dim_extend(dim_extend_of(buffer))
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

    @property
    def _last_cursor_index(self) -> int | None:
        return self.ring.last_slot() if self.initialized else None

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                "DeviceStorage: expected to stay in one process, received the start of another with the storage in "
                "its arguments. Remedy: collect in other processes, extend and sample in this one."
            )
        options = {name: getattr(self, name) for name in OPTIONS}
        options["num_streams"] = self.num_streams
        return {"options": options, "state": self.state_dict(), "buffers": self._attached_entities}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["options"])
        self.load_state_dict(state["state"])
        self._attached_entities_list = state["buffers"]

    def __repr__(self) -> str:
        options = f"compact={self.compact}, n_step={self.n_step}" if self.compact or self.n_step > 1 else "plain rows"
        return f"{type(self).__name__}(rows={len(self)}/{self.max_size}, {options}, device={self.device})"
