"""State of a storage: the valid rows, the counters, and the layout of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from torchrl_perf.replay._checks import (
    check_entries_of_state,
    check_least_of_state,
    check_tensor_of_state,
    state_error,
)
from torchrl_perf.replay.layout import Field, RowLayout
from torchrl_perf.replay.row_memory import RowMemory
from torchrl_perf.runtime.files import load_checkpoint, save_checkpoint

_FILE = "storage.pt"
_NAME = "DeviceStorage"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def storage_state(storage: RowMemory) -> dict[str, Any]:
    """State of a storage as tensors (copies) and plain values: filled rows only, in ascending order of slot."""
    state: dict[str, Any] = {"max_size": storage.max_size, "initialized": storage.initialized}
    if not storage.initialized:
        return state
    slots = storage.ring.valid_slots()
    state |= {
        "layout": _layout(storage),
        "ring": storage.ring.state_dict(),
        "rows": storage.rows.state(slots),
    }
    if storage.frames is not None:
        state["frames"] = storage.frames.state_dict(slots)
    return state


def _layout(storage: RowMemory) -> dict[str, Any]:
    """Properties that must be equal in two storages for rows to mean the same in both."""
    fields = [[list(field.key), str(field.dtype), list(field.shape)] for field in storage.fields.values()]
    streams = storage.ring.num_streams
    known = {
        "fields": sorted(fields),
        "num_streams": streams,
        "flat": storage.flat,
        "row_shape": list(storage.row_shape),
    }
    return {**known, **_options(storage, streams)}


def _options(storage: RowMemory, streams: int) -> dict[str, Any]:
    return {
        "capacity": storage.max_size // streams * streams,
        "compact": storage.compact,
        "split": storage.n_step > 1,
        "final_rows": storage.final_rows(streams),
    }


def check_storage_state(storage: RowMemory, state: Any) -> None:
    """Check that a state fits the storage in every entry, so that loading it cannot fail half-way.

    Raises:
        ValueError: if not, naming the entry; the storage is unchanged.
    """
    check_entries_of_state(state, {"max_size": int, "initialized": bool}, _NAME)
    check_least_of_state(state, {"max_size": 1}, _NAME)
    if not state["initialized"]:
        # the size before the first extend, which rounds it down to whole time rows
        size = state["max_size"] - (state["max_size"] % storage.ring.num_streams if storage.initialized else 0)
        if size != storage.max_size:
            _refuse("max_size", storage.max_size, state["max_size"])
        return
    check_entries_of_state(state, {"layout": Mapping, "ring": Mapping, "rows": (list, tuple)}, _NAME)
    saved = state["layout"]
    kinds: dict[str, Any] = {"fields": (list, tuple), "num_streams": int, "flat": bool, "capacity": int}
    check_entries_of_state(saved, {**kinds, "compact": bool, "split": bool, "final_rows": int}, f"{_NAME} (layout)")
    if saved["num_streams"] < 1:
        raise state_error(_NAME, "num_streams of at least 1", f"{saved['num_streams']}")
    options = _layout(storage) if storage.initialized else _options(storage, saved["num_streams"])
    if storage.num_streams is not None:
        options["num_streams"] = storage.num_streams
    for name, expected in options.items():
        received = saved.get(name, [])
        if received != expected:
            _refuse(name, expected, received)
    _check_rows(storage, state)


def _check_rows(storage: RowMemory, state: Mapping[str, Any]) -> None:
    """Check that counters are possible and that the rows have their number and size."""
    counters, saved = state["ring"], state["layout"]
    kinds = dict.fromkeys(("steps", "num_streams", "cursor", "length"), int)
    if "ordered" in counters:  # older versions did not save it
        kinds["ordered"] = bool
    check_entries_of_state(counters, {**kinds, "recorded": bool}, f"{_NAME} (ring)")
    streams, steps = saved["num_streams"], saved["capacity"] // saved["num_streams"]
    length, fits = counters["length"], (counters["steps"], counters["num_streams"]) == (steps, streams)
    if not fits or not 0 <= length <= min(steps, counters["cursor"]):
        raise state_error(_NAME, f"counters of a ring of {steps} steps of {streams} streams", f"{dict(counters)}")
    single, framed = storage.divide(_fields_of_state(saved))
    sizes, rows = [RowLayout(fields).row_bytes for fields in single], length * streams
    if len(state["rows"]) != len(sizes):
        raise state_error(_NAME, f"{len(sizes)} tensors of rows", f"{len(state['rows'])}")
    for value, size in zip(state["rows"], sizes, strict=True):
        check_tensor_of_state(value, _bytes(rows, size), "rows", _NAME)
    if framed:
        check_frames_state(state.get("frames"), rows, RowLayout(framed).row_bytes, streams, saved["final_rows"])


def check_frames_state(state: Any, rows: int, size: int, streams: int, final_rows: int) -> None:
    """Check that a state is one of the frames of a storage with ``rows`` rows, ``size`` bytes a frame.

    Raises:
        ValueError: if not.
    """
    name = f"{_NAME} (frames)"
    check_entries_of_state(state, {"final_count": int, "host_written": int}, name)
    check_least_of_state(state, {"final_count": 0, "host_written": 0}, name)
    filled = min(state["final_count"], final_rows)
    expected = {"frames": rows, "head": streams, "final": filled}
    for key, count in expected.items():
        check_tensor_of_state(state.get(key), _bytes(count, size), key, name)
    check_tensor_of_state(
        state.get("final_time"), torch.empty(filled, dtype=torch.int64, device="meta"), "final_time", name
    )


def _bytes(rows: int, size: int) -> Tensor:
    return torch.empty(rows, size, dtype=torch.uint8, device="meta")


def _fields_of_state(saved: Mapping[str, Any]) -> list[Field]:
    found = []
    for entry in saved["fields"]:
        try:
            key, dtype, shape = entry
            found.append(Field(tuple(key), _DTYPES[dtype], tuple(int(size) for size in shape)))
        except (TypeError, ValueError, KeyError) as error:
            raise state_error(_NAME, "fields as [key, dtype, shape]", repr(entry)) from error
    return found


def _refuse(name: str, expected: object, received: object) -> None:
    what = "n_step > 1" if name == "split" else name
    raise ValueError(
        f"DeviceStorage: expected a state with {what} = {expected}, received {received}. Nothing was changed. Remedy: "
        "make the buffer with the arguments, and fill it from the env, that the state was saved with."
    )


def load_storage_state(storage: RowMemory, state: dict[str, Any]) -> None:
    """Restores :func:`storage_state`.

    Raises:
        ValueError: if the state does not fit; the storage is unchanged.
    """
    check_storage_state(storage, state)
    if not state["initialized"]:
        storage.clear()
        return
    saved = state["layout"]
    if not storage.initialized:
        storage.allocate(_fields_of_state(saved), (1,) if saved["flat"] else (saved["num_streams"], 1))
        storage.row_shape = tuple(saved.get("row_shape", ()))
    storage.ring.load_state_dict(state["ring"])
    slots = storage.ring.valid_slots()
    storage.rows.load_state(state["rows"], slots)
    if storage.frames is not None:
        storage.frames.load_state_dict(state["frames"], slots)
        storage.ring.may_forget = storage.frames.may_forget(0)
    storage.count_own_write()


class DeviceStorageCheckpointer(StorageCheckpointerBase):
    """What TorchRL's buffers save a :class:`~torchrl_perf.replay.DeviceStorage` with: one file, aside and renamed."""

    def dumps(self, storage: RowMemory, path: str | Path) -> None:
        """Writes :func:`storage_state` into the folder ``path``."""
        save_checkpoint(storage_state(storage), Path(path) / _FILE)

    def loads(self, storage: RowMemory, path: str | Path) -> None:
        """Restores :meth:`dumps`.

        Raises:
            ValueError: if the state does not fit; the storage is unchanged.
        """
        load_storage_state(storage, load_checkpoint(Path(path) / _FILE))

    def register_save_hook(self, hook: Any) -> None:
        """Refuses: rows are saved packed.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "DeviceStorage: expected no hooks, since rows are saved packed, received some. Remedy: transform rb[:]."
        )

    register_load_hook = register_save_hook
