"""One call that wires storage, writer, sampler and buffer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler

from torchrl_perf.replay._checks import is_whole
from torchrl_perf.replay.buffer import DeviceReplayBuffer
from torchrl_perf.replay.buffer_options import REFUSED, check_buffer_options
from torchrl_perf.replay.epoch import DeviceSamplerWithoutReplacement
from torchrl_perf.replay.prioritized import DevicePrioritizedSampler
from torchrl_perf.replay.random import DeviceRandomSampler
from torchrl_perf.replay.slices import DeviceSliceSampler
from torchrl_perf.replay.storage import DeviceStorage
from torchrl_perf.replay.writer import DeviceWriter

SAMPLERS: dict[str, type[Sampler]] = {
    "random": DeviceRandomSampler,
    "epoch": DeviceSamplerWithoutReplacement,
    "prioritized": DevicePrioritizedSampler,
    "slice": DeviceSliceSampler,
}
_OF_BUFFER = frozenset(inspect.signature(DeviceReplayBuffer).parameters) - {"storage", "sampler", "writer", "options"}
_OF_STORAGE = ("num_streams", "final_fraction")


def make_replay_buffer(
    capacity: int,
    *,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    sampler: str | Sampler = "random",
    alpha: float | None = None,
    beta: float | None = None,
    n_step: int = 1,
    gamma: float = 0.99,
    compact: bool = False,
    **options: Any,
) -> DeviceReplayBuffer:
    """Makes a replay buffer on the device.

    Args:
        capacity: number of rows.
        batch_size: rows of a sample.
        device: where rows live and samples are made.
        sampler: "random" (uniform, with replacement), "epoch" (without replacement), "prioritized" (proportional
            prioritized experience replay, arXiv 1511.05952) or "slice" (windows of ``slice_len`` consecutive rows, by
            priority where ``alpha`` is given); or a sampler object, which has its options already.
        alpha: exponent of the priorities ("prioritized", 0.6 by default; "slice", uniform by default).
        beta: exponent of the importance weights, 0.4 by default ("prioritized"; "slice" with ``alpha``).
        n_step: rows of the n-step windows; 1 for plain rows.
        gamma: discount of the n-step windows; a window of one row has nothing to discount.
        compact: store each observation once.
        **options: of the sampler: ``slice_len`` (rows of a window, 8 by default; divides ``batch_size``), ``mask_key``,
            ``drop_last``, ...; of the storage: ``num_streams``, ``final_fraction``; of TorchRL's buffer, see
            :class:`DeviceReplayBuffer`: ``transform``, ``transform_factory``, ``prefetch``, ``pin_memory``,
            ``collate_fn``, ``priority_key``, ``generator``, ``delayed_init``, ``consume_after_n_samples``,
            ``sample_unit``; and ``capture`` (on by default: on CUDA calls become CUDA graphs once they repeat) and
            ``debug`` (names a sample that is read late).

    Returns:
        A buffer whose ``extend`` takes ``[N, T]`` batches (or flat ``[B]`` rows where neither n-step, nor ``compact``,
        nor slices need streams), whose ``sample`` gives ``[B]`` rows and whose ``len`` counts rows.

    Raises:
        ValueError: for an unknown sampler, a batch larger than the capacity with ``drop_last``, options out of range,
            of another sampler or without a meaning here, or slices together with n-step windows.
    """
    of_storage = {name: options.pop(name) for name in _OF_STORAGE if name in options}
    of_buffer = {name: options.pop(name) for name in (*_OF_BUFFER, *REFUSED, "compilable") if name in options}
    given = {"alpha": alpha, "beta": beta}
    sampler_options = {name: value for name, value in given.items() if value is not None} | options
    if "final_fraction" in of_storage and not compact:
        raise ValueError(
            "make_replay_buffer: expected final_fraction together with compact=True, received it without: plain rows "
            "have no side ring. Remedy: compact=True, or leave final_fraction out."
        )
    consumes = of_buffer.get("consume_after_n_samples") is not None
    if isinstance(sampler, str):
        made = _consuming(sampler, sampler_options) if consumes else _make_sampler(sampler, sampler_options, n_step)
    else:
        made = _given_sampler(sampler, sampler_options)
    storage = DeviceStorage(capacity, device=device, compact=compact, n_step=n_step, gamma=gamma, **of_storage)
    _check_batch_size(batch_size, capacity, made)
    of_buffer = check_buffer_options("make_replay_buffer", of_buffer, storage.device)
    writer = None if consumes else DeviceWriter()
    return DeviceReplayBuffer(storage=storage, sampler=made, writer=writer, batch_size=batch_size, **of_buffer)


def _check_batch_size(batch_size: Any, capacity: int, sampler: Any) -> None:
    """Check that the batch size is possible. With replacement it may exceed the number of rows.

    Raises:
        ValueError: if not.
    """
    if batch_size is None:
        return
    if not is_whole(batch_size):
        raise ValueError(
            f"make_replay_buffer: expected a batch_size of at least 1, received {batch_size!r}. Remedy: the number of "
            "rows of a sample, a whole one."
        )
    if batch_size > capacity and getattr(sampler, "drop_last", False):
        raise ValueError(
            f"make_replay_buffer: expected a batch_size from 1 to the capacity of {capacity} rows, received "
            f"{batch_size!r} with drop_last=True, which drops every batch. Remedy: a smaller batch_size, or a larger "
            "capacity."
        )


def _consuming(name: str, options: dict[str, Any]) -> Sampler:
    """The sampler that TorchRL's buffer replaces by one that removes rows.

    Raises:
        ValueError: for another sampler than "random", or with options.
    """
    if name != "random" or options:
        raise ValueError(
            f"make_replay_buffer: expected consume_after_n_samples with uniform draws, received the sampler {name!r} "
            f"with {sorted(options)}. Remedy: sampler='random' without options."
        )
    return RandomSampler()


def _given_sampler(sampler: Any, options: dict[str, Any]) -> Any:
    """A sampler object, to which no options can be added.

    Raises:
        ValueError: with options.
    """
    if options:
        raise ValueError(
            f"make_replay_buffer: expected no options for the sampler {sampler!r}, received {sorted(options)}. Remedy: "
            "give them to the sampler itself, or choose one by name."
        )
    return sampler


def _make_sampler(name: str, options: dict[str, Any], n_step: int) -> Sampler:
    """The sampler of a name, with the options that it takes.

    Raises:
        ValueError: for an unknown name, and for options that other samplers take, or none.
    """
    if name not in SAMPLERS:
        raise ValueError(
            f"make_replay_buffer: expected a sampler of {tuple(SAMPLERS)}, received {name!r}. Remedy: one of these."
        )
    if name == "slice" and n_step > 1:
        raise ValueError(
            "make_replay_buffer: expected n_step=1 with slices, which hold consecutive one-step rows, received "
            f"n_step={n_step}. Remedy: n_step=1 and a return over the slice, for example TD(lambda)."
        )
    takes = _options_of(name)
    for option, value in options.items():
        if option in takes:
            continue
        others = [f"{other!r}" for other in SAMPLERS if option in _options_of(other)]
        remedy = f"sampler={' or '.join(others)}, which takes it" if others else f"one of {sorted(takes)}"
        raise ValueError(
            f"make_replay_buffer: expected options of the sampler {name!r}, received {option}={value!r}. Remedy: "
            f"{remedy}."
        )
    if name == "slice":
        if "alpha" not in options and ("beta" in options or "eps" in options):
            raise ValueError(
                "make_replay_buffer: expected alpha together with beta or eps, received slices without it, which are "
                "drawn uniformly. Remedy: alpha=0.6 for slices by priority, or neither."
            )
        options = {"slice_len": 8, **options}
    return SAMPLERS[name](**options)


def _options_of(name: str) -> set[str]:
    """Options of a sampler for users; ``max_capacity``, ``dtype`` and ``device`` come from the storage."""
    return set(inspect.signature(SAMPLERS[name]).parameters) - {"max_capacity", "dtype", "device", "options"}
