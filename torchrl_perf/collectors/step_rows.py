"""Memory of a rollout, one row a step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["StepRows"]

ALIGNMENT = 16  # bytes


class StepRows:
    """Time-major buffers ``[steps, *]``, and the rows to which steps are written.

    A compiled kernel reads 16 bytes at once. An input that does not begin at a multiple of that is copied before each
    call, and copied back where it was written: of a bool for each of four envs that is three rows in four, and two
    launches a row. So such rows lie apart, and :meth:`settle` moves all of a buffer in one launch.

    Args:
        likes: a row of each buffer, whose shape and dtype it has.
        steps: rows of each buffer.
        device: of the buffers.
        aligned: whether rows begin at multiples of 16 bytes.

    Attributes:
        buffers: ``[steps, *]`` each, contiguous.
        rows: for each step the row of each buffer, to be read and written.
    """

    def __init__(self, likes: Sequence[Tensor], steps: int, device: torch.device, *, aligned: bool) -> None:
        self.buffers = [torch.zeros((steps, *like.shape), dtype=like.dtype, device=device) for like in likes]
        self._apart: list[tuple[Tensor, Tensor]] = []
        places = [self._place(buffer) if aligned else buffer for buffer in self.buffers]
        self.rows = [[place[step] for place in places] for step in range(steps)]

    def _place(self, buffer: Tensor) -> Tensor:
        """Where the rows of a buffer are written: there, or apart."""
        size, unit = math.prod(buffer.shape[1:]), max(1, ALIGNMENT // buffer.dtype.itemsize)
        if size % unit == 0:
            return buffer
        padded = torch.zeros(len(buffer), -(-size // unit) * unit, dtype=buffer.dtype, device=buffer.device)
        apart = padded[:, :size].unflatten(1, buffer.shape[1:]) if buffer.ndim > 1 else padded[:, 0]
        self._apart.append((buffer, apart))
        return apart

    def settle(self) -> None:
        """Brings the buffers up to date with their rows."""
        for buffer, apart in self._apart:
            buffer.copy_(apart)
