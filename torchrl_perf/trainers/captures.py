"""The two functions of a trainer of which one is captured: the whole iteration, or all of it but the collection."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.runtime import Captured, capture

__all__ = ["Captures", "capture_iteration", "collects_on_device"]


class Captures(NamedTuple):
    """Functions of the loop, captured where the mode and the collector allow it."""

    iterate: Callable[..., Any]
    """The whole iteration."""
    digest: Callable[..., Any]
    """What follows the collection."""

    def release(self) -> None:
        """Frees the memory of the graph."""
        for fn in self:
            if isinstance(fn, Captured):
                fn.release()


def collects_on_device(collector: Any) -> bool:
    """Whether a collector's steps can be a part of a graph."""
    return isinstance(collector, DeviceCollector) and not collector.waits_for_host


def capture_iteration(trainer: Any) -> Captures:
    """``trainer.iteration`` and ``trainer.digest``; in mode ``"graph"`` one of them is captured.

    A graph holds the whole iteration where the envs are tensors, and all but the collection where they are not.
    """
    # no eager audit: its different rounding would break bitwise resume; recording refuses host waits all the same
    captured = {"device": trainer.device, "audit": False}
    if trainer.mode != "graph":
        return Captures(trainer.iteration, trainer.digest)
    if collects_on_device(trainer.collector):
        return Captures(capture(trainer.iteration, **captured), trainer.digest)
    return Captures(trainer.iteration, capture(trainer.digest, **captured))
