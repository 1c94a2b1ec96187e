"""Functions that write in place and return nothing, such as an optimiser's step, as CUDA graphs once they repeat."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
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

    Args:
        name: of the function, for the warning that it runs eagerly.
    """

    def __init__(self, name: str) -> None:
        self._kinds = Kinds(name)
        self._graphs: dict[Hashable, tuple[Any, Groups]] = {}

    def serves(self, device: torch.device) -> bool:
        """Whether calls on a device may become graphs, here and now; only then is there something to call this for."""
        return device.type in DEVICES and may_record()

    def __call__(
        self,
        fn: Callable[[list[Any]], Any],
        inputs: Sequence[Tensor | None],
        key: Hashable,
        while_recording: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> bool:
        """``fn(inputs)``, in which the host has no part but for the launch.

        Args:
            fn: writes to tensors that it holds, and leaves its inputs alone; what it returns is lost.
            inputs: tensors of one device, or None; they are copied where a graph reads them.
            key: equal for calls that read and write the same memory with the same settings.
            while_recording: context in which ``fn`` is recorded, which writes nothing.

        Returns:
            Whether a graph did it, so that what ``fn`` does on the host is left to the caller.
        """
        given = [tensor for tensor in inputs if tensor is not None]
        if self._kinds.refused or not given:
            fn(list(inputs))
            return False
        kinds = tuple([None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs])
        key = (key, kinds, place_of(given[0].device))
        graph = self._graphs.get(key)
        if graph is None and self._kinds.is_due(key, len(self._graphs)):
            graph = self._kinds.attempt(lambda: _recorded(fn, inputs, while_recording))
            if graph is not None:
                self._graphs[key] = graph
        if graph is None:
            # in memory like that of a graph until one is recorded, so that kernels for it are loaded
            warms = not self._kinds.refused and len(self._graphs) < SHAPES
            fn(_copies(inputs) if warms else list(inputs))
            return False
        with torch.no_grad():
            for targets, numbers in graph[1]:
                torch._foreach_copy_(targets, [given[number] for number in numbers])
        graph[0].replay()
        return True

    @property
    def recorded(self) -> bool:
        """Whether some kind of call is a graph."""
        return bool(self._graphs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "InPlaceReplays":
        return InPlaceReplays(self._kinds.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return InPlaceReplays, (self._kinds.name,)


def _copies(inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().clone() for tensor in inputs]


def _recorded(
    fn: Callable[[list[Any]], Any],
    inputs: Sequence[Tensor | None],
    while_recording: Callable[[], AbstractContextManager[Any]],
) -> tuple[Any, Groups]:
    held = _copies(inputs)
    static = [tensor for tensor in held if tensor is not None]
    device = static[0].device
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def call() -> None:
        fn(held)

    with while_recording():
        return record(call, device, pool, (), frees_memory=False)[0], by_dtype(static)
