"""TorchRL's replay buffer with short paths from the caller to the device parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_perf.replay.state import check_storage_state
from torchrl_perf.replay.storage import DeviceStorage
from torchrl_perf.replay.writer import DeviceWriter
from torchrl_perf.runtime.files import load_checkpoint, save_checkpoint

STATE_FILE = "replay.pt"


class DeviceReplayBuffer(TensorDictReplayBuffer):
    """``TensorDictReplayBuffer`` whose ``extend`` and ``sample`` do what the device parts need and nothing else.

    Takes the arguments of ``TensorDictReplayBuffer``; the writer is a :class:`~torchrl_perf.replay.DeviceWriter` by
    default. Transforms, prefetching and sample units take TorchRL's own path. Differences: ``extend`` does not write
    into the caller's TensorDict; an explicit ``batch_size`` of ``sample`` prevails without a warning; rows whose slot
    was written again between sampling and a priority update are left alone, where samples carry "index_generation".
    """

    _storage: DeviceStorage

    def __init__(self, *, priority_key: str = "td_error", **kwargs: Any) -> None:
        if kwargs.get("writer") is None:
            kwargs["writer"] = DeviceWriter()
        super().__init__(priority_key=priority_key, **kwargs)

    # --- writing

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        """Adds a batch.

        Args:
            tensordicts: ``[N, T]`` or ``[B]``; not changed. If it has the priority key, the rows get those priorities.
            update_priority: False to ignore the priority key.

        Returns:
            Slots of the rows, int64, in the shape of the batch.

        Raises:
            ValueError: see :meth:`DeviceStorage.write`; nothing is written then.
        """
        if self._delayed_init and not self._initialized:
            self._init()
        if not isinstance(tensordicts, TensorDictBase):
            raise ValueError(
                f"{type(self).__name__}.extend: expected a TensorDict, received {type(tensordicts).__name__}. Remedy: "
                "torch.stack(rows) of a list of TensorDicts."
            )
        if len(self._transform):
            with _set_dispatch_td_nn_modules(True):
                tensordicts = self._transform.inv(tensordicts)
            if tensordicts is None:
                return torch.zeros(0, dtype=torch.int64, device=self._storage.device)
        with self._replay_lock, self._write_lock:
            index = self._writer.extend(tensordicts)
        if update_priority is not False and self._is_prioritized():
            priority = tensordicts.get(self.priority_key, None)
            if priority is not None:
                self.update_priority(index, _one_a_row(priority, index))
        return index

    def add(self, data: TensorDictBase) -> Tensor:
        """Adds one row without batch dimensions; its slot, int64 0-d."""
        return self.extend(data.unsqueeze(0)).reshape(-1)[0]

    # --- sampling

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None
    ) -> TensorDictBase | tuple[TensorDictBase, dict[str, Any]]:
        """Draws rows.

        Args:
            batch_size: number of rows B; by default the one given to the constructor.
            return_info: whether to return the sampler's info too.
            include_info: as in TorchRL, deprecated there.

        Returns:
            Rows ``[B]``: the stored entries, "index" (slots, int64 ``[B]``), the entries of the sampler
            ("priority_weight", "index_generation", ...) and, with n-step windows, "steps_to_next_obs" and "gamma".

        Raises:
            RuntimeError: without a batch size.
            ValueError: for more rows than there are.
        """
        if self._takes_long_path() or include_info is not None:
            return super().sample(batch_size, return_info, include_info)
        if batch_size is None:
            batch_size = self._batch_size
            if batch_size is None:
                raise RuntimeError(
                    "sample: expected a batch_size here or in the constructor, received neither. Remedy: "
                    "sample(256), or DeviceReplayBuffer(batch_size=256, ...)."
                )
        with self._replay_lock, self._write_lock:
            index, info = self._sampler.sample(self._storage, batch_size)
            data = self._storage.get(index)
        info["index"] = index
        for key, value in info.items():
            if isinstance(value, Tensor):
                if isinstance(key, str) and value.shape[:1] == data.batch_size:
                    data._tensordict[key] = value
                else:
                    data.set(key, value)
        return (data, info) if return_info else data

    def _takes_long_path(self) -> bool:
        return bool(
            not self._initialized
            or self._prefetch
            or len(self._transform)
            or self._sample_unit is not None
            or self._pin_memory
            or self._service_shutdown
            or not isinstance(self._storage, DeviceStorage)
        )

    # --- priorities

    def _is_prioritized(self) -> bool:
        sampler = self._sampler
        has_priorities = type(sampler).update_priority is not Sampler.update_priority
        return has_priorities and getattr(sampler, "is_prioritized", True)

    def update_priority(self, index: int | Tensor, priority: float | Tensor, generation: Tensor | None = None) -> None:
        """Sets the priorities of rows.

        Args:
            index: slots.
            priority: priorities, of index's shape.
            generation: generations that the rows had when they were drawn ("index_generation"): rows that were
                written since are left alone.
        """
        options = {} if generation is None else {"generation": generation}
        with self._replay_lock, self._write_lock:
            self._sampler.update_priority(index, priority, storage=self._storage, **options)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sets the priorities of sampled rows from the priority key, largest over trailing dimensions.

        Does nothing where the sampler is not prioritized.

        Raises:
            KeyError: if the priority key or "index" is missing, naming the keys there are.
        """
        if not self._is_prioritized():
            return
        index, priority = data.get("index", None), data.get(self.priority_key, None)
        if index is None or priority is None:
            missing = "index" if index is None else self.priority_key
            raise KeyError(
                f"update_tensordict_priority: expected {missing!r} in the TensorDict, received keys "
                f"{sorted(map(str, data.keys(True, True)))}. Remedy: a batch of sample() after the loss wrote "
                f"{self.priority_key!r}, or priority_key=."
            )
        generation = data.get("index_generation", None)
        self.update_priority(index, _one_a_row(priority, index), generation)

    # --- changes in place: a storage's slices may be copies, so these go through storage.set

    def set_at_(self, key: NestedKey, value: Tensor, index: Any) -> DeviceReplayBuffer:
        """Writes one entry of the rows ``index`` (slots) in place."""
        rows = self._storage.get(index).empty()
        self._storage.set(index, rows.set(key, value))
        return self

    def set_(self, key: NestedKey, value: Tensor) -> DeviceReplayBuffer:
        """Writes one entry of all rows, in ascending order of slot, in place."""
        return self.set_at_(key, value, slice(None))

    def update_(self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None) -> DeviceReplayBuffer:
        """Writes entries of all rows, in ascending order of slot, in place; ``clone`` is of no effect."""
        del clone
        rows = self._storage[:].empty().update(input_dict_or_td, keys_to_update=keys_to_update)
        self._storage.set(slice(None), rows)
        return self

    # --- state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict()``, in place: recorded graphs stay valid.

        Raises:
            ValueError: for the state of another capacity, number of streams or layout; nothing is changed then.
        """
        check_storage_state(self._storage, state_dict["_storage"])
        self._sampler.load_state_dict(state_dict["_sampler"])  # refuses by itself, before the rows are touched
        rng = state_dict["_rng"]
        if rng is not None and self._rng is not None:
            self._rng.set_state(rng[0].to("cpu"))
        elif rng is not None:
            rng = (rng[0].to("cpu"), rng[1])
        super().load_state_dict({**state_dict, "_rng": rng if self._rng is None else None})
        refresh = getattr(self._sampler, "refresh", None)
        if refresh is not None:  # what the sampler reads from the rows, which it has seen too early
            refresh(self._storage)

    def dumps(self, path: str | Path) -> None:
        """Saves ``state_dict()`` as one file in the folder ``path``, written aside and renamed."""
        save_checkpoint(self.state_dict(), Path(path) / STATE_FILE)

    def loads(self, path: str | Path) -> None:
        """Restores :meth:`dumps`.

        Raises:
            FileNotFoundError: if the folder holds no such file.
            ValueError: see :meth:`load_state_dict`.
        """
        self.load_state_dict(load_checkpoint(Path(path) / STATE_FILE, self._storage.device))


def _one_a_row(priority: Tensor, index: Tensor) -> Tensor:
    """Priorities in the shape of ``index``: the largest over what dimensions follow."""
    if priority.shape == index.shape or priority.dim() <= index.dim():
        return priority
    trailing = priority.flatten(index.dim())
    return trailing.squeeze(-1) if trailing.shape[-1] == 1 else trailing.amax(-1)
