"""The two functions of a trainer of which one is captured: the whole iteration, or all of it but the collection."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torchrl.envs import EnvBase
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.collectors.env_state import chain
from torchrl_perf.collectors.stepping import in_graphs
from torchrl_perf.runtime import Captured, capture

__all__ = ["Captures", "capture_iteration", "collector_mode", "collects_on_device", "steps_on_host"]


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
    on_device = isinstance(collector, DeviceCollector) and not steps_on_host(collector.env)
    return on_device and not collector.waits_for_host


def steps_on_host(env: EnvBase) -> bool:
    """Whether the host steps an env: several of TorchRL's, one by one, or a simulator that no graph may hold."""
    return isinstance(base := chain(env)[-1], BatchedEnvBase) or not in_graphs(base)


def collector_mode(mode: str, env: EnvBase) -> Literal["eager", "compile"]:
    """The mode in which a trainer of a mode collects in an env: where it can be compiled, it is where anything is."""
    return "eager" if mode == "eager" or steps_on_host(env) else "compile"


def capture_iteration(trainer: Any) -> Captures:
    """``trainer.iteration`` and ``trainer.digest``; in mode ``"graph"`` one of them is captured.

    A graph holds the whole iteration where the envs are tensors, and all but the collection where they are not.
    """
    # no eager audit: its different rounding would break bitwise resume; recording refuses host waits all the same
    # parameters may have been copied by now, with their graph
    captured = {"device": trainer.device, "audit": False, "parameters": list(trainer.algorithm.loss.parameters())}
    if trainer.mode != "graph":
        return Captures(trainer.iteration, trainer.digest)
    if collects_on_device(trainer.collector):
        return Captures(capture(trainer.iteration, **captured), trainer.digest)
    return Captures(trainer.iteration, capture(trainer.digest, **captured))
