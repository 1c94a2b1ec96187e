"""How fields are packed into rows of bytes, so that one gather serves all fields of a row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor

from torchrl_perf.runtime.upstream.tensordicts import unchecked

Key = tuple[str, ...]
Leaves = dict[Key, Tensor]

OWN_KEYS = frozenset({"index", "index_generation", "priority_weight"})
"""Root keys that samples carry; they are not stored if a batch has them."""

ROW_ALIGNMENT = 16
"""Bytes that rows, and fields of at least this size, begin at a multiple of: the widest load of a GPU thread."""


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
        self._plan = [
            (field.dtype, field.shape, _contiguous_strides(field.shape), field.offset // field.dtype.itemsize)
            for field in placed
        ]

    def views(self, rows: Tensor, batch_size: Sequence[int] | None = None, first: int = 0) -> list[Tensor]:
        """One view per field, in the order of ``fields``.

        Args:
            rows: uint8 ``[R, row_bytes]``, contiguous.
            batch_size: shape that the rows are seen in, ``[R]`` by default.
            first: number of the first row of the view.

        Returns:
            Tensors ``[*batch_size, *shape]`` in the field's dtype that share the memory of ``rows``.
        """
        batch = (rows.shape[0],) if batch_size is None else tuple(batch_size)
        batch_strides = _contiguous_strides(batch)
        typed: dict[torch.dtype, tuple[Tensor, tuple[int, ...], int]] = {}
        found = []
        for dtype, shape, strides, offset in self._plan:
            entry = typed.get(dtype)
            if entry is None:
                base, width = rows.view(dtype), self.row_bytes // dtype.itemsize
                outer = tuple(stride * width for stride in batch_strides)
                entry = typed[dtype] = (base, outer, base.storage_offset() + first * width)
            base, outer, start = entry
            found.append(base.as_strided(batch + shape, outer + strides, start + offset))
        return found


def leaves_of(data: TensorDictBase, ignored: frozenset[str] = frozenset(), prefix: Key = ()) -> Leaves:
    """The tensors of a TensorDict by nested key, without the root keys in ``ignored``.

    Raises:
        ValueError: for an entry that is not a tensor.
    """
    leaves: Leaves = {}
    for name, value in data.items():
        if isinstance(value, Tensor):
            if prefix or name not in ignored:
                leaves[*prefix, name] = value
        elif is_tensor_collection(value) and not is_non_tensor(value):
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
    """A TensorDict of leaves that are known to fit: without checks or copies."""
    tree: dict[str, Any] = {}
    for key, leaf in leaves.items():
        node = tree
        for name in key[:-1]:
            node = node.setdefault(name, {})
        node[key[-1]] = leaf
    return unchecked(tree, batch_size=torch.Size(batch_size), device=device)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
