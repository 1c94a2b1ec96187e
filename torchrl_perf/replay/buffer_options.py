"""Which of TorchRL's options a buffer of device parts accepts, and why it refuses the others."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import ConsumingSampler

_ONE_PROCESS = "the rows belong to one process, which extends and samples"

REFUSED: dict[str, tuple[Any, str]] = {
    "dim_extend": (None, "batches [N, T] are added along time and batches [B] along their rows, whatever it says"),
    "shared": (False, _ONE_PROCESS),
    "checkpointer": (None, "rows are packed, and saved by a checkpointer of their own"),
    "service_backend": ("direct", _ONE_PROCESS),
    "service_backend_options": (None, _ONE_PROCESS),
    "transport": ("auto", _ONE_PROCESS),
    "transport_options": (None, _ONE_PROCESS),
}
"""Option: the value that is its default, and why no other has a meaning here."""


def check_buffer_options(name: str, options: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Options for ``TensorDictReplayBuffer``, without those that are left at their defaults here.

    Args:
        name: the class or function that was called.
        options: what it was given for TorchRL's buffer.
        device: device of the storage, where it is known.

    Raises:
        ValueError: for an option that would be ignored, naming it and the reason.
    """
    for option, (default, reason) in REFUSED.items():
        given = options.pop(option, default)
        if given != default and not (option == "transport" and given == "direct"):
            raise ValueError(f"{name}: expected no {option}, received {given!r}: {reason}. Remedy: leave {option} out.")
    if options.get("compilable") is False:
        raise ValueError(
            f"{name}: expected compilable=None or True, received False: counters are plain numbers and device tensors "
            "in any case. Remedy: leave compilable out."
        )
    options.pop("compilable", None)
    if device is None:
        return options
    if options.get("pin_memory") and device.type != "cpu":
        raise ValueError(
            f"{name}: expected pin_memory=False, received True: samples are on {device} already, and only memory of a "
            "CPU can be pinned. Remedy: leave pin_memory out."
        )
    generator = options.get("generator")
    if generator is not None and generator.device.type != device.type:
        raise ValueError(
            f"{name}: expected a generator on {device}, where samples are drawn, received one on {generator.device}. "
            f"Remedy: torch.Generator({str(device)!r})."
        )
    return options


def is_consuming(options: dict[str, Any]) -> bool:
    """Whether a buffer removes rows once sampled: its writer must know free slots, as TorchRL's do."""
    sampler = options.get("sampler")
    return options.get("consume_after_n_samples") is not None or isinstance(sampler, ConsumingSampler)
