"""How fields are packed into rows of bytes, so that one gather serves all fields of a row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor

from torchrl_perf.runtime.upstream.tensordicts import entries_of, unchecked

Key = tuple[str, ...]
Leaves = dict[Key, Tensor]

OWN_KEYS = frozenset({"index", "index_generation", "priority_weight"})
"""Root keys that samples carry; they are not stored if a batch has them."""

ROW_ALIGNMENT = 16
"""Bytes that rows, and fields of at least this size, begin at a multiple of: the widest load of a GPU thread."""

LARGEST_CACHE = 256
"""Batch sizes of which a layout knows the views; where more come, it begins anew."""


@dataclass(frozen=True)
class Field:
    """One entry of a row.

    Attributes:
        key: nested key, as a tuple.
        dtype: its dtype.
        shape: shape of one row's value.
        offset: first byte within the row.
    """

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one row's value."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{readable_key(self.key)}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class RowLayout:
    """Places of the fields in a row: small fields first, each aligned, the row padded to ``ROW_ALIGNMENT``.

    Args:
        fields: the fields, with any offsets.

    Attributes:
        fields: the fields with their offsets, in order.
        keys: their keys.
        row_bytes: bytes of a row.
    """

    def __init__(self, fields: Iterable[Field]) -> None:
        placed, end = [], 0
        for field in sorted(fields, key=lambda field: (field.nbytes, field.key)):  # independent of the given order
            unit = ROW_ALIGNMENT if field.nbytes >= ROW_ALIGNMENT else field.dtype.itemsize
            offset = -(-end // unit) * unit
            placed.append(Field(field.key, field.dtype, field.shape, offset))
            end = offset + field.nbytes
        self.fields = tuple(placed)
        self.keys = [field.key for field in placed]
        self.row_bytes = max(-(-end // ROW_ALIGNMENT), 1) * ROW_ALIGNMENT
        self._dtypes = list(dict.fromkeys(field.dtype for field in placed))
        self._plans: dict[tuple[int, ...], list[tuple[int, tuple[int, ...], tuple[int, ...], int]]] = {}

    def views(self, rows: Tensor, batch_size: tuple[int, ...] | None = None, first: int = 0) -> list[Tensor]:
        """One view per field, in the order of ``fields``.

        Args:
            rows: uint8 ``[R, row_bytes]``, contiguous.
            batch_size: shape that the rows are seen in, ``[R]`` by default.
            first: number of the first row of the view.

        Returns:
            Tensors ``[*batch_size, *shape]`` in the field's dtype that share the memory of ``rows``.
        """
        ahead = rows.storage_offset() + first * self.row_bytes  # first, since torch.compile breaks its graph here
        if batch_size is None:
            batch_size = (rows.shape[0],)
        plan = None if torch.compiler.is_compiling() else self._plans.get(batch_size)  # a traced size has no hash
        if plan is None:
            plan = self._plan(batch_size)
        typed = [rows.view(dtype) for dtype in self._dtypes]
        if ahead:
            return [
                typed[kind].as_strided(shape, strides, start + ahead // typed[kind].itemsize)
                for kind, shape, strides, start in plan
            ]
        return [typed[kind].as_strided(shape, strides, start) for kind, shape, strides, start in plan]

    def _plan(self, batch_size: tuple[int, ...]) -> list[tuple[int, tuple[int, ...], tuple[int, ...], int]]:
        """Of each field the place of its dtype, and shape, strides and offset of its view; made once a batch size."""
        batch_strides, plan = contiguous_strides(batch_size), []
        for field in self.fields:
            kind, size = self._dtypes.index(field.dtype), field.dtype.itemsize
            strides = tuple(stride * (self.row_bytes // size) for stride in batch_strides)
            strides += contiguous_strides(field.shape)
            plan.append((kind, (*batch_size, *field.shape), strides, field.offset // size))
        if not torch.compiler.is_compiling():
            if len(self._plans) >= LARGEST_CACHE:
                self._plans.clear()
            self._plans[batch_size] = plan
        return plan


class Skeleton:
    """The nesting of some keys: makes TensorDicts of their values without sorting out the keys again.

    Args:
        keys: nested keys, in the order of the values.
        places: number of the value of each key, where they are not all values, one after another.
    """

    def __init__(self, keys: Sequence[Key], places: Sequence[int] | None = None) -> None:
        self._leaves: list[tuple[str, int]] = []
        nested: dict[str, dict[int, Key]] = {}
        for place, key in enumerate(keys) if places is None else zip(places, keys, strict=True):
            if len(key) == 1:
                self._leaves.append((key[0], place))
            else:
                nested.setdefault(key[0], {})[place] = key[1:]
        self._children = [(name, Skeleton(list(below.values()), list(below))) for name, below in nested.items()]

    def build(self, values: Sequence[Tensor], batch_size: torch.Size, device: torch.device) -> TensorDict:
        """A TensorDict of values that are known to fit: nothing is checked, nothing is copied."""
        tree: dict[str, Any] = {name: values[place] for name, place in self._leaves}
        for name, child in self._children:
            tree[name] = child.build(values, batch_size, device)
        return unchecked(tree, batch_size=batch_size, device=device, nested=False)


def put_entry(data: TensorDict, key: NestedKey, value: Tensor, batch_size: torch.Size) -> None:
    """Sets an entry of a TensorDict that was just built, unchecked where its shape begins with the batch size."""
    if value.shape[: len(batch_size)] != batch_size:
        data.set(key, value)
        return
    node = data
    if not isinstance(key, str):
        for name in key[:-1]:
            child = entries_of(node).get(name)
            if child is None:
                child = unchecked({}, batch_size=batch_size, device=data.device, nested=False)
                entries_of(node)[name] = child
            node = child
        key = key[-1]
    entries_of(node)[key] = value


def leaves_of(data: TensorDictBase, ignored: frozenset[str] = frozenset(), prefix: Key = ()) -> Leaves:
    """The tensors of a TensorDict by nested key, without the root keys in ``ignored``.

    Raises:
        ValueError: for an entry that is not a tensor.
    """
    leaves: Leaves = {}
    entries = entries_of(data) if type(data) is TensorDict else data
    for name, value in entries.items():
        if isinstance(value, Tensor):
            if prefix or name not in ignored:
                leaves[*prefix, name] = value
        elif type(value) is TensorDict or (is_tensor_collection(value) and not is_non_tensor(value)):
            leaves.update(leaves_of(value, ignored, (*prefix, name)))
        else:
            raise ValueError(
                f"replay: expected tensors alone, received {type(value).__name__} at {readable_key((*prefix, name))}. "
                "Remedy: exclude the entry, or store it as a tensor."
            )
    return leaves


def fields_of(leaves: Mapping[Key, Tensor], batch_dims: int) -> list[Field]:
    """Key, dtype and row shape of each leaf."""
    return [Field(key, leaf.dtype, tuple(leaf.shape[batch_dims:])) for key, leaf in leaves.items()]


def describe(fields: Iterable[Field]) -> str:
    """Fields as an error message lists them."""
    return "{" + ", ".join(str(field) for field in sorted(fields, key=lambda field: field.key)) + "}"


def readable_key(key: Key) -> str:
    """``'observation'`` or ``('next', 'observation')``, as in a script."""
    return repr(key[0]) if len(key) == 1 else repr(key)


def build(leaves: Mapping[Key, Tensor], batch_size: Sequence[int], device: torch.device) -> TensorDict:
    """A TensorDict of leaves that are known to fit: nothing is checked, nothing is copied."""
    return Skeleton(list(leaves)).build(list(leaves.values()), torch.Size(batch_size), device)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of a shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
