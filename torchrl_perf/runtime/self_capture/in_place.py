"""Functions that write in place and return nothing, such as an optimiser's step, as CUDA graphs once they repeat."""

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.runtime._graph import record
from torchrl_perf.runtime.self_capture.conditions import DEVICES, SHAPES, may_record
from torchrl_perf.runtime.self_capture.kinds import Kinds, place_of
from torchrl_perf.runtime.self_capture.recording import by_dtype

__all__ = ["InPlaceReplays"]

Groups = list[tuple[list[Tensor], list[int]]]
"""Memory that a graph reads inputs from, one launch for each dtype, and the numbers of the inputs."""


class InPlaceReplays:
    """Calls of one function of tensors: the first two of a kind as they are, the next ones as replays of a graph.

    All graphs of one stream share their memory: each ends with what it has written in place, and nothing else of it is
    read again.

    Args:
        name: of the function, for the warning that it runs eagerly.
        limit: kinds of calls that become graphs; others run eagerly.
    """

    def __init__(self, name: str, *, limit: int = SHAPES) -> None:
        self._kinds, self._limit = Kinds(name, limit=limit), limit
        self._graphs: dict[Hashable, tuple[Any, Groups]] = {}
        self._pools: dict[Hashable, Any] = {}
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
        while_recording: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> bool:
        """``fn(inputs)``, in which the host has no part but for the launch.

        Args:
            fn: writes to tensors that it holds, and leaves its inputs alone; what it returns is lost.
            inputs: tensors on the device, or None; they are copied where a graph reads them.
            key: equal for calls that read and write the same memory with the same settings.
            device: where all of it happens.
            writes: those among the tensors that ``fn`` writes to which autograd may have kept for a backward pass: as
                after an eager write, that pass is refused.
            while_recording: context in which ``fn`` is recorded, which writes nothing.

        Returns:
            Whether a graph did it, so that what ``fn`` does on the host is left to the caller.
        """
        if self._kinds.refused:
            fn(list(inputs))
            return False
        place = place_of(device)
        kinds = tuple([None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs])
        key = (key, kinds, place)
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None and self._kinds.is_due(key, len(self._graphs)):
                graph = self._kinds.attempt(lambda: self._recorded(fn, inputs, device, place, while_recording))
                if graph is not None:
                    self._graphs[key] = graph
            if graph is None:
                # in memory like that of a graph until one is recorded, so that kernels for it are loaded
                warms = not self._kinds.refused and len(self._graphs) < self._limit
                fn(_copies(inputs) if warms else list(inputs))
                return False
            if graph[1]:
                given = [tensor for tensor in inputs if tensor is not None]
                with torch.no_grad():
                    for targets, numbers in graph[1]:
                        torch._foreach_copy_(targets, [given[number] for number in numbers])
            graph[0].replay()
            if writes:
                torch.autograd.graph.increment_version(writes)
        return True

    def _recorded(
        self,
        fn: Callable[[list[Any]], Any],
        inputs: Sequence[Tensor | None],
        device: torch.device,
        place: Hashable,
        while_recording: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[Any, Groups]:
        held = _copies(inputs)
        if device.type == "cuda" and place not in self._pools:
            self._pools[place] = torch.cuda.graph_pool_handle()

        def call() -> None:
            fn(held)

        with while_recording():
            graph, _ = record(call, device, self._pools.get(place), (), frees_memory=False)
        return graph, by_dtype([tensor for tensor in held if tensor is not None])

    @property
    def recorded(self) -> bool:
        """Whether some kind of call is a graph."""
        return bool(self._graphs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "InPlaceReplays":
        return InPlaceReplays(self._kinds.name, limit=self._limit)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(InPlaceReplays, limit=self._limit), (self._kinds.name,)


def _copies(inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().clone() for tensor in inputs]
