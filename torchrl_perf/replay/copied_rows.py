"""Slices of storages whose rows are put together when they are read: copies whose writes reach the storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict import NestedKey, TensorDict
from torch import Tensor

if TYPE_CHECKING:
    from torchrl_perf.replay.storage import DeviceStorage


class CopiedRows(TensorDict):
    """Rows ``[B]`` of a storage with ``compact`` or ``n_step``, which have no memory of their own in the storage.

    TorchRL's buffers write with ``storage[:].set_at_(...)``, ``set_`` and ``update_``: these reach the storage here.
    Other writes in place would change the copy alone and are refused. What is derived from these rows (``clone``, an
    index, ``reshape``) is a copy like any other.
    """

    _origin: tuple[DeviceStorage, Tensor] | None = None

    @classmethod
    def of(cls, rows: TensorDict, storage: DeviceStorage, slots: Tensor) -> CopiedRows:
        """Rows that were read from ``slots`` of ``storage``."""
        copied = cls._new_unsafe(dict(rows.items()), batch_size=rows.batch_size, device=rows.device)
        copied.__dict__["_origin"] = (storage, slots)
        return copied

    def set_at_(self, key: NestedKey, value: Any, index: Any, **options: Any) -> CopiedRows:
        """Writes one entry of the rows ``index``, here and in the storage."""
        if self._origin is not None:
            storage, slots = self._origin
            storage.put_entry(key, value, slots[index])
        return super().set_at_(key, value, index, **options)

    def set_(self, key: NestedKey, item: Any, **options: Any) -> CopiedRows:
        """Writes one entry of all rows, here and in the storage."""
        if self._origin is not None:
            storage, slots = self._origin
            storage.put_entry(key, item, slots)
        return super().set_(key, item, **options)

    def update_(self, input_dict_or_td: Any, clone: bool = False, **options: Any) -> CopiedRows:
        """Writes entries of all rows, here and in the storage."""
        if self._origin is not None:
            storage, slots = self._origin
            rows = TensorDict({}, self.batch_size, device=self.device)
            storage.put(slots, rows.update(input_dict_or_td, keys_to_update=options.get("keys_to_update")))
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

    def _refuse(self, name: str) -> None:
        if self._origin is not None:
            raise RuntimeError(
                f"DeviceStorage: expected {name} on rows that the storage holds as they are, received rows of a "
                "storage with compact or n_step, which are a copy: nothing would reach the storage. Remedy: "
                "buffer.set_at_(key, value, index), or .clone() for a copy to work on."
            )
