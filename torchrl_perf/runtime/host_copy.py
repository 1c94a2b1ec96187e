"""The one copy from the device to the host that logging makes."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_and_wait(source: Tensor, pinned: Tensor) -> None:
    """Copy a CUDA tensor into a pinned host buffer and wait for an event right behind the copy.

    Only the work in front of the copy on the current stream is waited for, never the device, and the source stays
    referenced until the copy has ended, so the buffer may be read as soon as this returns.

    Args:
        source: tensor on a CUDA device.
        pinned: tensor of the same shape and dtype in page-locked host memory.

    Raises:
        ValueError: if ``pinned`` is not page-locked, which would make the copy block the whole stream.
    """
    if not pinned.is_pinned():
        raise ValueError(
            f"copy_and_wait: expected a page-locked host buffer of shape {tuple(source.shape)}, got a pageable one. "
            "Allocate it with pin_memory=True."
        )
    pinned.copy_(source, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(source.device))
    arrived.synchronize()
