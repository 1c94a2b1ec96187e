"""Uniform sampling with replacement, from all rows or from those that a mask admits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_perf.replay._checks import check_state
from torchrl_perf.replay.priority_tree import PriorityTree
from torchrl_perf.replay.ring import Ring, capturing

if TYPE_CHECKING:
    from torchrl_perf.replay.storage import DeviceStorage

__all__ = ["DeviceRandomSampler"]


class DeviceRandomSampler(Sampler):
    """Draws rows uniformly with replacement on the device, without a host wait. The counterpart of ``RandomSampler``.

    A draw is two launches. Random numbers come from the generator of the buffer where it has one, else from the
    device's default generator.

    With ``mask_key`` the rows where that entry is False are never drawn (agents that were not active, say); one with
    more than one element counts as True if any is. A row whose ("next", "terminated") is True is drawn in any case:
    it holds the reward for the end. If no row is admitted, all are.

    Args:
        mask_key: key of a bool entry of the rows; None admits all.
    """

    def __init__(self, mask_key: NestedKey | None = None) -> None:
        self.mask_key = mask_key
        self._tree: PriorityTree | None = None
        self._is_stale = False
        self._beta = torch.zeros(())

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draw rows.

        Args:
            storage: a :class:`~torchrl_perf.replay.DeviceStorage`.
            batch_size: rows B, at most those that are filled.

        Returns:
            Slots, ``[B]`` int64, and an empty info.

        Raises:
            ValueError: if fewer rows than ``batch_size`` are filled.
            TypeError: for another storage.
        """
        ring = sampled_ring(storage, batch_size, "DeviceRandomSampler")
        if self.mask_key is None:
            return ring.random_slots(batch_size, self._rng), {}
        uniform = torch.rand(batch_size, dtype=torch.float64, device=ring.cursor.device, generator=self._rng)
        return self._tree_of(storage).draw_rows(uniform, self._beta, ring).index, {}

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Learn of new rows; needed for ``mask_key`` alone.

        Args:
            index: int64 slots of any shape.
            storage: the storage that holds the rows.
        """
        if self.mask_key is None or storage is None:
            return
        slot = torch.as_tensor(index).reshape(-1)
        tree = self._tree_of(storage)
        tree.set_(slot, row_mask(storage, slot, self.mask_key).to(torch.float32))
        if getattr(storage, "compact", False):
            tree.forget_(ring_of(storage, "DeviceRandomSampler"))

    def _tree_of(self, storage: Storage) -> PriorityTree:
        ring = ring_of(storage, "DeviceRandomSampler")
        if self._tree is None or self._tree.num_slots != ring.capacity or self._tree.device != ring.cursor.device:
            refuse_capture("DeviceRandomSampler")
            # What is made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                self._tree = PriorityTree(ring.capacity, ring.cursor.device)
                self._beta = torch.zeros((), device=ring.cursor.device)
            self._is_stale = True
        if self._is_stale:
            slot = torch.arange(ring.capacity, device=ring.cursor.device)
            mask = row_mask(storage, slot, self.mask_key) if self.mask_key is not None else slot >= 0
            self._tree.clear_()
            self._tree.update_(slot, mask.to(torch.float32), ring=ring)
            self._is_stale = False
        return self._tree

    def refresh(self, storage: Storage) -> None:
        """Read the mask from the rows again, in place, so that recorded graphs stay valid; after a load.

        Args:
            storage: the storage that holds the rows.
        """
        if self._tree is not None and getattr(storage, "initialized", True):
            self._is_stale = True
            self._tree_of(storage)

    def _empty(self) -> None:
        if self._tree is not None:
            self._tree.clear_()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the mask is part of the rows."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Read the mask from the rows again at the next use.

        Raises:
            ValueError: for the state of another sampler.
        """
        check_state(state_dict, None, "DeviceRandomSampler")
        self._is_stale = True

    def dumps(self, path: str | Path) -> None:
        """Write nothing."""

    def loads(self, path: str | Path) -> None:
        """Read the mask from the rows again at the next use."""
        self._is_stale = True


def ring_of(storage: Any, name: str) -> Ring:
    """The ring of a device storage.

    Args:
        storage: any storage.
        name: the asking class, for the message.

    Raises:
        TypeError: for a storage without one.
        ValueError: before the first extend.
    """
    if not getattr(storage, "initialized", True):
        raise ValueError(f"{name}: expected a filled storage, received an empty one. Remedy: extend the buffer first.")
    ring = getattr(storage, "ring", None)
    if ring is None:
        raise TypeError(_wrong_storage(storage, name))
    return ring


def _wrong_storage(storage: Any, name: str) -> str:
    return (
        f"{name}: expected a torchrl_perf.replay.DeviceStorage, received {type(storage).__name__}. Remedy: "
        "make_replay_buffer, or ReplayBuffer(storage=DeviceStorage(...), writer=DeviceWriter(), ...)."
    )


def sampled_ring(storage: Any, batch_size: int, name: str) -> Ring:
    """The ring of a storage that ``batch_size`` rows are drawn from.

    The number of rows is checked against the mirrors on the host, where those are reliable.

    Raises:
        ValueError: if fewer rows are filled, or ``batch_size`` is not positive.
        TypeError: for a storage without a ring.
    """
    ring = ring_of(storage, name)
    rows = ring.host_length * ring.num_streams
    if batch_size < 1 or (batch_size > rows and not ring.recorded):
        raise ValueError(
            f"{name}: expected a batch size from 1 to the {rows} rows that are filled, received {batch_size}. Remedy: "
            "extend the buffer first, or draw fewer rows."
        )
    return ring


def refuse_capture(name: str) -> None:
    """Raise if a CUDA graph is being recorded: memory made there would belong to the graph."""
    if capturing():
        raise RuntimeError(
            f"{name}: its tree is made at the first extend or sample, which cannot be recorded in a CUDA graph. "
            "Remedy: extend and sample once before capturing."
        )


def row_mask(storage: DeviceStorage | Any, slot: Tensor, mask_key: NestedKey) -> Tensor:
    """Which rows may be drawn: those with a True in ``mask_key``, and terminal ones.

    Args:
        storage: storage with the rows.
        slot: ``[B]`` int64; those out of range are looked up at the nearest slot.
        mask_key: key of a bool entry.

    Returns:
        ``[B]`` bool.

    Raises:
        KeyError: if ``mask_key`` is not stored.
    """
    steps, num_streams = storage.ring.steps, storage.ring.num_streams
    slot = slot.clamp(0, steps * num_streams - 1)
    place = (torch.div(slot, num_streams, rounding_mode="floor"), slot % num_streams)
    mask = _any_in_row(storage.field(mask_key)[place])
    try:
        terminated = storage.field(("next", "terminated"))
    except KeyError:
        return mask
    return mask | _any_in_row(terminated[place])


def _any_in_row(values: Tensor) -> Tensor:
    return values.bool().flatten(1).any(-1) if values.ndim > 1 else values.bool()
