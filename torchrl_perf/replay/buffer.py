"""TorchRL's replay buffer with fast paths from the caller to the device parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter, Writer

from torchrl_perf.replay._checks import check_entries_of_state, check_least_of_state, state_error
from torchrl_perf.replay.buffer_options import check_buffer_options, is_consuming
from torchrl_perf.replay.dated_rows import DatedRows, Drawn
from torchrl_perf.replay.layout import put_entry
from torchrl_perf.replay.prioritized import DevicePrioritizedSampler
from torchrl_perf.replay.random import DeviceRandomSampler
from torchrl_perf.replay.recorded import Parts, RecordedCalls
from torchrl_perf.replay.signatures import shows_arguments
from torchrl_perf.replay.state import check_storage_state
from torchrl_perf.replay.storage import DeviceStorage
from torchrl_perf.replay.writer import DeviceWriter
from torchrl_perf.runtime.files import load_checkpoint, save_checkpoint
from torchrl_perf.runtime.self_capture import DEVICES, plain_calls
from torchrl_perf.runtime.upstream.tensordicts import modules_take_tensordicts

STATE_FILE = "replay.pt"


@shows_arguments
class DeviceReplayBuffer(TensorDictReplayBuffer):
    """``TensorDictReplayBuffer`` whose ``extend`` and ``sample`` do only what the device parts need.

    The writer is a :class:`~torchrl_perf.replay.DeviceWriter` by default, TorchRL's round-robin writer where rows are
    consumed. Transforms, a ``collate_fn``, prefetching and sample units take TorchRL's own path. Differences:
    ``extend`` does not write into the caller's TensorDict; an explicit ``batch_size`` of ``sample`` prevails without a
    warning; rows whose slot was written again between sampling and a priority update are left alone, where samples
    carry "index_generation".

    Args:
        storage: a :class:`~torchrl_perf.replay.DeviceStorage`.
        sampler: any sampler; uniform with replacement by default.
        writer: a ``DeviceWriter`` by default.
        collate_fn: applied to the rows of a sample, before transforms.
        pin_memory: as in TorchRL, for a storage on a CPU.
        prefetch: number of samples that threads prepare; needs ``batch_size``.
        transform: applied to samples, its inverse to what is added.
        transform_factory: makes the transform at the first use.
        batch_size: rows of a sample.
        generator: of random numbers, on the device of the storage.
        delayed_init: whether the parts are made at the first use.
        consume_after_n_samples: as in TorchRL.
        sample_unit: as in TorchRL.
        priority_key: entry with the priorities of rows.
        capture: on CUDA, whether calls become CUDA graphs once they repeat. Up to four samples of a size may be held
            at once, whole or in part; while they are, further ones are drawn without a graph.
        debug: whether reading a sample raises once more than four others were drawn since, and names the sample.
        **options: TorchRL's other options at their defaults.

    Raises:
        ValueError: for options that have no meaning here: ``dim_extend``, ``shared``, ``checkpointer``,
            ``compilable=False`` and those of services, each with the reason.
    """

    _storage: DeviceStorage

    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        delayed_init: bool | None = None,
        consume_after_n_samples: int | None = None,
        sample_unit: Any = None,
        priority_key: str = "td_error",
        capture: bool = True,
        debug: bool = False,
        **options: Any,
    ) -> None:
        options |= {"storage": storage, "sampler": sampler, "collate_fn": collate_fn, "pin_memory": pin_memory}
        options |= {"prefetch": prefetch, "transform": transform, "transform_factory": transform_factory}
        options |= {"batch_size": batch_size, "generator": generator, "delayed_init": delayed_init}
        options |= {"consume_after_n_samples": consume_after_n_samples, "sample_unit": sample_unit}
        options = check_buffer_options(type(self).__name__, options, getattr(storage, "device", None))
        if writer is None:
            writer = TensorDictRoundRobinWriter() if is_consuming(options) else DeviceWriter()
        self.capture, self.debug = capture, debug
        self._recorded, self._drawn = RecordedCalls(), Drawn()
        super().__init__(priority_key=priority_key, writer=writer, **options)

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
        if not isinstance(self._writer, DeviceWriter) or self._is_consuming():
            return super().extend(tensordicts.copy(), update_priority=update_priority)
        if len(self._transform):
            with modules_take_tensordicts(True):
                tensordicts = self._transform.inv(tensordicts)
            if tensordicts is None:
                return torch.zeros(0, dtype=torch.int64, device=self._storage.device)
        with self._replay_lock, self._write_lock:
            self._storage.capture = self.capture
            index = self._writer.extend(tensordicts)
        if update_priority is not False and self._is_prioritized():
            priority = tensordicts.get(self.priority_key, None)
            if priority is not None:
                self.update_priority(index, self._one_a_row(priority, index))
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
            ValueError: for an empty buffer, and for more rows than it has, if they are drawn without replacement and
                a batch cannot be shorter.
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
            drawn = None
            if self.capture and self._storage.device.type in DEVICES:
                drawn = self._recorded.sample(self._parts(), batch_size, self._draw)
            if drawn is not None:
                data, info = drawn
            elif self.capture:
                data, info = self._draw(batch_size)
            else:
                with plain_calls():  # for the sampler, too
                    data, info = self._draw(batch_size)
        if drawn is None:
            batch_dims = data.batch_size
            for key, value in info.items():
                if isinstance(value, Tensor):
                    put_entry(data, key, value, batch_dims)
        if self.debug:
            self._drawn.number += 1
            data = DatedRows.of(data, self._drawn)
        return (data, info) if return_info else data

    def _draw(self, batch_size: int) -> tuple[TensorDict, dict[NestedKey, Any]]:
        """Rows as they are stored, and the info of a sample."""
        sampler = self._sampler
        if type(sampler) is DeviceRandomSampler:
            (index, data), info = sampler.sample_rows(self._storage, batch_size), {}
        elif type(sampler) is DevicePrioritizedSampler:
            index, data, info = sampler.sample_rows(self._storage, batch_size)
        else:
            index, info = sampler.sample(self._storage, batch_size)
            data = self._storage.get(index)
        if self._writer.tracks_generations:
            info["index_generation"] = self._writer.generations_of(index)
        info["index"] = index
        return data, info

    def _sample(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Rows after ``collate_fn`` and transforms, and the info of the sample; called by TorchRL's ``sample``.

        The rows come from a graph where they can, and what follows runs as it is.
        """
        if self._prefetch or self._sample_unit is not None or not self._has_graphs():
            # here, since prefetching calls this on a thread of its own
            with nullcontext() if self.capture else plain_calls():
                return super()._sample(batch_size)
        with self._replay_lock, self._write_lock:
            drawn = self._recorded.sample(self._parts(), batch_size, self._draw, whole=False)
        if drawn is None:
            return super()._sample(batch_size)
        data, info = self._collate_fn(drawn[0]), drawn[1]
        if len(self._transform):
            with modules_take_tensordicts(is_tensor_collection(data)):
                data = self._transform(data)
        return data, info

    def _has_graphs(self) -> bool:
        return self.capture and isinstance(self._storage, DeviceStorage) and self._storage.device.type in DEVICES

    def _parts(self) -> Parts:
        return Parts(self._storage, self._sampler, self._writer, self._rng)

    def mark_update(self, index: int | Tensor) -> None:
        """Tells the sampler of rows that were written.

        Args:
            index: int64 slots of any shape.
        """
        if not (self._has_graphs() and self._recorded.mark_update(self._parts(), index)):
            self._sampler.mark_update(index, storage=self._storage)

    def _get_collate_fn(self, collate_fn: Callable[[Any], Any] | None) -> None:
        super()._get_collate_fn(collate_fn)
        self._collates = collate_fn is not None

    def _takes_long_path(self) -> bool:
        return bool(
            not self._initialized
            or self._collates
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
            if not (self._has_graphs() and self._recorded.update_priority(self._parts(), index, priority, generation)):
                self._sampler.update_priority(index, priority, storage=self._storage, **options)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sets the priorities of sampled rows from the priority key, largest over trailing dimensions.

        Does nothing where the sampler is not prioritized.

        Raises:
            KeyError: if the priority key or "index" is missing, naming the keys present.
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
        if index.ndim > 1 and priority.shape[: index.ndim] != index.shape:
            index = index.reshape(index.shape[0], -1)[:, 0]  # TorchRL's samplers repeat it over the dims of a row
        self.update_priority(index, self._one_a_row(priority, index), generation)

    def _one_a_row(self, priority: Tensor, index: Tensor) -> Tensor:
        """Priorities in the shape of ``index``: the sampler's reduction over the dimensions that follow."""
        if priority.shape == index.shape or priority.dim() <= index.dim():
            return priority
        trailing = priority.flatten(index.dim())
        if trailing.shape[-1] == 1:
            return trailing.squeeze(-1)
        reduction = getattr(self._sampler, "reduction", "max")
        if reduction in ("max", "min"):
            return trailing.amax(-1) if reduction == "max" else trailing.amin(-1)
        exact = trailing if trailing.dtype == torch.float64 else trailing.float()
        return exact.mean(-1) if reduction == "mean" else exact.median(-1).values

    # --- changes in place: a storage's slices may be copies, so these go to the storage itself

    def set_at_(self, key: NestedKey, value: Any, index: Any) -> DeviceReplayBuffer:
        """Writes one entry of the rows ``index`` (slots) in place; samplers learn of masks and ends that change."""
        with self._replay_lock:
            self._storage.put_entry(key, value, index)
        return self

    def set_(self, key: NestedKey, value: Any) -> DeviceReplayBuffer:
        """Writes one entry of all rows, in ascending order of slot, in place."""
        return self.set_at_(key, value, slice(None))

    def update_(self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None) -> DeviceReplayBuffer:
        """Writes entries of all rows, in ascending order of slot, in place; values are copied, as with ``clone``."""
        del clone
        rows = TensorDict({}, [len(self._storage)], device=self._storage.device)
        with self._replay_lock:
            self._storage.put(slice(None), rows.update(input_dict_or_td, keys_to_update=keys_to_update))
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        """Writes rows (``buffer[3] = row``), or one entry of all rows (``buffer["mask"] = values``), in place."""
        if self._delayed_init and not self._initialized:
            self._init()
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(k, str) for k in index)):
            self.set_(index, value)
        elif isinstance(self._storage, DeviceStorage) and not len(self._transform):
            with self._replay_lock:
                self._storage.put(index, value)
        else:
            super().__setitem__(index, value)

    # --- state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict()``, in place: recorded graphs stay valid.

        Raises:
            ValueError: for the state of another capacity, number of streams, layout, sampler or writer, and for one
                with entries that are missing or wrong; nothing is changed then.
        """
        if self._delayed_init and not self._initialized:
            self._init()
        parts: dict[str, Any] = {"_storage": Mapping, "_sampler": Mapping, "_writer": Mapping, "_transforms": Mapping}
        parts |= {"_batch_size": (int, NoneType)}
        parts |= {"_consume_after_n_samples": (int, NoneType)} if "_consume_after_n_samples" in state_dict else {}
        check_entries_of_state(state_dict, parts, type(self).__name__)
        check_least_of_state(state_dict, {"_batch_size": 1, "_consume_after_n_samples": 1}, type(self).__name__)
        self._validate_prefetch_state(state_dict.get("_prefetch_state"))
        rng = self._checked_rng(state_dict.get("_rng"))
        check_storage_state(self._storage, state_dict["_storage"])
        for part, state in ((self._sampler, state_dict["_sampler"]), (self._writer, state_dict["_writer"])):
            check = getattr(part, "check_state", None)
            if check is not None:
                check(state)
        # Parts of other packages (transforms, TorchRL's samplers and writers) have no check beforehand; if one refuses,
        # all are restored.
        small = [self._transform, *(part for part in (self._sampler, self._writer) if not hasattr(part, "check_state"))]
        before = [part.state_dict() for part in small]
        try:
            for part in small:
                part.load_state_dict(state_dict[self._name_of(part)])
        except Exception:
            for part, state in zip(small, before, strict=True):
                part.load_state_dict(state)
            raise
        if self._rng is not None and rng is not None:
            self._rng.set_state(rng[0])
            rng = None
        super().load_state_dict({**state_dict, "_rng": rng})
        refresh = getattr(self._sampler, "refresh", None)
        if refresh is not None and isinstance(self._sampler, DeviceRandomSampler):  # its mask comes from the rows
            refresh(self._storage)

    def _name_of(self, part: Any) -> str:
        names = ((self._sampler, "_sampler"), (self._writer, "_writer"), (self._transform, "_transforms"))
        return next(name for known, name in names if known is part)

    def _checked_rng(self, state: Any) -> tuple[Tensor, str] | None:
        """A generator's saved state, on the CPU, if it is one for the device of the storage.

        Raises:
            ValueError: if not.
        """
        if state is None:
            return None
        name = type(self).__name__
        if not isinstance(state, (tuple, list)) or len(state) != 2 or not isinstance(state[0], Tensor):
            raise state_error(name, "'_rng' as (state, device)", f"{type(state).__name__}")
        saved, device = state[0].to("cpu"), torch.device(state[1])
        try:
            torch.Generator(device=device).set_state(saved)
        except (RuntimeError, TypeError) as error:
            raise state_error(
                name, f"'_rng' of a generator on {device}", f"{saved.dtype} {list(saved.shape)}"
            ) from error
        return saved, str(device)

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
