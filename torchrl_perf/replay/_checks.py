"""What is refused, with what was expected, what came and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from torchrl_perf.replay.layout import Field, Key, Leaves, describe, readable_key


def check_options(
    max_size: int, num_streams: int | None, n_step: int, gamma: float, final_fraction: float
) -> tuple[int, int | None]:
    """Options of a storage, as integers.

    Raises:
        ValueError: for one that makes no sense.
    """
    if int(max_size) != max_size or max_size <= 0:
        raise ValueError(f"DeviceStorage: expected max_size >= 1 rows, received {max_size}.")
    if num_streams is not None and not 1 <= num_streams <= max_size:
        raise ValueError(
            f"DeviceStorage: expected 1 <= num_streams <= max_size={max_size}, received {num_streams}. Remedy: at "
            "least one row for each env."
        )
    if int(n_step) != n_step or n_step < 1:
        raise ValueError(f"DeviceStorage: expected n_step >= 1, received {n_step}; 1 is the plain one-step target.")
    if not 0 <= gamma <= 1:
        raise ValueError(f"DeviceStorage: expected gamma in [0, 1], received {gamma}.")
    if not 0 < final_fraction <= 1:
        raise ValueError(
            f"DeviceStorage: expected final_fraction in (0, 1], received {final_fraction}: the share of rows whose "
            "true final observation is kept apart, so about the share of rows that end an episode or a batch."
        )
    return int(max_size), num_streams


def check_streams(batch_size: Sequence[int], max_size: int, num_streams: int | None) -> int:
    """Number of streams N of the first batch.

    Raises:
        ValueError: for a batch with other than one or two dimensions, with other streams than announced, or with more
            streams than there are rows.
    """
    if len(batch_size) not in (1, 2):
        raise ValueError(
            f"DeviceStorage: expected a batch [N, T] (envs, time) or [B] (rows), received batch_size "
            f"{list(batch_size)}. Remedy: td.reshape(...) to one of the two."
        )
    streams = batch_size[0] if len(batch_size) == 2 else 1
    if num_streams is not None and (streams != num_streams or len(batch_size) != 2):
        raise ValueError(
            f"DeviceStorage: expected batches [{num_streams}, T] as num_streams={num_streams} says, received "
            f"batch_size {list(batch_size)}. Remedy: num_streams=None, or batches of that many envs."
        )
    if streams > max_size:
        raise ValueError(
            f"DeviceStorage: expected max_size >= the {streams} envs of the batch {list(batch_size)}, received "
            f"max_size={max_size}. Remedy: max_size of at least {streams}, better a multiple of it."
        )
    return streams


def check_batch(batch_size: Sequence[int], num_streams: int, flat: bool) -> None:
    """That a later batch is laid out as the first was.

    Raises:
        ValueError: otherwise.
    """
    fits = len(batch_size) == 1 if flat else len(batch_size) == 2 and batch_size[0] == num_streams
    if not fits:
        expected = "[B] (rows without streams)" if flat else f"[{num_streams}, T] (envs, time)"
        raise ValueError(
            f"DeviceStorage: expected batches {expected} as in the first extend, received batch_size "
            f"{list(batch_size)}. Nothing was written. Remedy: reshape the batch, or use another buffer."
        )


def layout_error(expected: Iterable[Field], received: Iterable[Field]) -> ValueError:
    """The error for a batch whose entries differ from those stored, naming each difference."""
    stored = {field.key: field for field in expected}
    came = {field.key: field for field in received}
    parts = [f"missing {field}" for key, field in sorted(stored.items()) if key not in came]
    parts += [f"unexpected {field}" for key, field in sorted(came.items()) if key not in stored]
    for key, field in sorted(stored.items()):
        other = came.get(key)
        if other is not None and (other.dtype, other.shape) != (field.dtype, field.shape):
            parts.append(f"expected {field}, received {other}")
    return ValueError(
        f"DeviceStorage: the batch has another layout than the rows stored: {'; '.join(parts)}. Expected "
        f"{describe(stored.values())}, received {describe(came.values())}. Nothing was written. Remedy: td.select(...) "
        "the stored keys and cast to their dtypes, or use another buffer."
    )


def check_entries(leaves: Leaves, batch_size: Sequence[int], own: Mapping[Key, Field]) -> None:
    """That entries to be written in place are stored, each row its own, in their dtype and shape.

    Raises:
        ValueError: otherwise.
    """
    for key, leaf in leaves.items():
        field = own.get(key)
        if field is None or leaf.dtype != field.dtype or tuple(leaf.shape) != (*batch_size, *field.shape):
            raise ValueError(
                f"DeviceStorage.set: expected entries {describe(own.values())} of batch_size {list(batch_size)}, "
                f"received {readable_key(key)}: {leaf.dtype}{list(leaf.shape)}. Nothing was written. Remedy: "
                "td.select(...); with compact=True observations are shared by rows and stay as they are."
            )


def check_streams_known(flat: bool, n_step: int, compact: bool) -> None:
    """That rows come with their streams where something needs them.

    Raises:
        ValueError: for flat rows with n-step returns or with `compact`.
    """
    if flat and (n_step > 1 or compact):
        option = f"n_step={n_step}" if n_step > 1 else "compact=True"
        raise ValueError(
            f"DeviceStorage: {option} needs the order of time in each env: expected a batch [N, T], received flat rows "
            "[B]. Remedy: extend with the collector's [N, T] batch (one env: td.unsqueeze(0)), or "
            "n_step=1, compact=False."
        )


def check_n_step_fields(fields: Sequence[Field]) -> None:
    """That rows have what n-step returns are made of, one done flag each, and are not n-step returns themselves.

    Raises:
        ValueError: otherwise.
    """
    known = {field.key: field for field in fields}
    for key in (("next", "reward"), ("next", "done")):
        if key not in known:
            raise ValueError(
                f"DeviceStorage: n_step > 1 reads {key}, which the batch lacks: {describe(fields)}. Remedy: n_step=1, "
                "or batches with reward and done under 'next'."
            )
    clash = [key[0] for key in (("steps_to_next_obs",), ("gamma",)) if key in known]
    if clash:
        raise ValueError(
            f"DeviceStorage: n_step > 1 writes {clash} into its samples, but the batch has them: its rewards are "
            "n-step returns already. Remedy: n_step=1, or extend with one-step rows."
        )
    done = known["next", "done"]
    if done.dtype != torch.bool or any(size != 1 for size in done.shape):
        raise ValueError(
            f"DeviceStorage: n_step > 1 needs one bool done flag a row, received {done}. Remedy: an env whose agents "
            "share their done, or n_step=1."
        )
