"""Functions that write in place and return nothing, such as an optimiser's step, as CUDA graphs once they repeat."""

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.runtime._graph import record
from torchrl_perf.runtime.self_capture.conditions import (
    DEVICES,
    SHAPES,
    WARMUP,
    SelfCaptureWarning,
    alone_on_side_stream,
    may_record,
)

__all__ = ["InPlaceReplays"]

COUNTED = 1024
"""Kinds of calls whose repeats are counted at a time."""


class InPlaceReplays:
    """Calls of one function of tensors: the first two of a kind as they are, the next ones as replays of a graph.

    All graphs of one stream share their memory: each ends with what it has written in place, and nothing else of it is
    read again.

    Args:
        name: of the function, for the warning that it runs eagerly.
        limit: kinds of calls that become graphs; others run eagerly.
    """

    def __init__(self, name: str, *, limit: int = SHAPES) -> None:
        self._name, self._limit = name, limit
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[Any, list[Tensor]]] = {}
        self._pools: dict[int, Any] = {}
        self._refused = False
        # one thread at a time, from the copy of its inputs to the replay that reads them
        self._lock = threading.RLock()

    def serves(self, device: torch.device) -> bool:
        """Whether calls on a device may become graphs, here and now; only then is there something to call this for."""
        return device.type in DEVICES and may_record()

    def __call__(
        self,
        fn: Callable[[list[Any]], Any],
        inputs: Sequence[Tensor | None],
        key: Hashable,
        *,
        device: torch.device,
        writes: Sequence[Tensor] = (),
    ) -> None:
        """``fn(inputs)``, in which the host has no part but for the launch.

        Args:
            fn: writes to tensors that it holds, and leaves its inputs alone; what it returns is lost.
            inputs: tensors on the device, or None; they are copied where a graph reads them.
            key: equal for calls that read and write the same memory with the same settings.
            device: where all of it happens.
            writes: those among the tensors that ``fn`` writes to which autograd may have kept for a backward pass: as
                after an eager write, that pass is refused.
        """
        if self._refused:
            fn(list(inputs))
            return
        stream = _stream(device)
        kinds = tuple([None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs])
        key = (key, kinds, torch.is_inference_mode_enabled(), stream)
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None:
                graph = self._recorded_at_last(fn, inputs, key, device, stream)
            if graph is None:
                fn(list(inputs))
                return
            if graph[1]:
                torch._foreach_copy_(graph[1], [tensor for tensor in inputs if tensor is not None])
            graph[0].replay()
            if writes:
                torch.autograd.graph.increment_version(writes)

    def _recorded_at_last(
        self,
        fn: Callable[[list[Any]], Any],
        inputs: Sequence[Tensor | None],
        key: Hashable,
        device: torch.device,
        stream: int,
    ) -> tuple[Any, list[Tensor]] | None:
        """The graph of a call that has repeated often enough; None for one that runs eagerly."""
        if len(self._graphs) == self._limit:
            return None
        calls = self._calls.pop(key, 0)
        if calls >= WARMUP:
            return self._record(fn, inputs, key, device, stream)
        if len(self._calls) == COUNTED:  # of shapes that do not come back
            self._calls.clear()
        self._calls[key] = calls + 1
        return None

    def _record(
        self,
        fn: Callable[[list[Any]], Any],
        inputs: Sequence[Tensor | None],
        key: Hashable,
        device: torch.device,
        stream: int,
    ) -> tuple[Any, list[Tensor]] | None:
        held = [None if tensor is None else tensor.detach().clone() for tensor in inputs]
        if device.type == "cuda" and stream not in self._pools:
            self._pools[stream] = torch.cuda.graph_pool_handle()

        def call() -> None:
            fn(held)

        try:
            with alone_on_side_stream():
                made, _ = record(call, device, self._pools.get(stream), (), tidy=False)
        except Exception as error:
            self._refused = True
            warnings.warn(
                f"{self._name} runs eagerly: expected a call that a CUDA graph can repeat, received "
                f"{type(error).__name__}: {error}. Remedy: capture=False, or no host wait in it.",
                SelfCaptureWarning,
                stacklevel=4,
            )
            return None
        self._graphs[key] = made, [tensor for tensor in held if tensor is not None]
        return self._graphs[key]

    @property
    def recorded(self) -> bool:
        """Whether some kind of call is a graph."""
        return bool(self._graphs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "InPlaceReplays":
        return InPlaceReplays(self._name, limit=self._limit)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(InPlaceReplays, limit=self._limit), (self._name,)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
