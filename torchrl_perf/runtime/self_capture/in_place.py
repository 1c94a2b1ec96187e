"""Functions that write in place and return nothing, such as an optimiser's step, as CUDA graphs once they repeat."""

import warnings
from collections.abc import Callable, Hashable, Sequence
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
from torchrl_perf.runtime.upstream.tensors import current_stream

__all__ = ["InPlaceReplays"]


class InPlaceReplays:
    """Calls of one function of tensors: the first two of a kind as they are, the next ones as replays of a graph.

    Args:
        name: of the function, for the warning that it runs eagerly.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[Any, list[Tensor]]] = {}
        self._refused = False

    def serves(self, device: torch.device) -> bool:
        """Whether calls on a device may become graphs, here and now; only then is there something to call this for."""
        return device.type in DEVICES and may_record()

    def __call__(self, fn: Callable[[list[Any]], Any], inputs: Sequence[Tensor | None], key: Hashable) -> None:
        """``fn(inputs)``, in which the host has no part but for the launch.

        Args:
            fn: writes to tensors that it holds, and leaves its inputs alone; what it returns is lost.
            inputs: tensors of one device, or None; they are copied where a graph reads them.
            key: equal for calls that read and write the same memory with the same settings.
        """
        given = [tensor for tensor in inputs if tensor is not None]
        if self._refused or not given:
            fn(list(inputs))
            return
        kinds = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs)
        key = (key, kinds, torch.is_inference_mode_enabled(), _stream(given[0].device))
        graph = self._graphs.get(key)
        if graph is None:
            calls = self._calls.get(key, 0)
            if calls < WARMUP or len(self._graphs) == SHAPES:
                self._calls[key] = calls + 1
                fn(list(inputs))
                return
            graph = self._record(fn, inputs, key)
            if graph is None:
                fn(list(inputs))
                return
        torch._foreach_copy_(graph[1], given)
        graph[0].replay()

    def _record(
        self, fn: Callable[[list[Any]], Any], inputs: Sequence[Tensor | None], key: Hashable
    ) -> tuple[Any, list[Tensor]] | None:
        held = [None if tensor is None else tensor.detach().clone() for tensor in inputs]
        static = [tensor for tensor in held if tensor is not None]
        device = static[0].device
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

        def call() -> None:
            fn(held)

        try:
            with alone_on_side_stream():
                made, _ = record(call, device, pool, (), frees_memory=False)
        except Exception as error:
            self._refused = True
            warnings.warn(
                f"{self._name} runs eagerly: expected a call that a CUDA graph can repeat, received "
                f"{type(error).__name__}: {error}. Remedy: capture=False, or no host wait in it.",
                SelfCaptureWarning,
                stacklevel=4,
            )
            return None
        self._graphs[key] = made, static
        return self._graphs[key]

    @property
    def recorded(self) -> bool:
        """Whether some kind of call is a graph."""
        return bool(self._graphs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "InPlaceReplays":
        return InPlaceReplays(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return InPlaceReplays, (self._name,)


def _stream(device: torch.device) -> int:
    return current_stream(device) if device.type == "cuda" else 0
