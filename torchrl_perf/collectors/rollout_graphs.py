"""A rollout as a CUDA graph for each exploration type, which a graph holds fixed."""

from collections.abc import Callable
from functools import partial

import torch
from tensordict.nn import InteractionType

from torchrl_perf.runtime import Captured, capture

__all__ = ["RolloutGraphs"]


class RolloutGraphs:
    """Calls a rollout, through a graph where it is to be one.

    Args:
        rollout: called with ``kind=``, the exploration type.
        device: of the graphs.
    """

    def __init__(self, rollout: Callable[..., None], device: torch.device) -> None:
        self._rollout, self._device = rollout, device
        self._runs: dict[InteractionType, Callable[[], None]] = {}

    def run(self, kind: InteractionType, *, graph: bool) -> None:
        """One rollout under an exploration type."""
        if kind not in self._runs:
            call = partial(self._rollout, kind=kind)
            self._runs[kind] = capture(call, device=self._device, audit=False) if graph else call
        self._runs[kind]()

    def release(self) -> None:
        """Forget all graphs, once what they do is done, and give their memory back."""
        for run in self._runs.values():
            if isinstance(run, Captured):
                run.release()
        self._runs.clear()
