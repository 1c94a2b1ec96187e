"""Shuffled minibatches of a rollout, without a host wait."""

from collections.abc import Callable, Iterator, Sequence

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.functional.permutation import random_permutation
from torchrl_perf.trainers.recurrent import refuse_recurrent_rows


def flat_rows(batch: TensorDictBase, keys: Sequence[NestedKey] | None = None) -> TensorDictBase:
    """The transitions of ``batch [N, T]`` as ``[T * N]`` rows, time-major: views of a collector's batch, not copies.

    Args:
        batch: ``[N, T]``.
        keys: the entries to keep; all by default.
    """
    if keys is not None:
        batch = batch.select(*keys)
    return batch.transpose(0, 1).reshape(-1)


def minibatch_indices(
    rows: int,
    *,
    epochs: int,
    parts: int,
    device: torch.device,
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
        ValueError: when ``parts`` does not divide ``rows``.
    """
    if rows % parts:
        raise ValueError(f"parts: expected a divisor of the {rows} rows, received {parts}.")
    for _ in range(epochs):
        yield from permutation(rows, device).chunk(parts)


def minibatches(
    batch: TensorDictBase, *, epochs: int, parts: int, keys: Sequence[NestedKey] | None = None
) -> Iterator[TensorDictBase]:
    """Shuffled minibatches ``[N * T / parts]`` of ``batch [N, T]``: an epoch has every transition once, in fresh order.

    Args:
        batch: ``[N, T]``, such as a collector yields.
        epochs: passes over the batch.
        parts: minibatches of a pass, a divisor of N * T.
        keys: the entries to keep; all by default. Fewer is less to gather.

    Raises:
        ValueError: at the first minibatch, for ``parts`` that do not divide the rows, and for a batch with the states
            of a recurrent module, which single steps cannot train.
    """
    refuse_recurrent_rows(batch, "minibatches")
    rows = flat_rows(batch, keys)
    for index in minibatch_indices(rows.shape[0], epochs=epochs, parts=parts, device=batch.device):
        yield rows[index]
