"""Writes of TorchRL's writers to a storage: at slots of the writer's choice, while ours appends to a ring.

The slots of a round-robin writer come next in the ring, so its rows are appended in the order of time. Slots in any
other order (``TensorDictMaxValueWriter``, the free slots of a ``ConsumingSampler``) destroy the order of time. The ring
records that, and slices and windows of steps are refused from then on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers.writers import RoundRobinWriter, TensorDictMaxValueWriter

from torchrl_perf.replay.layout import OWN_KEYS, Leaves, leaves_of
from torchrl_perf.replay.row_memory import RowMemory
from torchrl_perf.runtime.upstream.buffers import next_slot_of, take_back, writer_of

_WRITERS = (RoundRobinWriter, TensorDictMaxValueWriter)


def set_rows(storage: RowMemory, cursor: Any, data: Any, *, set_cursor: bool) -> None:
    """Writes rows to slots.

    Args:
        storage: the storage.
        cursor: slots, as many as rows; an int for one row without batch dimensions.
        data: rows ``[B, *]``; of more than one batch dimension the first counts rows, as in TorchRL's storages.
        set_cursor: whether the rows come after those stored.

    Raises:
        IndexError: for slots that are neither filled nor next.
        TypeError: for rows that are no TensorDict.
        ValueError: for rows that do not fit, or a storage that needs their streams; nothing is written then.
    """
    data = _as_rows(data)
    if isinstance(cursor, slice):
        return storage.put(cursor, data)
    rows = data.unsqueeze(0) if isinstance(cursor, (int, np.integer)) or getattr(cursor, "ndim", 1) == 0 else data
    leaves = leaves_of(rows, OWN_KEYS)
    writers = [writer_of(buffer) for buffer in storage.attached]
    by_user = all(not isinstance(writer, _WRITERS) for writer in writers)
    if by_user and storage.initialized and (not storage.flat or leaves.keys() != storage.fields.keys()):
        return storage.put(cursor, data)  # existing rows, perhaps only some of their entries
    writer = writers[0] if len(writers) == 1 and isinstance(writers[0], RoundRobinWriter) else None
    next_slot = 0 if not storage.initialized else storage.ring.read()[0] % storage.max_size
    try:
        return _write(storage, cursor, leaves, tuple(rows.batch_size), next_slot, set_cursor=set_cursor, writer=writer)
    except (IndexError, ValueError):
        if set_cursor and writer is not None and next_slot_of(writer) == (next_slot + len(rows)) % storage.max_size:
            take_back(writer, len(rows), next_slot)  # it has counted rows already that were not written
        raise


def _write(
    storage: RowMemory, cursor: Any, leaves: Leaves, shape: tuple[int, ...], next_slot: int, *,
    set_cursor: bool, writer: RoundRobinWriter | None,
) -> None:  # fmt: skip
    """Writes whole rows ``[B, *row_shape]``: appended if their slots come next, else at their slots."""
    count, row_shape = shape[0], shape[1:]
    slots = _known_slots(cursor, count, next_slot, storage.max_size, writer)
    if len(slots) != count:
        raise ValueError(
            f"DeviceStorage.set: expected one slot for each of {count} rows, received {len(slots)}. Nothing was "
            "written. Remedy: slots and rows of one length."
        )
    _require_plain(storage)
    if set_cursor and np.array_equal(slots, (next_slot + np.arange(count)) % storage.max_size):
        storage.append(leaves, (count,), row_shape)
    else:
        _scatter(storage, slots, leaves, row_shape, len(storage), set_cursor)


def _scatter(
    storage: RowMemory, slots: np.ndarray, leaves: Leaves, row_shape: tuple[int, ...], length: int, set_cursor: bool
) -> None:
    """Writes rows to slots that are filled, or that follow them without a gap."""
    last = {int(slot): row for row, slot in enumerate(slots)}  # the last of several rows for one slot wins
    new = sorted(slot for slot in last if slot >= length)
    if (
        new != list(range(length, length + len(new)))
        or min(last, default=0) < 0
        or length + len(new) > storage.max_size
    ):
        raise IndexError(
            f"DeviceStorage.set: expected slots below {length}, which are filled, and those that follow, below "
            f"{storage.max_size}, received {slots[:8]}{'...' if slots.size > 8 else ''}. Nothing was written. Remedy: "
            "fill the slots in their order."
        )
    storage.agree(leaves, (len(slots),), row_shape)
    if new or set_cursor:
        storage.ring.fill(length + len(new))
    kept = torch.tensor(list(last.values()), dtype=torch.int64, device=storage.device)
    where = torch.tensor(list(last), dtype=torch.int64, device=storage.device)
    storage.put_leaves(where, {key: leaf.index_select(0, kept) for key, leaf in leaves.items()})


def _as_rows(data: Any) -> TensorDictBase:
    if isinstance(data, list) and data and is_tensor_collection(data[0]):
        data = torch.stack(data)
    if is_tensor_collection(data) and not isinstance(data, TensorDictBase):
        data = data.to_tensordict()
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            f"DeviceStorage: expected rows as a TensorDict, received {type(data).__name__}. Remedy: "
            "TensorDict({'observation': ...}, [B]); for other objects a ListStorage."
        )
    return data


def _known_slots(cursor: Any, count: int, next_slot: int, size: int, writer: RoundRobinWriter | None) -> np.ndarray:
    """Slots as numbers on the host.

    Slots on a GPU are read, which waits, unless they are the next ones of the only attached round-robin writer: it
    counts on the host, and is ``count`` rows ahead of the ring while it writes. (TorchRL does not tell the storage
    which writer writes.)
    """
    if isinstance(cursor, Tensor) and cursor.is_cuda:
        if writer is not None and cursor.ndim and count % size and next_slot_of(writer) == (next_slot + count) % size:
            return (next_slot + np.arange(count)) % size
        cursor = cursor.to("cpu")
    return np.asarray(cursor).reshape(-1).astype(np.int64)


def _require_plain(storage: RowMemory) -> None:
    if storage.compact or storage.n_step > 1 or (storage.initialized and not storage.flat):
        option = "a storage of several streams"
        if storage.compact or storage.n_step > 1:
            option = "compact=True" if storage.compact else f"n_step={storage.n_step}"
        raise ValueError(
            f"DeviceStorage: expected the order of time in each env for {option}, received rows of a TorchRL writer, "
            "which does not pass it on. Nothing was written. Remedy: writer=DeviceWriter() and batches [N, T] (one "
            "env: td.unsqueeze(0))."
        )
