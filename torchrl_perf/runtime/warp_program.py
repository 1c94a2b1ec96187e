"""Warp kernels on torch's streams and inside the CUDA graphs that torch records."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

__all__ = ["WarpProgram", "conditional_nodes"]


def conditional_nodes() -> bool:
    """Whether the driver and Warp's build have conditional graph nodes (CUDA 12.4), which a loop in a graph needs."""
    import warp as wp

    return bool(wp.is_conditional_graph_supported())


class WarpProgram:
    """A function that launches Warp kernels on fixed arrays; a call runs it after what torch's stream holds.

    On CUDA the function is recorded once into a graph of Warp's own, which a call replays: loops whose length the
    device decides are then nodes of that graph and nobody waits for them. Where torch is recording a graph itself, the
    kernels are launched into that one; Warp is told so, since it would otherwise read the condition of such a loop on
    the host. On a CPU a call runs the function.

    Args:
        fn: launches kernels; it must use the same arrays each time.
        device: torch's device with an index, or the CPU.
    """

    def __init__(self, fn: Callable[[], None], device: torch.device) -> None:
        import warp as wp

        self._fn = fn
        self._device = device
        self._warp = wp
        self._warp_device = wp.device_from_torch(device)
        self._graph: Any = None
        self._recorded: list[Any] = []

    def warm_up(self, *, record: bool = True) -> None:
        """Compile, allocate and run the function twice, and record it on CUDA; waits for the device.

        Args:
            record: whether calls outside of torch's graphs replay a graph, on CUDA.
        """
        for _ in range(2):
            self()
        if self._device.type != "cuda" or not record:
            return
        torch.cuda.synchronize(self._device)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream), self._on(own := self._stream()):
            self._warp.capture_begin(stream=own, force_module_load=False)
            try:
                self._fn()
            finally:
                self._graph = self._warp.capture_end(stream=own)
        torch.cuda.synchronize(self._device)

    def __call__(self) -> None:
        """Run the function on the current stream, or record it into the graph that torch is recording there."""
        if self._device.type != "cuda":
            with self._warp.ScopedDevice(self._warp_device):
                self._fn()
            return
        stream = self._stream()
        with self._on(stream):
            if torch.cuda.is_current_stream_capturing():
                self._warp.capture_begin(stream=stream, external=True, force_module_load=False)
                try:
                    self._fn()
                finally:
                    # what is returned keeps the kernels' code loaded that torch's graph will run
                    self._recorded.append(self._warp.capture_end(stream=stream))
            elif self._graph is not None:
                self._warp.capture_launch(self._graph, stream=stream)
            else:
                self._fn()

    def _stream(self) -> Any:
        current = torch.cuda.current_stream(self._device)
        return _warp_stream(self._device.index, current.cuda_stream)

    def _on(self, stream: Any) -> ExitStack:
        scope = ExitStack()
        scope.enter_context(self._warp.ScopedDevice(self._warp_device))
        # torch's stream is ordered already: an event of another stream may not enter a capture
        scope.enter_context(self._warp.ScopedStream(stream, sync_enter=False))
        return scope


def warn_of_old_driver(iterations: int) -> None:
    """Say that loops of a fixed length stand for conditional nodes.

    Args:
        iterations: length of the loops.
    """
    warnings.warn(
        f"expected a CUDA driver of 12.4 or later, received an older one: the solver runs all its {iterations} "
        "iterations in each step, needed or not. Remedy: a newer driver, or a smaller iterations=.",
        stacklevel=3,
    )


@cache
def _warp_stream(index: int, handle: int) -> Any:
    """Warp's object for a stream of torch's: always the same one, since Warp looks up captures by it."""
    import warp as wp

    return wp.Stream(f"cuda:{index}", cuda_stream=handle)
