"""Slices of storages that assemble their rows when read: copies whose writes reach the storage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from torchrl_perf.replay.row_memory import RowMemory
from torchrl_perf.runtime.upstream.tensordicts import entries_of

_HARMLESS = frozenset({"requires_grad_", "share_memory_", "detach_"})
"""Functions named like writes in place that do not change the values."""


class CopiedTensor(Tensor):
    """A tensor of :class:`CopiedRows`, or a view of one: it reads like any tensor, but refuses writes in place.

    Results computed from it are plain tensors.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuses functions that write into one of these (not inside ``torch.compile``), and calls all others."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return super().__torch_function__(func, types, args, kwargs)
        written = kwargs.get("out")
        if written is None and _writes(getattr(func, "__name__", "")):
            written = next(iter((*args, *kwargs.values())), None)
        if any(isinstance(tensor, cls) for tensor in (written if isinstance(written, (tuple, list)) else (written,))):
            _refuse("a write in place")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return _marked(result, args) if isinstance(result, (tuple, list)) else result
        return _marked([result], args)[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_") and name not in _HARMLESS


def _marked(results: Any, args: tuple[Any, ...]) -> Any:
    """Results with those that share memory with the first argument marked as it is: its views, and itself."""
    source = args[0] if args and isinstance(args[0], CopiedTensor) else None
    if source is None:
        return results
    with torch._C.DisableTorchFunctionSubclass():
        memory = source.untyped_storage().data_ptr()
        marked = [
            part.as_subclass(CopiedTensor)
            if isinstance(part, Tensor) and part.layout == torch.strided and part.untyped_storage().data_ptr() == memory
            else part
            for part in results
        ]
    return marked if isinstance(results, list) else type(results)(marked) if type(results) is tuple else results


class CopiedRows(TensorDict):
    """Rows ``[B]`` of a storage with ``compact`` or ``n_step``, which are not stored as such.

    TorchRL's buffers write with ``storage[:].set_at_(...)``, ``set_`` and ``update_``: these reach the storage here.
    Other writes in place, into the rows, their nested TensorDicts and their tensors, would change the copy alone and
    are refused. What is derived from these rows (``clone``, an index of many rows) is a copy like any other.

    Attributes:
        origin: the storage and the slots ``[B]`` in it; None for what is derived.
    """

    origin: tuple[RowMemory, Tensor] | None = None

    @classmethod
    def of(cls, rows: TensorDict, storage: RowMemory, slots: Tensor) -> CopiedRows:
        """Rows that were read from ``slots`` of ``storage``."""
        _mark_leaves(rows)
        copied = cls._new_unsafe(dict(rows.items()), batch_size=rows.batch_size, device=rows.device)
        copied.__dict__["origin"] = (storage, slots)
        return copied

    def set_at_(self, key: NestedKey, value: Any, index: Any, **options: Any) -> CopiedRows:
        """Writes one entry of the rows ``index``, here and in the storage."""
        if self.origin is not None:
            storage, slots = self.origin
            storage.put_entry(key, value, slots[index])
        with self._writable():
            return super().set_at_(key, value, index, **options)

    def set_(self, key: NestedKey, item: Any, **options: Any) -> CopiedRows:
        """Writes one entry of all rows, here and in the storage."""
        if self.origin is not None:
            storage, slots = self.origin
            storage.put_entry(key, item, slots)
        with self._writable():
            return super().set_(key, item, **options)

    def update_(self, input_dict_or_td: Any, clone: bool = False, **options: Any) -> CopiedRows:
        """Writes entries of all rows, here and in the storage."""
        if self.origin is not None:
            storage, slots = self.origin
            rows = TensorDict({}, self.batch_size, device=self.device)
            storage.put(slots, rows.update(input_dict_or_td, keys_to_update=options.get("keys_to_update")))
        with self._writable():
            return super().update_(input_dict_or_td, clone, **options)

    def update_at_(self, *args: Any, **options: Any) -> CopiedRows:
        """Refused: it would change the copy alone."""
        self._refuse("update_at_")
        return super().update_at_(*args, **options)

    def fill_(self, *args: Any, **options: Any) -> CopiedRows:
        """Refused: it would change the copy alone."""
        self._refuse("fill_")
        return super().fill_(*args, **options)

    def zero_(self, *args: Any, **options: Any) -> CopiedRows:
        """Refused: it would change the copy alone."""
        self._refuse("zero_")
        return super().zero_(*args, **options)

    def masked_fill_(self, *args: Any, **options: Any) -> CopiedRows:
        """Refused: it would change the copy alone."""
        self._refuse("masked_fill_")
        return super().masked_fill_(*args, **options)

    def _writable(self) -> contextlib.AbstractContextManager[Any]:
        """Context for updating the copy after the storage was written."""
        return contextlib.nullcontext() if self.origin is None else torch._C.DisableTorchFunctionSubclass()

    def _refuse(self, name: str) -> None:
        if self.origin is not None:
            _refuse(name)


def _mark_leaves(rows: TensorDict) -> None:
    """Makes the tensors of freshly read rows refuse writes, without ``apply``, which would take as long as the read."""
    entries = entries_of(rows)
    for key, value in entries.items():
        if isinstance(value, TensorDict):
            _mark_leaves(value)
        else:
            entries[key] = value.as_subclass(CopiedTensor)


def _refuse(name: str) -> None:
    raise RuntimeError(
        f"DeviceStorage: expected {name} on rows that the storage holds as they are, received rows of a "
        "storage with compact or n_step, which are a copy: nothing would reach the storage. Remedy: "
        "buffer.set_at_(key, value, index), or .clone() for a copy to work on."
    )
