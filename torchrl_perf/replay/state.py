"""State of a storage: the valid rows, the counters, and what the rows look like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from torchrl_perf.replay.layout import Field
from torchrl_perf.runtime.files import load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from torchrl_perf.replay.storage import DeviceStorage

_FILE = "storage.pt"


def storage_state(storage: DeviceStorage) -> dict[str, Any]:
    """State of a storage as tensors (copies) and plain values: filled rows only, in ascending order of slot."""
    state: dict[str, Any] = {"max_size": storage.max_size, "initialized": storage.initialized}
    if not storage.initialized:
        return state
    slots = storage.ring.valid_slots()
    state |= {
        "layout": _layout(storage),
        "ring": storage.ring.state_dict(),
        "rows": storage._rows.state(slots),
    }
    if storage._frames is not None:
        state["frames"] = storage._frames.state_dict(slots)
    return state


def _layout(storage: DeviceStorage) -> dict[str, Any]:
    """What two storages must have in common for rows to mean the same in both."""
    fields = [[list(field.key), str(field.dtype), list(field.shape)] for field in storage._fields.values()]
    streams = storage.ring.num_streams
    return {"fields": sorted(fields), "num_streams": streams, "flat": storage._flat, **_options(storage, streams)}


def _options(storage: DeviceStorage, streams: int) -> dict[str, Any]:
    return {
        "capacity": storage.max_size // streams * streams,
        "compact": storage.compact,
        "split": storage.n_step > 1,
        "final_rows": storage._final_rows(streams),
    }


def check_storage_state(storage: DeviceStorage, state: dict[str, Any]) -> None:
    """That a state fits the storage.

    Raises:
        ValueError: otherwise; the storage is unchanged.
    """
    if not state["initialized"]:
        # taken before the first extend, which rounds the size down to whole time rows
        size = state["max_size"] - (state["max_size"] % storage.ring.num_streams if storage.initialized else 0)
        if size != storage.max_size:
            _refuse("max_size", storage.max_size, state["max_size"])
        return
    saved = state["layout"]
    options = _layout(storage) if storage.initialized else _options(storage, saved["num_streams"])
    if storage._num_streams is not None:
        options["num_streams"] = storage._num_streams
    for name, expected in options.items():
        if saved[name] != expected:
            _refuse(name, expected, saved[name])


def _refuse(name: str, expected: object, received: object) -> None:
    what = "n_step > 1" if name == "split" else name
    raise ValueError(
        f"DeviceStorage: expected a state with {what} = {expected}, received {received}. Nothing was changed. Remedy: "
        "make the buffer with the arguments, and fill it from the env, that the state was saved with."
    )


def load_storage_state(storage: DeviceStorage, state: dict[str, Any]) -> None:
    """Restores :func:`storage_state`.

    Raises:
        ValueError: if the state does not fit; the storage is unchanged.
    """
    check_storage_state(storage, state)
    if not state["initialized"]:
        storage._empty()
        return
    saved = state["layout"]
    if not storage.initialized:
        fields = [
            Field(tuple(key), getattr(torch, dtype.removeprefix("torch.")), tuple(shape))
            for key, dtype, shape in saved["fields"]
        ]
        storage._allocate(fields, (1,) if saved["flat"] else (saved["num_streams"], 1))
    storage.ring.load_state_dict(state["ring"])
    slots = storage.ring.valid_slots()
    storage._rows.load_state(state["rows"], slots)
    if storage._frames is not None:
        storage._frames.load_state_dict(state["frames"], slots)
    storage._bump_mutation_revision()
    storage._known_version = storage._version()


class DeviceStorageCheckpointer(StorageCheckpointerBase):
    """What TorchRL's buffers save a :class:`~torchrl_perf.replay.DeviceStorage` with: one file, aside and renamed."""

    def dumps(self, storage: DeviceStorage, path: str | Path) -> None:
        """Writes :func:`storage_state` into the folder ``path``."""
        save_checkpoint(storage_state(storage), Path(path) / _FILE)

    def loads(self, storage: DeviceStorage, path: str | Path) -> None:
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
        raise NotImplementedError("DeviceStorage: expected no hooks, rows are saved packed. Remedy: transform rb[:].")

    register_load_hook = register_save_hook
