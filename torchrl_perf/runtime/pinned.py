"""Packed records that cross between host and device in one copy."""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

__all__ = ["PackedRecord"]

_ALIGNMENT = 16  # bytes: every dtype may be viewed in place, on the host and on the device

Field = tuple[tuple[int, ...], torch.dtype]


class PackedRecord:
    """Fields side by side in one block of bytes, twice: in page-locked host memory and on the device.

    One copy moves all of them, behind the work of the current stream. The host side has ``slots`` blocks that take
    turns, so that the next record can be written while the copy of the last one still runs; each block has an event
    behind its copy, which :meth:`write` and :meth:`wait` wait for. On a CPU the same code copies plainly.

    Args:
        fields: shape and dtype of each field.
        device: the other side.
        slots: number of host blocks.

    Attributes:
        device_fields: the fields on the device, contiguous tensors that stay where they are.
    """

    def __init__(self, fields: Sequence[Field], device: torch.device, *, slots: int = 2) -> None:
        self._cuda = device.type == "cuda"
        spans, size = [], 0
        for shape, dtype in fields:
            nbytes = prod(shape) * dtype.itemsize
            spans.append((size, size + nbytes))
            size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host_bytes = [torch.zeros(size, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(slots)]
        self.device_fields = _views(self._device_bytes, fields, spans)
        self._host_fields = [[np.asarray(v) for v in _views(block, fields, spans)] for block in self._host_bytes]
        self._copied = [torch.cuda.Event() if self._cuda else None for _ in range(slots)]
        self._slot = 0

    @property
    def host_fields(self) -> list[np.ndarray]:
        """The fields of the current host block, as arrays over its memory."""
        return self._host_fields[self._slot]

    def write(self, *, advance: bool = True) -> list[np.ndarray]:
        """Host fields that may be overwritten: those of the next block, or of the current one.

        Waits for the last copy from or to that block, which has long ended where blocks take turns.
        """
        if advance:
            self._slot = (self._slot + 1) % len(self._host_bytes)
        self.wait()
        return self.host_fields

    def upload(self) -> None:
        """Copy the current host block to the device; does not wait."""
        self._device_bytes.copy_(self._host_bytes[self._slot], non_blocking=self._cuda)
        self._record()

    def download(self) -> None:
        """Copy the device's block to the current host block; does not wait: see :meth:`wait`."""
        self._host_bytes[self._slot].copy_(self._device_bytes, non_blocking=self._cuda)
        self._record()

    def wait(self) -> list[np.ndarray]:
        """The current host fields, once the last copy from or to them has ended; never waits for the whole device."""
        event = self._copied[self._slot]
        if event is not None:
            event.synchronize()
        return self.host_fields

    def _record(self) -> None:
        event = self._copied[self._slot]
        if event is not None:
            event.record(torch.cuda.current_stream(self._device_bytes.device))


def _views(block: Tensor, fields: Sequence[Field], spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [
        block[first:last].view(dtype).view(shape) for (shape, dtype), (first, last) in zip(fields, spans, strict=True)
    ]
