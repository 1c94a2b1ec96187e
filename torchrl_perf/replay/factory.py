"""One call that wires storage, writer, sampler and buffer."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_perf.replay._checks import is_whole
from torchrl_perf.replay.buffer import DeviceReplayBuffer
from torchrl_perf.replay.storage import DeviceStorage
from torchrl_perf.replay.writer import DeviceWriter

SAMPLERS = ("random", "epoch", "prioritized", "slice")


def make_replay_buffer(
    capacity: int,
    *,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    sampler: str = "random",
    alpha: float = 0.6,
    beta: float = 0.4,
    n_step: int = 1,
    gamma: float = 0.99,
    compact: bool = False,
    **sampler_options: Any,
) -> DeviceReplayBuffer:
    """Makes a replay buffer on the device.

    Args:
        capacity: number of rows.
        batch_size: rows of a sample.
        device: where rows live and samples are made.
        sampler: "random" (uniform, with replacement), "epoch" (without replacement), "prioritized" (proportional
            prioritized experience replay, arXiv 1511.05952) or "slice" (windows of ``slice_len`` consecutive rows).
        alpha: exponent of the priorities ("prioritized").
        beta: exponent of the importance weights ("prioritized").
        n_step: rows of the n-step windows; 1 for plain rows.
        gamma: discount of the n-step windows.
        compact: store each observation once.
        **sampler_options: further arguments of the sampler: ``slice_len`` (rows of a window, 8 by default; divides
            ``batch_size``), ``mask_key``, ``drop_last``, ...

    Returns:
        A buffer whose ``extend`` takes ``[N, T]`` batches (or flat ``[B]`` rows where neither n-step, nor ``compact``,
        nor slices need streams), whose ``sample`` gives ``[B]`` rows and whose ``len`` counts rows.

    Raises:
        ValueError: for an unknown sampler, a batch larger than the capacity, options out of range, or slices together
            with n-step windows.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"make_replay_buffer: expected a sampler of {SAMPLERS}, received {sampler!r}.")
    if sampler == "slice" and n_step > 1:
        raise ValueError(
            f"make_replay_buffer: slices hold consecutive one-step rows, received n_step={n_step}. Remedy: n_step=1 "
            "and a return over the slice, for example TD(lambda)."
        )
    storage = DeviceStorage(capacity, device=device, compact=compact, n_step=n_step, gamma=gamma)
    if batch_size is not None and not (is_whole(batch_size) and batch_size <= capacity):
        raise ValueError(
            f"make_replay_buffer: expected a batch_size from 1 to the capacity of {capacity} rows, received "
            f"{batch_size!r}. Remedy: a smaller batch_size, or a larger capacity."
        )
    if sampler == "prioritized":
        sampler_options = {"alpha": alpha, "beta": beta, **sampler_options}
    made = _make_sampler(sampler, sampler_options)
    return DeviceReplayBuffer(storage=storage, sampler=made, writer=DeviceWriter(), batch_size=batch_size)


def _make_sampler(name: str, options: dict[str, Any]) -> Sampler:
    if name == "random":
        from torchrl_perf.replay.random import DeviceRandomSampler

        return DeviceRandomSampler(**options)
    if name == "epoch":
        from torchrl_perf.replay.epoch import DeviceSamplerWithoutReplacement

        return DeviceSamplerWithoutReplacement(**options)
    if name == "prioritized":
        from torchrl_perf.replay.prioritized import DevicePrioritizedSampler

        return DevicePrioritizedSampler(**options)
    from torchrl_perf.replay.slices import DeviceSliceSampler

    return DeviceSliceSampler(options.pop("slice_len", 8), **options)
