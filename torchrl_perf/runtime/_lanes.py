"""Page-locked memory, streams and events for copies between host and device; on a CPU plain stand-ins."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class _Arrived:
    """The event behind a copy on a CPU, where copies end before they return."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Lane:
    """The way between the host and one device: every operation here is enqueued, none makes the host wait.

    Args:
        device: the far end.
        side_stream: give the lane a stream of its own, ``side``, which is None otherwise and on a CPU.
    """

    def __init__(self, device: torch.device, *, side_stream: bool = False) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.side: Any = torch.cuda.Stream(device) if side_stream and self.is_cuda else None

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New contiguous host memory, page-locked if the far end is a GPU."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=self.is_cuda)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Any) -> Tensor:
        """New device memory that ``stream`` may write at once."""
        with self._on(stream):
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def event(self) -> Any:
        """An event to record after a copy; its ``synchronize()`` makes the host wait for that copy alone."""
        return torch.cuda.Event() if self.is_cuda else _Arrived()

    def current(self) -> Any:
        """The stream that the caller's work runs on."""
        return torch.cuda.current_stream(self.device) if self.is_cuda else None

    def fork(self, current: Any) -> Any:
        """The lane's stream, made to wait for what ``current`` has been given so far; ``current`` without one."""
        if self.side is None:
            return current
        self.side.wait_stream(current)
        return self.side

    def join(self, current: Any, arrived: Any) -> None:
        """Make ``current`` wait for the copy behind which ``arrived`` was recorded."""
        if self.side is not None:
            current.wait_event(arrived)

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Enqueue a copy on a stream; the host end is page-locked, so that nothing waits."""
        with self._on(stream):
            target.copy_(source, non_blocking=self.is_cuda)

    def record(self, arrived: Any, stream: Any) -> None:
        """Record an event on a stream, after the work enqueued so far."""
        if self.is_cuda:
            arrived.record(stream)

    def lend(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator that ``stream`` uses a tensor too, so that its memory is not reused before that ends."""
        if self.is_cuda:
            tensor.record_stream(stream)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make the side stream current; any other stream that is passed is the current one already."""
        return nullcontext() if self.side is None or stream is not self.side else torch.cuda.stream(stream)

    def refuse_capture(self, name: str) -> None:
        """Raise inside a CUDA graph capture: a graph would repeat the copy with blocks that are reused meanwhile.

        Raises:
            RuntimeError: if the current stream is being captured.
        """
        if self.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name}: expected a stream that is not being captured, received one inside a CUDA graph capture. "
                "Remedy: copy before or after the captured step; inside, write into tensors on the device."
            )
