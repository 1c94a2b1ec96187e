"""Functions that return new tensors and are given none, such as a sample, as CUDA graphs once they repeat.

A graph writes to the same memory each time. So each has several graphs, and a call takes one whose last results nobody
holds any more: not the tensors, no view of them, no autograd node that saved one. A result is therefore as good as a
fresh tensor for as long as it is held.
"""

import gc
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.runtime._graph import record
from torchrl_perf.runtime.self_capture.conditions import DEVICES, may_record
from torchrl_perf.runtime.self_capture.kinds import Kinds, place_of
from torchrl_perf.runtime.upstream.memory import holders

__all__ = ["HELD", "HeldReplays", "Place"]

HELD = 4
"""Results of one kind of call that may be held at once; while they all are, calls run eagerly."""


class Place:
    """One graph, and the memory that it writes its result to.

    Args:
        fn: what is recorded; returns tensors, and anything to remember of the call.
        device: CUDA device with an index.
        generators: of random numbers that ``fn`` draws from, besides the default one.

    Attributes:
        note: what was to be remembered.
    """

    def __init__(
        self, fn: Callable[[], tuple[list[Tensor], Any]], device: torch.device, generators: Sequence[torch.Generator]
    ) -> None:
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._graph, (self._results, self.note) = record(fn, device, pool, generators, frees_memory=False)
        memories = [result.untyped_storage() for result in self._results]
        self._memories = list({memory.data_ptr(): memory for memory in memories}.values())
        del memories
        gc.collect(0)  # garbage that still counts here would hide a holder later; all of it is new
        self._unheld = [holders(memory) for memory in self._memories]

    @property
    def free(self) -> bool:
        """Whether nobody holds what was last handed out."""
        return [holders(memory) for memory in self._memories] == self._unheld

    def again(self) -> list[Tensor]:
        """Replays the graph; its results as tensors of their own over its memory."""
        self._graph.replay()
        return [result.detach() for result in self._results]


class HeldReplays:
    """Calls of one function without arguments: the first two of a kind as they are, the next ones as replays.

    Args:
        name: of the function, for the warning that it runs eagerly.
        says_held: whether to warn where it does so since all results are held.
    """

    def __init__(self, name: str, *, says_held: bool = True) -> None:
        self._kinds, self._says_held = Kinds(name), says_held
        self._places: dict[Hashable, list[Place]] = {}

    def serves(self, device: torch.device) -> bool:
        """Whether calls on a device may become graphs, here and now; only then is there something to call this for."""
        return device.type in DEVICES and may_record()

    def place(
        self,
        fn: Callable[[], tuple[list[Tensor], Any]],
        key: Hashable,
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
    ) -> Place | None:
        """A graph of the call whose memory is free; None where the call shall run as it is.

        Args:
            fn: the call, as :class:`Place` takes it; the host has no part in it, and what it reads and writes stays
                where it is.
            key: equal for calls that read the same memory with the same settings.
            device: CUDA device with an index.
            generators: of random numbers that ``fn`` draws from, besides the default one.
        """
        key = (key, place_of(device))
        places = self._places.get(key)
        if places is None:
            if not self._kinds.is_due(key, len(self._places)):
                return None
            places = []
        for place in places:
            if place.free:
                return place
        if self._kinds.refused:
            return None
        if len(places) == HELD:
            if self._says_held:
                self._kinds.say(
                    f"at most {HELD} results to be held at once, received one more call while they are. Remedy: let "
                    "go of those that were read, or keep result.clone()."
                )
            return None
        made = self._kinds.attempt(lambda: Place(fn, device, generators))
        if made is not None:
            self._places.setdefault(key, places).append(made)
        return made

    @property
    def recorded(self) -> int:
        """Graphs that there are."""
        return sum(map(len, self._places.values()))

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeldReplays":
        return HeldReplays(self._kinds.name, says_held=self._says_held)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(HeldReplays, says_held=self._says_held), (self._kinds.name,)
