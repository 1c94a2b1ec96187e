"""Memory that a run will take: counted and probed before it starts, announced, and refused if it cannot fit."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchrl_perf.replay.memory import available_bytes, readable
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.trainers.config import RunConfig

__all__ = ["MemoryEstimate", "PeakBytes", "announce_memory"]

logger = logging.getLogger("torchrl_perf")

PROBE_ROWS = 8
WORKSPACE = 2 * 32 * 2**20  # of cuBLAS on recent cards, for the ordinary stream and for the one that graphs are made on
GRAPH_SHARE = 1.25  # the memory of a graph is a separate pool, with gaps
ADAM_MOMENTS = 2


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a run needs on its device at its peak, by purpose."""

    rollout: int
    """Batch of the collector."""
    networks: int
    """Parameters and buffers, those of target networks included."""
    optimizer: int
    """Gradients and Adam's moments."""
    replay: int
    """Replay buffer, once it is full."""
    update: int
    """Intermediate results of an update of ``rows`` rows, the gathered rows included."""
    rows: int
    """Rows of a minibatch."""
    advantage: int = 0
    """Intermediate results of the advantages of a batch."""
    workspace: int = 0
    """Workspace of libraries for matrix products."""

    @property
    def total(self) -> int:
        """All of it; advantages and update take turns."""
        held = self.rollout + self.networks + self.optimizer + self.replay
        return held + max(self.update, self.advantage) + self.workspace

    def pending(self, rows: int) -> int:
        """Bytes not yet allocated when training starts, for an update of that many rows."""
        passing = max(self.update * rows // self.rows, self.advantage)
        return self.optimizer + self.replay + passing + self.workspace

    def __str__(self) -> str:
        names = ("rollout", "networks", "optimizer", "replay", "advantage", "update", "workspace")
        parts = [f"{name} {readable(getattr(self, name))}" for name in names if getattr(self, name)]
        return f"about {readable(self.total)}: {', '.join(parts)}"


class Estimated(Protocol):
    """The interface of a trainer for :func:`announce_memory`."""

    device: torch.device
    mode: str
    collector: Any

    @property
    def config(self) -> RunConfig:
        """Settings of the run."""
        ...

    def probe(self, rows: TensorDictBase) -> object:
        """The forward and backward passes of an update, eagerly, on ``rows [b]`` like those of the batch."""
        ...

    def probe_batch(self, batch: TensorDictBase) -> object:
        """The computations on a whole batch ``[n, T]`` before the updates."""
        ...


def announce_memory(
    trainer: Estimated,
    modules: list[nn.Module],
    *,
    minibatch_size: int,
    capacity: int = 0,
    stored: Callable[[TensorDictBase], TensorDictBase] = lambda batch: batch,
) -> MemoryEstimate | None:
    """Estimates the memory of a run, says it in one line (logger "torchrl_perf", level info), refuses what cannot fit.

    An update is probed with 8 and with 16 rows of zeros: the memory in use after each operation is extrapolated
    linearly to the peak of a whole minibatch. Random state, buffers and gradients are restored. Parts that cannot be
    probed count as 0.

    Args:
        trainer: with its collector.
        modules: networks and target networks.
        minibatch_size: rows of an update.
        capacity: rows of the replay buffer.
        stored: makes of the collector's batch what the replay buffer stores.

    Returns:
        The estimate; None if the collector does not describe its batch.

    Raises:
        ValueError: with the bytes needed and available; if updates may be split, only if a single row is too much.
    """
    batch = getattr(trainer.collector, "batch", None)
    if not isinstance(batch, TensorDictBase) or batch.is_empty():
        return None
    params = _bytes(tensor for module in modules for tensor in module.parameters() if tensor.requires_grad)
    held = {tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
    config, cuda = trainer.config, trainer.device.type == "cuda"
    row_bytes = bytes_of(stored(batch)) / batch.numel()
    if getattr(config, "compact", False):
        row_bytes /= 2  # each observation once; about the largest part
    share = GRAPH_SHARE if trainer.mode == "graph" else 1
    flat = batch.reshape(-1)
    probed = max(0.0, probe_bytes(trainer.probe, flat, minibatch_size, modules, trainer.device) - params)
    gathered = config.experiences_per_iteration if getattr(config, "draws_together", False) else minibatch_size
    advantage = probe_bytes(trainer.probe_batch, batch, batch.shape[0], modules, trainer.device)
    estimate = MemoryEstimate(
        rollout=bytes_of(batch),
        networks=_bytes(held),
        optimizer=(1 + ADAM_MOMENTS) * params,
        replay=int(capacity * row_bytes),
        update=int((probed + row_bytes * gathered) * share),
        rows=minibatch_size,
        advantage=int(advantage * share),
        workspace=WORKSPACE if cuda else 0,
    )
    name, free = type(trainer).__name__, available_bytes(trainer.device)
    needed = estimate.pending(1 if config.split_on_oom else minibatch_size)
    if needed > free:
        raise ValueError(
            f"{name}: expected to fit into memory, received a configuration that needs {readable(needed)} ({needed} "
            f"bytes) more on {trainer.device}, where {readable(free)} ({free} bytes) are free ({estimate}). Remedy: a "
            "smaller capacity, minibatch, network or number of envs, or another device."
        )
    logger.info("%s: %s on %s (%s free)", name, estimate, trainer.device, readable(free))
    return estimate


def probe_bytes(
    step: Callable[[TensorDictBase], object],
    data: TensorDictBase,
    count: int,
    modules: list[nn.Module],
    device: torch.device,
) -> float:
    """Most bytes in use within ``step(data[:count])``, extrapolated from a few rows; 0 if it cannot be probed.

    Args:
        step: the function to probe.
        data: example of its input; zeros are used.
        count: rows (of the first dim) to extrapolate to.
        modules: modules that the step may change.
        device: of the step.
    """
    rows = min(PROBE_ROWS, max(1, data.shape[0] // 2))

    def history(size: int) -> list[int]:
        one = cast("TensorDictBase", cast("TensorDictBase", data[:1]).apply(torch.zeros_like))
        sample = one.expand(size, *data.shape[1:]).clone()
        with _as_before(modules, device), PeakBytes() as meter, torch.enable_grad():
            step(sample)
        return meter.history

    try:
        short, long = history(rows), history(2 * rows)
        if len(short) != len(long):  # the first call made something that later calls reuse
            short, long = history(rows), history(2 * rows)
    except Exception as error:
        logger.info("a step could not be probed for its memory: %s", error)
        return 0.0
    if len(short) != len(long):  # the operations depend on the size: compare only the peaks
        short, long = [max(short, default=0)], [max(long, default=0)]
    slopes = [(more - less) / rows for less, more in zip(short, long, strict=True)]
    return max((less + slope * (count - rows) for less, slope in zip(short, slopes, strict=True)), default=0.0)


@contextlib.contextmanager
def _as_before(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Context that restores random state, buffers and gradients."""
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    with seeded(None, device):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for module in modules:
                module.zero_grad()


class PeakBytes(TorchDispatchMode):
    """Context that records the most bytes in use at once by tensors made inside it.

    Attributes:
        history: bytes in use after each operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and counts its new tensors."""
        known = {StorageWeakRef(arg.untyped_storage()).cdata for arg in tree_iter(args) if isinstance(arg, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                if reference.cdata not in known:
                    self._live[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.history.append(sum(size for _, size in self._live.values()))
        return out

    @property
    def peak(self) -> int:
        """The most of them."""
        return max(self.history, default=0)


def bytes_of(data: TensorDictBase) -> int:
    """Bytes of all leaves; a view counts the bytes that it shows."""
    return sum(leaf.numel() * leaf.element_size() for leaf in data.values(True, True))


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in set(tensors))
