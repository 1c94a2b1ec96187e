"""Checks of arguments, batches and states; each error says what was expected, what was received, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from tensordict.utils import unravel_key
from torch import Tensor
from torchrl.data.replay_buffers.sample_units import Sequence as SequenceSampleUnit
from torchrl.data.replay_buffers.samplers import SliceSampler
from torchrl.data.replay_buffers.writers import TensorDictMaxValueWriter

from torchrl_perf.replay.layout import Field, Key, Leaves, describe, readable_key
from torchrl_perf.runtime.upstream.buffers import sample_unit_of, sampler_of, writer_of


def is_whole(number: Any) -> bool:
    """Whether an argument is a whole number of at least 1 (``1e6`` is)."""
    return isinstance(number, Real) and 1 <= float(number) < float("inf") and int(number) == float(number)


def refuse_options(name: str, given: Mapping[str, Any], known: Mapping[str, tuple[Any, str]]) -> None:
    """Check that options of TorchRL's counterpart are left at their defaults where they would be ignored.

    Args:
        name: the class.
        given: the options that it was given beside its own.
        known: default of each of TorchRL's options (None: any value), and why others have no meaning.

    Raises:
        TypeError: for an unknown option.
        ValueError: for another value than the default, naming the option and the reason.
    """
    for option, value in given.items():
        if option not in known:
            raise TypeError(
                f"{name}: expected its own options or TorchRL's {sorted(known)}, received {option}={value!r}. Remedy: "
                "take it out."
            )
        default, reason = known[option]
        if default is not None and value is not None and value != default:
            raise ValueError(
                f"{name}: expected {option}={default!r}, received {value!r}: {reason}. Remedy: leave {option} out."
            )


def check_device(device: torch.device | str) -> torch.device:
    """The device, if this machine has one of its kind.

    Raises:
        ValueError: for CUDA where there is none.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"DeviceStorage: expected a device of this machine, received {str(device)!r}, and PyTorch sees no CUDA. "
            "Remedy: device='cpu'."
        )
    return torch.device(device)


def check_sampler(buffer: Any, keys: Iterable[Key], streams: int, max_size: int) -> None:
    """Check that a buffer's sampler can serve rows like those of a first batch, before they are written.

    Args:
        buffer: its sampler's ``mask_key``, ``end_key`` and ``slice_len`` are read, if it has them.
        keys: entries of the batch.
        streams: envs N of the batch.
        max_size: rows of the storage.

    Raises:
        KeyError: if it reads an entry that the batch lacks.
        ValueError: if its slices are longer than what the storage holds of each stream, for TorchRL's slices of a batch
            of several streams, and for slices where the writer keeps rows in no order of time.
    """
    sampler, writer, unit = sampler_of(buffer), writer_of(buffer), sample_unit_of(buffer)
    if isinstance(unit, SequenceSampleUnit) and streams > 1:
        raise ValueError(
            f"{type(unit).__name__}: expected rows of one env, one after the other, received a batch of {streams} "
            "envs, whose rows lie side by side. Nothing was written. Remedy: DeviceSliceSampler(slice_len), which "
            "follows each env, or flat rows [B] of one env."
        )
    if hasattr(sampler, "slice_len") and isinstance(writer, TensorDictMaxValueWriter):
        raise ValueError(
            f"{type(sampler).__name__}: expected a writer that keeps the order of time, received "
            f"{type(writer).__name__}. Nothing was written. Remedy: DeviceWriter, TorchRL's round-robin writers, or a "
            "sampler of single rows."
        )
    if isinstance(sampler, SliceSampler):
        _check_slices_of_torchrl(sampler, streams)
        return
    name = type(sampler).__name__
    slice_len = getattr(sampler, "slice_len", None)
    read = [getattr(sampler, "mask_key", None), None if slice_len is None else getattr(sampler, "end_key", None)]
    for key in read:
        if key is not None and _as_key(key) not in keys:
            raise KeyError(
                f"{name}: expected the batch to have {key!r}, received keys {sorted(map(readable_key, keys))}. Nothing "
                "was written. Remedy: another mask_key or end_key, or a batch with that entry."
            )
    if slice_len is not None and slice_len > max_size // max(streams, 1) > 0:
        raise ValueError(
            f"{name}: expected slice_len of at most the {max_size // streams} time rows that the storage holds of each "
            f"of {streams} streams, received {slice_len}. Nothing was written. Remedy: a larger capacity."
        )


def _check_slices_of_torchrl(sampler: Any, streams: int) -> None:
    if streams > 1:
        name = type(sampler).__name__
        raise ValueError(
            f"{name}: expected rows of one env, one after the other, received a batch of {streams} envs, whose rows "
            "lie side by side: its slices would mix them. Nothing was written. Remedy: DeviceSliceSampler(slice_len), "
            "which follows each env, or flat rows [B] of one env."
        )


def _as_key(key: Any) -> Key:
    key = unravel_key(key)
    return (key,) if isinstance(key, str) else tuple(key)


def check_dim_extend(dim_extend: int | None) -> None:
    """Check that a buffer does not transpose the batches that it passes on.

    Raises:
        ValueError: for ``dim_extend`` above 0.
    """
    if dim_extend:
        raise ValueError(
            f"DeviceStorage: expected dim_extend=None, received {dim_extend}. A batch [N, T] is added along time, a "
            "batch [B] along its rows, whatever it says. Remedy: leave dim_extend out, and extend with the batch as it "
            "was collected."
        )


def check_checkpointer(value: Any, kind: type) -> None:
    """Check that a storage is saved by its own checkpointer, which knows how rows are packed.

    Raises:
        ValueError: for another one.
    """
    if value is not None and not isinstance(value, kind):
        raise ValueError(
            f"DeviceStorage: expected checkpointer=None or a {kind.__name__}, received {type(value).__name__}: rows "
            "are packed, which no other checkpointer knows. Remedy: leave checkpointer out; for files of TorchRL's, "
            "TensorDict.memmap of rb[:]."
        )


def row_shape_error(received: tuple[int, ...], expected: tuple[int, ...]) -> ValueError:
    """The error for rows of other batch dims than those stored."""
    return ValueError(
        f"DeviceStorage: expected rows of batch_size {list(expected)} as in the first extend, received "
        f"{list(received)}. Nothing was written. Remedy: reshape the batch, or use another buffer."
    )


def broadcasts(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a tensor of one shape can be expanded to another."""
    return len(shape) <= len(whole) and all(
        size in (1, full) for size, full in zip(reversed(shape), reversed(whole), strict=False)
    )


def check_options(
    max_size: int, num_streams: int | None, n_step: int, gamma: float, final_fraction: float
) -> tuple[int, int | None]:
    """Options of a storage, as integers.

    Raises:
        ValueError: for one out of range.
    """
    if not is_whole(max_size):
        raise ValueError(
            f"DeviceStorage: expected max_size >= 1 rows, received {max_size!r}. Remedy: the number of rows to hold."
        )
    if num_streams is not None and not 1 <= num_streams <= max_size:
        raise ValueError(
            f"DeviceStorage: expected 1 <= num_streams <= max_size={max_size}, received {num_streams}. Remedy: at "
            "least one row for each env."
        )
    if not is_whole(n_step):
        raise ValueError(
            f"DeviceStorage: expected n_step >= 1, received {n_step!r}. Remedy: n_step=1, the plain one-step target."
        )
    if not 0 <= gamma <= 1:
        raise ValueError(
            f"DeviceStorage: expected gamma in [0, 1], received {gamma}. Remedy: the loss's discount, such as 0.99."
        )
    if not 0 < final_fraction <= 1:
        raise ValueError(
            f"DeviceStorage: expected final_fraction in (0, 1], received {final_fraction}. Remedy: the share of rows "
            "that end an episode or a batch, whose true final observations are kept apart; 1.0 is enough for all."
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
    if streams < 1:
        raise ValueError(
            f"DeviceStorage: expected at least one env, received batch_size {list(batch_size)}. Remedy: a batch [N, T] "
            "with N >= 1."
        )
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
    """Check that a later batch is laid out as the first was.

    Raises:
        ValueError: if not.
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
    """Check that entries to be written in place are stored, each row its own, in their dtype and shape.

    Raises:
        ValueError: if not.
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
    """Check that rows come with their streams if something needs these.

    Raises:
        ValueError: for flat rows with n-step returns or with ``compact``.
    """
    if flat and (n_step > 1 or compact):
        option = f"n_step={n_step}" if n_step > 1 else "compact=True"
        raise ValueError(
            f"DeviceStorage: {option} needs the order of time in each env: expected a batch [N, T], received flat rows "
            "[B]. Remedy: extend with the collector's [N, T] batch (one env: td.unsqueeze(0)), or "
            "n_step=1, compact=False."
        )


def check_fields(fields: Sequence[Field]) -> None:
    """Check that rows have entries at all.

    Raises:
        ValueError: if not.
    """
    if not fields:
        raise ValueError(
            "DeviceStorage: expected rows with entries, received a batch without any. Remedy: extend with the "
            "collector's batch; 'index' and other entries of samples are not stored."
        )


def check_n_step_fields(fields: Sequence[Field]) -> None:
    """Check that rows have a reward and one done flag each, and are not n-step returns already.

    Raises:
        ValueError: if not.
    """
    known = {field.key: field for field in fields}
    for key in (("next", "reward"), ("next", "done")):
        if key not in known:
            raise ValueError(
                f"DeviceStorage: expected {key} in the batch for n_step > 1, received {describe(fields)}. Remedy: "
                "n_step=1, or batches with reward and done under 'next'."
            )
    clash = [key[0] for key in (("steps_to_next_obs",), ("gamma",)) if key in known]
    if clash:
        raise ValueError(
            f"DeviceStorage: expected rows without {clash}, which n_step > 1 writes into its samples, received a "
            "batch with them, whose rewards are n-step returns already. Remedy: n_step=1, or extend with one-step "
            "rows."
        )
    done = known["next", "done"]
    if done.dtype != torch.bool or any(size != 1 for size in done.shape):
        raise ValueError(
            f"DeviceStorage: expected one bool done flag a row for n_step > 1, received {done}. Remedy: an env whose "
            "agents share their done, or n_step=1."
        )


def check_state(state: Any, mark: str | None, name: str) -> None:
    """Check that a state is from this kind of sampler.

    Args:
        state: the state.
        mark: an entry that no other kind has; None for the kind without entries.
        name: the kind.

    Raises:
        ValueError: if not.
    """
    if not isinstance(state, Mapping) or (state if mark is None else mark not in state):
        entry = "no entries" if mark is None else f"an entry {mark!r}"
        received = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"{name}: expected a state with {entry}, received one with {received}. Nothing was changed. Remedy: "
            "make the buffer with the sampler that the state was saved with."
        )


def check_entries_of_state(state: Any, entries: Mapping[str, type | tuple[type, ...]], name: str) -> None:
    """Check that a state has all entries, each of its type; a tensor must be as the class later checks it.

    Args:
        state: the state.
        entries: type or types of each entry.
        name: the class that it is for.

    Raises:
        ValueError: if not, naming the first entry that is wrong.
    """
    if not isinstance(state, Mapping):
        raise state_error(name, f"a dict with {sorted(entries)}", type(state).__name__)
    for key, kinds in entries.items():
        if key not in state:
            raise state_error(name, f"an entry {key!r}", f"entries {sorted(map(str, state))}")
        value, allowed = state[key], kinds if isinstance(kinds, tuple) else (kinds,)
        allowed = (*allowed, int) if float in allowed else allowed
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            expected = " or ".join(kind.__name__ for kind in allowed)
            raise state_error(name, f"{key!r} as {expected}", f"{type(value).__name__}")


def check_least_of_state(state: Mapping[str, Any], least: Mapping[str, int], name: str) -> None:
    """Check that numbers of a state, if it has them, are finite and not below a bound.

    Raises:
        ValueError: if not, naming the first that is not.
    """
    for key, smallest in least.items():
        value = state.get(key)
        if value is not None and not smallest <= value < float("inf"):
            raise state_error(name, f"{key!r} of at least {smallest}", f"{value}")


def check_tensor_of_state(value: Any, like: Tensor, key: str, name: str) -> None:
    """Check that an entry of a state is a tensor of the shape and dtype of its target.

    Raises:
        ValueError: if not.
    """
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        received = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise state_error(name, f"{key!r} as {like.dtype} {list(like.shape)}", received)


def check_tree_state(state: Any, num_slots: int | None, name: str) -> None:
    """Check that a state is from a tree of ``num_slots`` slots (None for any number).

    Raises:
        ValueError: if not.
    """
    check_entries_of_state(state, {"num_slots": int, "weights": Tensor}, name)
    saved, weights = state["num_slots"], state["weights"]
    if num_slots is not None and saved != num_slots:
        raise ValueError(
            f"{name}: expected the state of {num_slots} slots, received that of {saved}. Nothing was changed. Remedy: "
            "build the buffer with the capacity and the number of envs of the checkpoint."
        )
    check_tensor_of_state(weights, weights.new_empty(weights.shape[:1], dtype=torch.float32), "weights", name)
    if weights.shape[0] > saved:
        raise state_error(name, f"at most {saved} weights", f"{weights.shape[0]}")
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise state_error(name, "finite weights of at least 0", "others among them")


def state_error(name: str, expected: str, received: str) -> ValueError:
    """The error for a state that does not fit."""
    return ValueError(
        f"{name}: expected a state with {expected}, received {received}. Nothing was changed. Remedy: the state of a "
        "buffer made with the same arguments, as state_dict() or dumps() of this version wrote it."
    )


def checked_alpha(alpha: float) -> float:
    """The exponent of priorities.

    Raises:
        ValueError: if it is negative or not finite.
    """
    if not 0 <= alpha < float("inf"):
        raise ValueError(
            f"DevicePrioritizedSampler: expected alpha >= 0, received {alpha}. Remedy: alpha=0.0 draws uniformly."
        )
    return float(alpha)


def checked_beta(beta: float) -> float:
    """The exponent of importance weights.

    Raises:
        ValueError: if it is not in [0, 1].
    """
    if not 0 <= beta <= 1:
        raise ValueError(
            f"DevicePrioritizedSampler: expected beta in [0, 1], received {beta}. Remedy: beta=1.0 corrects in full."
        )
    return float(beta)


def one_each(values: Tensor, slot: Tensor, name: str) -> Tensor:
    """Values as ``[B]`` or 0-d; one for each of B slots, or one for all.

    Raises:
        ValueError: for another number of values.
    """
    if values.ndim == 0:
        return values
    if values.numel() != slot.numel() or values.squeeze().shape != slot.squeeze().shape:
        raise ValueError(
            f"DevicePrioritizedSampler: expected one {name} for all or one for each slot, slots of shape "
            f"{tuple(slot.shape)}, received {values.dtype} {tuple(values.shape)}. Remedy: reduce it to that shape."
        )
    return values.reshape(-1)
