"""Uniform sampling with replacement, from all rows or from those that a mask admits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDict
from tensordict.utils import unravel_key
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_perf.replay._checks import check_state
from torchrl_perf.replay.layout import Key
from torchrl_perf.replay.priority_tree import PriorityTree
from torchrl_perf.replay.ring import Ring, capturing
from torchrl_perf.replay.signatures import shows_arguments

if TYPE_CHECKING:
    from torchrl_perf.replay.storage import DeviceStorage

__all__ = ["DeviceRandomSampler"]


@shows_arguments
class DeviceRandomSampler(Sampler):
    """Draws rows uniformly with replacement on the device, without a host wait. The counterpart of ``RandomSampler``.

    A draw is two launches; one of them reads plain rows too, where a ``DeviceReplayBuffer`` asks for both. Random
    numbers come from the generator of the buffer where it has one, else from the device's default generator.

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
        self._seen_writes = 0  # writes through views that the tree knows of
        self._beta = torch.zeros(())

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draw rows.

        Args:
            storage: a :class:`~torchrl_perf.replay.DeviceStorage`.
            batch_size: rows B; may exceed the number of filled rows.

        Returns:
            Slots, ``[B]`` int64, and an empty info.

        Raises:
            ValueError: if no row is filled.
            TypeError: for another storage.
        """
        ring = sampled_ring(storage, batch_size, "DeviceRandomSampler")
        if self.mask_key is None:
            return ring.random_slots(batch_size, self._rng), {}
        uniform = torch.rand(batch_size, dtype=torch.float64, device=ring.cursor.device, generator=self._rng)
        tree = self._tree_of(storage)
        if wrote_outside(storage) != self._seen_writes:
            self.refresh(storage)
        return ring.vouch(tree.draw_rows(uniform, self._beta, ring).index), {}

    def sample_rows(self, storage: DeviceStorage, batch_size: int) -> tuple[Tensor, TensorDict]:
        """Draw slots as :meth:`sample` does, and read their rows: one launch without ``mask_key``.

        Args:
            storage: a :class:`~torchrl_perf.replay.DeviceStorage`.
            batch_size: rows B.

        Returns:
            Slots, ``[B]`` int64, and the rows, ``[B]``.

        Raises:
            ValueError, TypeError: see :meth:`sample`.
        """
        if self.mask_key is None:
            sampled_ring(storage, batch_size, "DeviceRandomSampler")
            return storage.draw(batch_size, self._rng)
        index = self.sample(storage, batch_size)[0]
        return index, storage.get(index)

    def is_steady(self, storage: DeviceStorage) -> bool:
        """Whether the host has no part in the next draw: there are rows, and the tree knows their masks."""
        ring = storage.ring
        if self.mask_key is not None and (self._is_stale or wrote_outside(storage) != self._seen_writes):
            return False
        return ring.recorded or ring.host_length > 0

    @property
    def learns_rows(self) -> bool:
        """Whether :meth:`mark_update` has something to do."""
        return self.mask_key is not None

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Learn of new rows; needed only for ``mask_key``.

        Args:
            index: int64 slots of any shape.
            storage: the storage that holds the rows.
        """
        if self.mask_key is None or storage is None:
            return
        tree = self._tree_of(storage)
        slot = torch.as_tensor(index, device=tree.device).reshape(-1)
        tree.set_(slot, row_mask(storage, slot, self.mask_key).to(torch.float32))
        if getattr(storage, "compact", False):
            tree.forget_(ring_of(storage, "DeviceRandomSampler"))

    def _tree_of(self, storage: Storage) -> PriorityTree:
        ring = ring_of(storage, "DeviceRandomSampler")
        if self._tree is None or self._tree.num_slots != ring.capacity or self._tree.device != ring.cursor.device:
            refuse_capture("DeviceRandomSampler")
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                self._tree = PriorityTree(ring.capacity, ring.cursor.device)
                self._beta = torch.zeros((), device=ring.cursor.device)
            self._is_stale = True
        if self._is_stale:
            slot = torch.arange(ring.capacity, device=ring.cursor.device)
            mask = row_mask(storage, slot, self.mask_key) if self.mask_key is not None else slot >= 0
            self._tree.clear_()
            self._tree.update_(slot, mask.to(torch.float32), ring=ring)
            self._is_stale, self._seen_writes = False, wrote_outside(storage)
        return self._tree

    def refresh(self, storage: Storage, slot: Tensor | None = None, keys: Iterable[Key] | None = None) -> None:
        """Read the mask from the rows again, in place, so that recorded graphs stay valid. Called by storages.

        Args:
            storage: the storage that holds the rows.
            slot: int64 slots that were written in place; None for all.
            keys: the entries that were written; None for any.
        """
        if self._tree is None or not getattr(storage, "initialized", True) or not reads(keys, self.mask_key):
            return
        if slot is None:
            self._seen_writes, self._is_stale = wrote_outside(storage), True
            self._tree_of(storage)
        else:
            self.mark_update(slot, storage=storage)

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
        self.check_state(state_dict)
        self._is_stale = True

    @staticmethod
    def check_state(state_dict: Any) -> None:
        """Check that a state is one of this sampler.

        Raises:
            ValueError: if not.
        """
        check_state(state_dict, None, "DeviceRandomSampler")

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
    if not hasattr(type(storage), "ring"):  # on the class, since the instance may not have a ring yet
        raise TypeError(_wrong_storage(storage, name))
    if not storage.initialized:
        raise ValueError(f"{name}: expected a filled storage, received an empty one. Remedy: extend the buffer first.")
    return storage.ring


def _wrong_storage(storage: Any, name: str) -> str:
    return (
        f"{name}: expected a torchrl_perf.replay.DeviceStorage, received {type(storage).__name__}. Remedy: "
        "make_replay_buffer, or ReplayBuffer(storage=DeviceStorage(...), writer=DeviceWriter(), ...)."
    )


def sampled_ring(storage: Any, batch_size: int, name: str) -> Ring:
    """The ring of a storage that ``batch_size`` rows can be drawn from, with replacement.

    Whether it has rows is read from the mirrors on the host, if these are reliable.

    Raises:
        ValueError: if no row is filled, or ``batch_size`` is not positive.
        TypeError: for a storage without a ring.
    """
    ring = ring_of(storage, name)
    if batch_size < 1:
        raise ValueError(
            f"{name}: expected a batch size of at least 1, received {batch_size}. Remedy: a positive number."
        )
    if not ring.host_length and not ring.recorded:
        raise ValueError(
            f"{name}: expected a filled storage to draw {batch_size} rows from, received an empty one. Remedy: extend "
            "the buffer first."
        )
    return ring


def wrote_outside(storage: Any) -> int:
    """How often rows of a storage were written through views, as far as the storage noticed."""
    return 0 if storage is None else storage.count_outside_writes()


def reads(keys: Iterable[Key] | None, mask_key: NestedKey | None, end_key: NestedKey | None = None) -> bool:
    """Whether written entries (None for any) are among those that a sampler's state depends on."""
    if mask_key is None and end_key is None:
        return False
    if keys is None:
        return True
    watched = [key for key in (mask_key, end_key) if key is not None]
    watched = {unravel_key((key,) if isinstance(key, str) else key) for key in watched}
    if mask_key is not None:
        watched.add(("next", "terminated"))  # terminal rows are always admitted
    return any(unravel_key(key) in watched for key in keys)


def refuse_capture(name: str) -> None:
    """Raise if a CUDA graph is being recorded: memory made there would belong to the graph."""
    if capturing():
        raise RuntimeError(
            f"{name}: expected the first extend or sample outside of a CUDA graph, since it makes the tree, received "
            "it while one records. Remedy: extend and sample once before capturing."
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
