"""Shuffled minibatches of a rollout, without a host wait."""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.functional.rows.permutation import random_permutation
from torchrl_perf.trainers.recurrent import refuse_recurrent_rows


def flat_rows(batch: TensorDictBase, keys: Sequence[NestedKey] | None = None) -> TensorDictBase:
    """The transitions of a batch as rows: those of ``[N, T]`` time-major, views of a collector's batch, not copies.

    Lazy stacks are made dense, since their rows cannot be gathered without asking the host for the indices.

    Args:
        batch: ``[N, T]``, ``[B]`` or ``[*]``, whose rows are in the order of its dims.
        keys: the entries to keep; all by default.

    Raises:
        ValueError: for a batch without dims, and for stacks of unequal sizes.
        KeyError: for an entry that it does not have.
    """
    if not batch.ndim or any(size < 0 for size in batch.shape):
        raise ValueError(
            f"batch: expected rows of one size, such as [N, T], received shape {list(batch.shape)}. Remedy: "
            "torchrl.collectors.utils.split_trajectories pads trajectories; .view(1) for a single row."
        )
    if keys is not None:
        batch = batch.select(*keys)
    batch = _dense(batch)
    if batch.ndim == 2:
        return batch.transpose(0, 1).reshape(-1)
    if batch.ndim > 2:
        return batch.reshape(-1)
    rows = batch.copy()
    rows.names = None  # the order of shuffled rows is not that of time
    return rows


def minibatch_indices(
    rows: int,
    *,
    epochs: int,
    parts: int,
    device: torch.device | str | None,
    permutation: Callable[[int, torch.device], Tensor] = random_permutation,
) -> Iterator[Tensor]:
    """``epochs * parts`` index tensors ``[rows / parts]`` int64; the parts of one epoch hold every row once.

    Args:
        rows: number of rows.
        epochs: passes over the rows.
        parts: minibatches of a pass.
        device: of the indices.
        permutation: makes the order of a pass; a compiled :func:`random_permutation`, say.

    Raises:
        ValueError: when ``parts`` does not divide ``rows``, for numbers below 1, and for no rows; at once, not at the
            first minibatch.
    """
    for name, value in (("epochs", epochs), ("parts", parts)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a positive integer, received {value!r}. Remedy: {name}=1.")
    if rows < 1 or rows % parts:
        raise ValueError(
            f"parts: expected a divisor of the {rows} rows, received {parts}. Remedy: powers of two for it and for the "
            "rows of a batch."
        )
    place = torch.device("cpu") if device is None else torch.device(device)
    return (index for _ in range(epochs) for index in permutation(rows, place).chunk(parts))


def minibatches(
    batch: TensorDictBase, *, epochs: int, parts: int, keys: Sequence[NestedKey] | None = None
) -> Iterator[TensorDictBase]:
    """Shuffled minibatches ``[R / parts]`` of the R rows of a batch: an epoch has each once, in fresh order.

    Args:
        batch: ``[N, T]``, such as a collector yields, or of any batch dims; with or without a device, nested entries
            and entries that are no tensors (which the host gathers).
        epochs: passes over the batch.
        parts: minibatches of a pass, a divisor of the rows, N * T.
        keys: the entries to keep; all by default. Fewer is less to gather.

    Raises:
        ValueError: at once, as :func:`flat_rows` and :func:`minibatch_indices`, and for a batch with the states of a
            recurrent module, which single steps cannot train.
        KeyError: for an entry that the batch does not have.
    """
    refuse_recurrent_rows(batch, "minibatches")
    rows = flat_rows(batch, keys)
    indices = minibatch_indices(rows.shape[0], epochs=epochs, parts=parts, device=_device_of(rows))
    return (rows[index] for index in indices)


def _device_of(batch: TensorDictBase) -> torch.device | None:
    """The batch's device, or that of its first tensor where it names none."""
    if batch.device is not None:
        return batch.device
    tensors = (value for value in batch.values(True, True) if isinstance(value, Tensor))
    return next((value.device for value in tensors), None)


def _dense(batch: TensorDictBase) -> TensorDictBase:
    """The batch with dense entries in place of lazy stacks; itself where it has none."""
    if isinstance(batch, LazyStackedTensorDict):
        try:
            return cast("TensorDictBase", batch.contiguous())
        except RuntimeError as error:
            raise ValueError(
                f"batch: expected entries of one shape in all rows, received a lazy stack of {list(batch.shape)} with "
                f"{_ragged(batch)}. Remedy: pad them, or keys= without them."
            ) from error
    nested = {key: value for key, value in batch.items() if isinstance(value, TensorDictBase)}
    changed = {key: dense for key, value in nested.items() if (dense := _dense_entry(value)) is not value}
    if not changed:
        return batch
    batch = batch.copy()
    for key, value in changed.items():
        batch.set(key, value)
    return batch


def _dense_entry(value: TensorDictBase) -> TensorDictBase:
    return value if is_non_tensor(value) else _dense(value)


def _ragged(batch: LazyStackedTensorDict) -> dict[str, list[list[int]]]:
    """The entries whose shapes differ from row to row, and those shapes."""
    found = {}
    for key in batch.tensordicts[0].keys(True, True):
        entries = [row.get(key, None) for row in batch.tensordicts]
        shapes = {tuple(entry.shape) if isinstance(entry, Tensor) else () for entry in entries}
        if len(shapes) > 1:
            found[str(key)] = [list(shape) for shape in sorted(shapes)]
    return found
