"""The writer: passes batches to the storage and tells every attached sampler which rows are new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from torchrl_perf.replay._checks import check_entries_of_state, check_least_of_state
from torchrl_perf.replay.ring import capturing
from torchrl_perf.replay.storage import DeviceStorage
from torchrl_perf.runtime.files import load_checkpoint, save_checkpoint


class DeviceWriter(Writer):
    """Writes behind the newest rows of a :class:`~torchrl_perf.replay.DeviceStorage`, without a host wait.

    It has no cursor of its own: the storage's ring counts on the device, so that a write recorded in a CUDA graph
    advances with each replay. Samplers learn of new rows by ``mark_update``.

    Args:
        compilable: TorchRL's; counters are always plain numbers, and are not shared with other processes.
        track_generations: whether samples carry "index_generation", how often their slot was written before. It is
            computed from the cursor, at no cost in memory.
    """

    _storage: DeviceStorage

    def __init__(self, compilable: bool = True, *, track_generations: bool = False) -> None:
        super().__init__(compilable=compilable)
        self._write_count = 0
        self.tracks_generations = track_generations

    def generations_of(self, index: int | Tensor) -> Tensor:
        """How often each slot was written before its present row, int64; -1 if that is not tracked, or never."""
        index = torch.as_tensor(index)
        if not self.tracks_generations or not self._storage.initialized:
            return torch.full_like(index, -1, dtype=torch.int64)
        return self._storage.ring.generation(index.to(self._storage.device))

    def register_storage(self, storage: Storage) -> None:
        """Attaches the storage.

        Raises:
            TypeError: if it is not a :class:`~torchrl_perf.replay.DeviceStorage`.
        """
        if not isinstance(storage, DeviceStorage):
            raise TypeError(
                f"DeviceWriter: expected a DeviceStorage, received {type(storage).__name__}. Remedy: "
                "ReplayBuffer(storage=DeviceStorage(max_size, device=...), writer=DeviceWriter())."
            )
        super().register_storage(storage)

    def extend(self, data: TensorDictBase) -> Tensor:
        """Writes a batch ``[N, T]`` or ``[B]``; see :meth:`DeviceStorage.write`.

        Returns:
            Slots of the rows, int64, in the shape of the batch.

        Raises:
            KeyError: if a sampler reads an entry that the first batch lacks; nothing is written then.
            ValueError: likewise for slices that are too long for the storage, and as :meth:`DeviceStorage.write` does.
        """
        index = self._storage.write(data)
        if not capturing():
            self._write_count += index.numel()
        for buffer in self._storage.attached:
            buffer.mark_update(index)
        return index

    def add(self, data: TensorDictBase) -> Tensor:
        """Writes one row without batch dimensions; its slot, int64 0-d."""
        return self.extend(data.unsqueeze(0))[0]

    def _empty(self, empty_write_count: bool = True) -> None:
        if empty_write_count:
            self._write_count = 0

    def state_dict(self) -> dict[str, Any]:
        """Number of rows written by Python calls; the cursor is part of the storage."""
        return {"write_count": self._write_count}

    @staticmethod
    def check_state(state_dict: Any) -> None:
        """Check that a state is one of this writer.

        Raises:
            ValueError: if not.
        """
        check_entries_of_state(state_dict, {"write_count": int}, "DeviceWriter")
        check_least_of_state(state_dict, {"write_count": 0}, "DeviceWriter")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`.

        Raises:
            ValueError: for another state; nothing is changed then.
        """
        self.check_state(state_dict)
        self._write_count = state_dict["write_count"]

    def dumps(self, path: str | Path) -> None:
        """Saves :meth:`state_dict` in the folder ``path``."""
        save_checkpoint(self.state_dict(), Path(path) / "writer.pt")

    def loads(self, path: str | Path) -> None:
        """Restores :meth:`dumps`."""
        self.load_state_dict(load_checkpoint(Path(path) / "writer.pt"))
