"""Sampling in epochs: every row of the buffer once, in random order."""

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_perf.functional.rows.permutation import random_permutation
from torchrl_perf.functional.rows.shuffle import ROUNDS, shuffled_index
from torchrl_perf.replay._checks import (
    check_entries_of_state,
    check_least_of_state,
    check_state,
    check_tensor_of_state,
    state_error,
)
from torchrl_perf.replay.random import refuse_capture, ring_of, sampled_ring
from torchrl_perf.replay.ring import Ring
from torchrl_perf.replay.signatures import shows_arguments
from torchrl_perf.runtime.capture import is_capturing
from torchrl_perf.runtime.compile import compiled
from torchrl_perf.runtime.files import load_checkpoint, save_checkpoint
from torchrl_perf.runtime.self_capture import HeldReplays

__all__ = ["DeviceSamplerWithoutReplacement"]

_NAME = "DeviceSamplerWithoutReplacement"
_FILE = "epoch.pt"


@shows_arguments
class DeviceSamplerWithoutReplacement(Sampler):
    """Draws each row once an epoch, in an order shuffled on the device; replaces ``SamplerWithoutReplacement``.

    ``for batch in buffer`` is one epoch. An epoch ends early, and another begins, when the number of rows changes.

    *From Python* the order of an epoch is made once, on CUDA by a graph from its third time on, and read in slices. The
    last batch of an epoch has the remaining rows, or is dropped with ``drop_last``; a batch size above the number of
    rows gives all rows, or is refused with ``drop_last``.

    *Inside a captured function* (:func:`torchrl_perf.runtime.capture`), and once ``ring.recorded`` says that the host
    no longer knows the number of rows, position and order are kept on the device, and the order is computed entry by
    entry, O(batch) a draw (swap-or-not shuffle, arXiv:1208.1176). Shapes are static there, so a short last batch is
    filled with the first rows of the next epoch; with ``drop_last`` it is dropped. ``for batch in buffer`` then counts
    the rows last known to the host; ``len(buffer)`` updates that number.

    Random numbers come from the generator of the buffer where it has one, else from the device's default generator.

    Args:
        drop_last: drop the last batch of an epoch if it is short of rows.
        shuffle: False keeps the order of the slots.
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._orders = HeldReplays(_NAME, says_held=False)  # held slots of some epochs are no fault
        self._ran_out = False
        self._order: Tensor | None = None
        self._position = 0
        self._device_state: dict[str, Tensor] = {}
        self._permute: Any = None

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draw the next rows of the epoch.

        Args:
            storage: a :class:`torchrl_perf.replay.DeviceStorage`.
            batch_size: rows; where fewer are left in the epoch, the batch is shorter.

        Returns:
            Slot numbers, ``[batch_size]`` int64 (fewer in the last batch of an epoch), and no info.

        Raises:
            ValueError: if no row is filled; and if fewer rows than ``batch_size`` are, with ``drop_last`` and while a
                graph is recorded, where a batch cannot be shorter.
            TypeError: for another storage.
        """
        ring = sampled_ring(storage, batch_size, _NAME)
        on_device, rows = ring.recorded or is_capturing(), ring.host_length * ring.num_streams
        if batch_size > rows and not ring.recorded and (self.drop_last or on_device):
            reason = "drop_last=True drops a shorter batch" if self.drop_last else "a captured batch has a fixed size"
            raise ValueError(
                f"{_NAME}: expected a batch size from 1 to the {rows} rows that are filled, received {batch_size}: "
                f"{reason}. Remedy: extend the buffer first, or draw fewer rows."
            )
        index = ring.vouch(self._draw_on_device(ring, batch_size) if on_device else self._draw(ring, batch_size))
        self._count((ring.host_length or ring.steps) * ring.num_streams, batch_size)
        return index, {}

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Allocate the tensors that a graph will read, before one is recorded; the written rows do not matter."""
        if storage is not None and not self._device_state:
            self._state_on(ring_of(storage, _NAME).cursor.device)

    def _draw(self, ring: Ring, batch_size: int) -> Tensor:
        rows = ring.host_length * ring.num_streams
        left = 0 if self._order is None else self._order.shape[0] - self._position
        if self._order is None or self._order.shape[0] != rows or left < (batch_size if self.drop_last else 1):
            self._order = None  # its memory is free for the next one
            self._order = self._new_order(rows, ring.cursor.device)
            self._position = 0
        return self._order[self._position : self._position + batch_size]

    def _new_order(self, rows: int, device: torch.device) -> Tensor:
        if not self.shuffle:
            return torch.arange(rows, device=device)
        if self._rng is not None:
            return torch.randperm(rows, device=device, generator=self._rng)
        if self._orders.serves(device):
            place = self._orders.place(lambda: ([random_permutation(rows, device)], None), rows, device)
            if place is not None:
                return place.again()[0]
        return random_permutation(rows, device)

    def _count(self, rows: int, batch_size: int) -> None:
        """Advance the host's position, and tell TorchRL's iteration when the epoch is over."""
        self._position += batch_size
        full, part = divmod(max(rows - self._position, 0), batch_size)
        self._remaining_batches = full + (part > 0 and not self.drop_last)
        self._ran_out = self._remaining_batches == 0
        if self._ran_out:
            self._order, self._position = None, 0

    def _draw_on_device(self, ring: Ring, batch_size: int) -> Tensor:
        """As ``_draw`` with everything that changes in device tensors, so that a graph may repeat it."""
        device = ring.cursor.device
        state = self._state_on(device)
        rows = (ring.length * ring.num_streams).clamp_min(1)
        fresh = torch.randint(2**31, (2, ROUNDS), device=device, generator=self._rng)

        restart = state["rows"] != rows
        if self.drop_last:
            restart = restart | (state["position"] + batch_size > rows)
        keys = torch.where(restart, fresh[0], state["keys"])
        start = torch.where(restart, 0, state["position"])
        place = start + torch.arange(batch_size, device=device)
        is_next = place >= rows
        place = torch.where(is_next, torch.remainder(place, rows), place)
        if self.shuffle:
            place = self._permutation(device)(place, rows, torch.where(is_next, fresh[1, :, None], keys[:, None]))

        end = start + batch_size
        is_over = end >= rows
        state["rows"].copy_(rows)
        state["position"].copy_(torch.where(is_over, torch.remainder(end, rows), end))
        state["keys"].copy_(torch.where(is_over, fresh[1], keys))
        # A ring that is full, or has never wrapped, fills the slots from 0; one that forgot rows fills its newest ones.
        oldest = torch.where(ring.length < ring.steps, ring.cursor - ring.length, 0)
        return torch.remainder(place + oldest * ring.num_streams, ring.steps * ring.num_streams)

    def _permutation(self, device: torch.device) -> Any:
        if self._permute is None:
            # Hundreds of tiny operations: compiled to one kernel on CUDA, where eager would launch each.
            self._permute = compiled(shuffled_index) if device.type == "cuda" else shuffled_index
        return self._permute

    def _state_on(self, device: torch.device) -> dict[str, Tensor]:
        if not self._device_state:
            refuse_capture(_NAME)
            with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
                zero = torch.zeros((), dtype=torch.int64, device=device)
                keys = torch.zeros(ROUNDS, dtype=torch.int64, device=device)
                self._device_state = {"position": zero, "rows": zero.clone(), "keys": keys}
        elif self._device_state["keys"].device != device:
            self._device_state = {name: tensor.to(device) for name, tensor in self._device_state.items()}
        return self._device_state

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether there are ``batch_size`` rows, or any where a batch may be shorter."""
        return len(storage) >= (batch_size if self.drop_last else 1)

    @property
    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch; TorchRL's iteration sets it to False before the next one."""
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = value

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_permute": None}  # a compiled function cannot be pickled

    def _empty(self) -> None:
        self._order, self._position, self._ran_out = None, 0, False
        for tensor in self._device_state.values():
            tensor.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the order of the running epoch and of the position in it, from which it continues exactly."""
        return {
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "ran_out": self._ran_out,
            "position": self._position,
            "order": None if self._order is None else self._order.clone(),
            "device": {name: tensor.clone() for name, tensor in self._device_state.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of :meth:`state_dict`; tensors that a graph reads are written in place.

        Raises:
            ValueError: for the state of another sampler.
        """
        self.check_state(state_dict)
        self.drop_last = bool(state_dict["drop_last"])
        self.shuffle = bool(state_dict["shuffle"])
        self._ran_out = bool(state_dict["ran_out"])
        self._position = int(state_dict["position"])
        order = state_dict["order"]
        self._order = None if order is None else order.clone()
        loaded: dict[str, Tensor] = dict(state_dict["device"])
        if not self._device_state:
            self._device_state = {name: tensor.clone() for name, tensor in loaded.items()}
            return
        for name, tensor in self._device_state.items():
            tensor.copy_(loaded[name]) if name in loaded else tensor.zero_()

    @staticmethod
    def check_state(state_dict: Any) -> None:
        """Check that a state is one of this sampler.

        Raises:
            ValueError: if not.
        """
        check_state(state_dict, "drop_last", _NAME)
        kinds: dict[str, Any] = {"drop_last": bool, "shuffle": bool, "ran_out": bool, "position": int}
        check_entries_of_state(state_dict, {**kinds, "order": (Tensor, NoneType), "device": Mapping}, _NAME)
        check_least_of_state(state_dict, {"position": 0}, _NAME)
        order, device = state_dict["order"], state_dict["device"]
        if order is not None:
            check_tensor_of_state(order, order.new_empty(order.shape[:1], dtype=torch.int64), "order", _NAME)
        shapes = {"position": (), "rows": (), "keys": (ROUNDS,)}
        if device and device.keys() != shapes.keys():
            raise state_error(_NAME, f"'device' of {sorted(shapes)}", f"{sorted(map(str, device))}")
        for name, value in device.items():
            check_tensor_of_state(value, torch.empty(shapes[name], dtype=torch.int64), name, _NAME)

    def dumps(self, path: str | Path) -> None:
        """Write :meth:`state_dict` into the folder ``path``."""
        save_checkpoint(self.state_dict(), Path(path) / _FILE)

    def loads(self, path: str | Path) -> None:
        """Read what :meth:`dumps` wrote."""
        self.load_state_dict(load_checkpoint(Path(path) / _FILE))
