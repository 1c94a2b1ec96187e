"""Prioritised sampling on the device (prioritized experience replay, Schaul et al., arXiv:1511.05952)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor
from torchrl.data.replay_buffers.samplers import PrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_perf.replay._checks import (
    check_entries_of_state,
    check_least_of_state,
    check_state,
    check_tensor_of_state,
    check_tree_state,
    checked_alpha,
    checked_beta,
    is_whole,
    one_each,
    state_error,
)
from torchrl_perf.replay.layout import Key
from torchrl_perf.replay.priority_tree import PriorityTree, Rows
from torchrl_perf.replay.random import reads, refuse_capture, ring_of, row_mask, sampled_ring, wrote_outside
from torchrl_perf.replay.ring import Ring
from torchrl_perf.replay.signatures import shows_arguments
from torchrl_perf.runtime.files import load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from torchrl_perf.replay.storage import DeviceStorage

__all__ = ["DevicePrioritizedSampler"]

_NAME = "DevicePrioritizedSampler"
_FILE = "priorities.pt"
_REDUCTIONS = ("max", "min", "median", "mean")


@shows_arguments
class DevicePrioritizedSampler(PrioritizedSampler):
    """Draws rows with probability ``p ** alpha / sum``. The counterpart of ``PrioritizedSampler``, without host waits.

    *Priorities.* 0 is never drawn. NaN and negative numbers are ignored: the row keeps its priority. Infinity, and
    everything above ``functional.priority_tree.LARGEST_PRIORITY``, counts as that number. New rows get the largest
    finite priority seen so far, at first 1. Of several priorities for one row in one update the last one counts, as in
    a loop. If all priorities are 0, rows are drawn uniformly with weight 1.

    *Stale updates.* A sample says which generation of its slots it saw (info "index_generation", and the attribute
    ``generation`` of the index tensor). Updates for rows that were overwritten since, or forgotten, are ignored.

    *Importance weights* are ``(w / w_min) ** -beta`` with the smallest positive weight of the buffer: the formula
    ``(N P) ** -beta`` divided by its maximum.

    *Schedules.* With ``anneal_steps``, :meth:`step` moves alpha to ``alpha_end`` and beta to ``beta_end`` on a line,
    computed from a counter on the device. A new beta takes effect at the next draw, a new alpha only for new
    priorities: the weights of rows stay until their priority is updated. Assigning ``sampler.alpha`` converts all
    weights.

    *Masks.* With ``mask_key`` the rows where that entry is False have priority 0, except terminal ones. If the entry is
    changed in place, rows that become False are no longer drawn, and those that become True count as new.

    The tree is made at the first extend or sample. With a compact storage each extend takes time in proportion to the
    capacity, because rows may be forgotten.

    Args:
        max_capacity: rows of the buffer, checked against the storage; None for those of the storage.
        alpha: exponent of the priorities, at least 0; 0.6 by default.
        beta: exponent of the importance weights, in [0, 1]; 0.4 by default.
        eps: added to positive priorities.
        dtype: of the importance weights; only float32.
        reduction: how a buffer reduces the priorities of a row that has several: "max", "min", "median" or "mean".
        max_priority_within_buffer: only False: new rows get the largest priority seen since the start.
        device: None, or that of the storage, where the tree is.
        mask_key: key of a bool entry of the rows.
        alpha_end: alpha after ``anneal_steps``.
        beta_end: beta after ``anneal_steps``.
        anneal_steps: number of steps from the first to the last value.

    The first arguments are those of ``PrioritizedSampler``, in its order; ``(alpha, beta)`` alone, as fractions, are
    taken too.

    Raises:
        ValueError: for arguments out of range, and for those that have no meaning here.
    """

    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self,
        max_capacity: int | float | None = None,
        alpha: float | None = None,
        beta: float | None = None,
        eps: float = 0.0,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
        *,
        mask_key: NestedKey | None = None,
        alpha_end: float | None = None,
        beta_end: float | None = None,
        anneal_steps: int | None = None,
    ) -> None:
        # Not super().__init__: it makes the trees of TorchRL's extension.
        max_capacity, alpha, beta = _in_order(max_capacity, alpha, beta)
        is_annealed = alpha_end is not None or beta_end is not None
        if is_annealed != (anneal_steps is not None) or (anneal_steps is not None and anneal_steps < 1):
            raise ValueError(
                f"{_NAME}: expected anneal_steps >= 1 together with alpha_end or beta_end, received "
                f"anneal_steps={anneal_steps}, alpha_end={alpha_end}, beta_end={beta_end}. Remedy: leave anneal_steps "
                "out, or give it an end."
            )
        if not 0 <= eps < float("inf"):
            raise ValueError(f"{_NAME}: expected a finite eps >= 0, received {eps}. Remedy: eps=1e-8, for example.")
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"{_NAME}: expected a reduction of {_REDUCTIONS}, received {reduction!r}. Remedy: one of these."
            )
        if dtype != torch.float32 or max_priority_within_buffer:
            raise ValueError(
                f"{_NAME}: expected dtype=torch.float32 and max_priority_within_buffer=False, received {dtype} and "
                f"{max_priority_within_buffer}: weights are float32 (sums float64), and the largest priority is a "
                "running one, which costs no search. Remedy: leave them out."
            )
        self._alphas = (checked_alpha(alpha), checked_alpha(alpha if alpha_end is None else alpha_end))
        self._betas = (checked_beta(beta), checked_beta(beta if beta_end is None else beta_end))
        self._anneal_steps = anneal_steps
        self._count: int | Tensor = 0
        self._eps = float(eps)
        self.mask_key = mask_key
        self.reduction = reduction
        self.dtype = dtype
        self._max_capacity = max_capacity
        self._max_priority_within_buffer = False
        self._device = None if device is None else torch.device(device)
        self._tree: PriorityTree | None = None
        self._admitted: Tensor | None = None  # the mask when last read; one more slot, for rows that were not written
        self._seen_writes = 0  # writes through views that the tree knows of
        self._storage: Any = None
        self._pending: dict[str, Any] | None = None
        self._largest = self._alpha_now = self._beta_now = torch.ones(())

    # --- what TorchRL reads

    @property
    def alpha(self) -> float | Tensor:
        """Exponent of the priorities; on a schedule a 0-d tensor on the device. Assign to it to end the schedule."""
        return self._alphas[0] if self._alphas[0] == self._alphas[1] else self._alpha_now

    @alpha.setter
    def alpha(self, value: float) -> None:
        before, value = self.alpha, checked_alpha(value)
        self._alphas = (value, value)
        if self._tree is not None:
            if isinstance(before, float) and before == 0 and value > 0:
                warnings.warn(
                    f"{_NAME}: with alpha=0 all weights were 1 and the priorities are lost; rows are drawn uniformly "
                    "until their priority is updated.",
                    stacklevel=2,
                )
            elif not isinstance(before, float) or before != value:
                self._tree.raise_(value / before)
            self._alpha_now.fill_(value)

    @property
    def beta(self) -> float | Tensor:
        """Exponent of the importance weights, likewise."""
        return self._betas[0] if self._betas[0] == self._betas[1] else self._beta_now

    @beta.setter
    def beta(self, value: float) -> None:
        value = checked_beta(value)
        self._betas = (value, value)
        self._beta_now.fill_(value)

    @property
    def eps(self) -> float:
        """Added to positive priorities."""
        return self._eps

    @property
    def default_priority(self) -> float | Tensor:
        """Priority of new rows: the largest finite one so far, 0-d float32 on the device; 1.0 before the first row."""
        return 1.0 if self._tree is None else self._largest

    @property
    def device(self) -> torch.device:
        """Device of the tree."""
        return torch.device("cpu") if self._tree is None else self._tree.device

    @property
    def max_size(self) -> int | None:
        """Rows of the buffer, None before they are known."""
        return self._max_capacity if self._tree is None else self._tree.num_slots

    @property
    def tree(self) -> PriorityTree | None:
        """The weights of all slots; None before the first row."""
        return self._tree

    # --- sampling

    def sample(
        self, storage: Storage, batch_size: int, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Draw rows.

        Args:
            storage: a :class:`~torchrl_perf.replay.DeviceStorage`.
            batch_size: rows B; may exceed the number of filled rows.
            generator: on the storage's device; by default the buffer's.

        Returns:
            Slots ``[B]`` int64, and the info: "priority_weight" ``[B]`` float32, "index_generation" ``[B]`` int64.

        Raises:
            ValueError: if no row is filled.
            TypeError: for another storage.
        """
        tree, uniform = self._ready(storage, batch_size, generator)
        return self._told(tree.draw_rows(uniform, self._beta_now, storage.ring), storage)

    def sample_rows(self, storage: DeviceStorage, batch_size: int) -> tuple[Tensor, TensorDict, dict[str, Tensor]]:
        """Draw slots as :meth:`sample` does, and read their rows: one launch for plain rows on CUDA.

        Args:
            storage: a :class:`~torchrl_perf.replay.DeviceStorage`.
            batch_size: rows B.

        Returns:
            Slots ``[B]`` int64, the rows ``[B]``, and the info.

        Raises:
            ValueError, TypeError: see :meth:`sample`.
        """
        tree, uniform = self._ready(storage, batch_size, None)
        rows, data = storage.draw_by_weight(tree, uniform, self._beta_now)
        index, info = self._told(rows, storage)
        return index, data, info

    def _ready(self, storage: Any, batch_size: int, generator: torch.Generator | None) -> tuple[PriorityTree, Tensor]:
        """The tree of a storage that rows can be drawn from, and random numbers ``[B]`` float64."""
        ring = sampled_ring(storage, batch_size, _NAME)
        tree = self._tree if storage is self._storage and self._tree is not None else self.attach(storage, ring)
        if self.mask_key is not None and wrote_outside(storage) != self._seen_writes:
            self.refresh(storage)
        source = self._rng if generator is None else generator
        return tree, torch.rand(batch_size, dtype=torch.float64, device=tree.device, generator=source)

    @staticmethod
    def _told(rows: Rows, storage: Any) -> tuple[Tensor, dict[str, Tensor]]:
        # TorchRL's buffers pass only the index on to ``update_priority``; it carries the generations.
        storage.ring.vouch(rows.index).generation = rows.generation
        return rows.index, {"priority_weight": rows.weight, "index_generation": rows.generation}

    def is_steady(self, storage: DeviceStorage) -> bool:
        """Whether the host has no part in the next draw: there are rows, and the tree knows their masks."""
        ring = storage.ring
        if self.mask_key is not None and wrote_outside(storage) != self._seen_writes:
            return False
        return self._tree is not None and (ring.recorded or ring.host_length > 0)

    learns_rows = True
    """Whether :meth:`mark_update` has something to do."""

    def update_priority(
        self,
        index: int | Tensor,
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
        generation: Tensor | None = None,
    ) -> None:
        """Set priorities of rows, without a host wait.

        Args:
            index: int64 slots of any shape (a tensor, a list or a number); those out of range are ignored.
            priority: as many numbers, or one for all.
            storage: storage of the rows; by default the one of the last sample or extend.
            generation: int64, as many: generations of the rows when they were sampled. By default the attribute
                ``generation`` of ``index``; without either, the present rows are assumed.

        Raises:
            ValueError: if the numbers do not match the slots.
            RuntimeError: if no storage is known.
        """
        if storage is None and self._storage is None:
            raise RuntimeError(
                f"{_NAME}: expected a storage, received none yet. Remedy: pass storage=, or extend first."
            )
        storage = self._storage if storage is None else storage
        ring = ring_of(storage, _NAME)
        tree = self.attach(storage, ring)
        if generation is None:
            generation = getattr(index, "generation", None)
        slot = _on(index, tree.device)
        if slot.is_floating_point() or slot.dtype == torch.bool:
            raise ValueError(
                f"{_NAME}: expected int64 slots, received {slot.dtype} {tuple(slot.shape)}. Remedy: slot.long(), one "
                "dimension."
            )
        values = _on(priority, tree.device)
        values = values.detach() if values.requires_grad else values
        if values.shape != slot.shape or values.ndim > 1:
            values = one_each(values, slot, "priority")
        values = values if values.is_floating_point() else values.to(torch.float32)
        if generation is not None and (generation.shape != slot.shape or generation.ndim != 1):
            generation = one_each(generation, slot, "generation").expand(slot.numel())
        slot = _flat(slot)
        if self.mask_key is not None:
            values = torch.where(row_mask(storage, slot, self.mask_key), values, 0.0)
        tree.update_(
            slot,
            values,
            alpha=self._alpha_now,
            eps=self._eps,
            max_priority=self._largest,
            ring=ring,
            generation=generation,
        )

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Give new rows the largest priority seen so far. Buffers call it after each write.

        Args:
            index: int64 slots of any shape.
            storage: storage of the rows; by default the one of the last sample or extend.
        """
        storage = self._storage if storage is None else storage
        ring = ring_of(storage, _NAME)
        tree = self.attach(storage, ring)
        slot = _flat(_on(index, tree.device))
        priority = self._largest
        if self._admitted is not None and self.mask_key is not None:
            admitted = row_mask(storage, slot, self.mask_key)
            self._admitted.index_put_((slot,), admitted)
            priority = torch.where(admitted, priority, 0.0)
        tree.update_(slot, priority, alpha=self._alpha_now, eps=self._eps)
        if getattr(storage, "compact", False):
            tree.forget_(ring)

    def refresh(self, storage: Storage, slot: Tensor | None = None, keys: Iterable[Key] | None = None) -> None:
        """Read the mask from the rows again, in place, so that recorded graphs stay valid. Called by storages.

        Rows that become False get the priority 0, those that become True the largest priority seen so far; the others
        keep theirs.

        Args:
            storage: the storage that holds the rows.
            slot: int64 slots that were written in place; None for all.
            keys: the entries that were written; None for any.
        """
        if self._tree is None or self._admitted is None or self.mask_key is None or not reads(keys, self.mask_key):
            return
        if slot is None:
            self._seen_writes = wrote_outside(storage)
            slot = torch.arange(self._tree.num_slots, device=self._tree.device)
        slot = slot.reshape(-1)
        admitted = row_mask(storage, slot, self.mask_key)
        is_new = admitted & ~self._admitted[slot]
        priority = torch.where(is_new, self._largest, torch.nan)  # NaN: the row keeps what it has
        priority = torch.where(admitted, priority, 0.0)
        self._tree.update_(slot, priority, alpha=self._alpha_now, eps=self._eps, ring=ring_of(storage, _NAME))
        self._admitted.index_put_((slot,), admitted)

    def add(self, index: int | Tensor) -> None:
        """Do nothing: :meth:`mark_update` handles new rows."""

    def extend(self, index: Tensor) -> None:
        """Do nothing: :meth:`mark_update` learns of new rows."""

    def step(self, n: int = 1) -> None:
        """Advance the schedules of alpha and beta by ``n`` steps, on the device."""
        self._count += n
        self._set_exponents()

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """A copy: weights of the filled slots, largest priority, exponents, schedule. Tensors and plain scalars."""
        if self._tree is None and self._pending is not None:
            return {**self._pending}
        state: dict[str, Any] = {
            "alpha": list(self._alphas),
            "beta": list(self._betas),
            "eps": self._eps,
            "anneal_steps": self._anneal_steps,
            "count": int(self._count),
            "max_priority": 1.0,
            "tree": None,
            "admitted": None,
        }
        if self._tree is not None:
            if self.mask_key is not None and wrote_outside(self._storage) != self._seen_writes:
                self.refresh(self._storage)
            ring = None if self._storage is None else self._storage.ring
            filled = None if ring is None else min(ring.read()[0], ring.steps) * ring.num_streams
            state["max_priority"] = float(self._largest)
            state["tree"] = self._tree.state_dict(filled)
            state["admitted"] = None if self._admitted is None else self._admitted.clone()
        return state

    def check_state(self, state_dict: Any) -> None:
        """Check that a state is one of this sampler, of its capacity.

        Raises:
            ValueError: if not.
        """
        check_state(state_dict, "max_priority", _NAME)
        kinds: dict[str, Any] = {"alpha": (list, tuple), "beta": (list, tuple), "eps": float, "count": int}
        kinds |= {"anneal_steps": (int, type(None)), "max_priority": float, "tree": (Mapping, type(None))}
        check_entries_of_state(state_dict, kinds, _NAME)
        check_least_of_state(state_dict, {"eps": 0, "count": 0, "anneal_steps": 1, "max_priority": 0}, _NAME)
        for key, checked in (("alpha", checked_alpha), ("beta", checked_beta)):
            if len(state_dict[key]) != 2:
                raise state_error(_NAME, f"{key!r} as a first and a last value", f"{state_dict[key]}")
            for value in state_dict[key]:
                checked(value)
        saved, admitted = state_dict["tree"], state_dict.get("admitted")
        if saved is None:
            return
        check_tree_state(saved, None if self._tree is None else self._tree.num_slots, _NAME)
        if self.mask_key is not None and admitted is not None:
            like = torch.empty(saved["num_slots"] + 1, dtype=torch.bool)
            check_tensor_of_state(admitted, like, "admitted", _NAME)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, bit for bit.

        Raises:
            ValueError: if it is of another capacity or sampler; nothing is changed then.
        """
        self.check_state(state_dict)
        self._alphas, self._betas = tuple(state_dict["alpha"]), tuple(state_dict["beta"])
        self._eps, self._anneal_steps = state_dict["eps"], state_dict["anneal_steps"]
        if self._tree is None:
            self._count, self._pending = state_dict["count"], state_dict
            return
        self._restore(state_dict)

    def _restore(self, state: dict[str, Any]) -> None:
        assert self._tree is not None and isinstance(self._count, Tensor)
        self._count.fill_(state["count"])
        self._largest.fill_(state["max_priority"])
        if state["tree"] is None:
            self._tree.clear_()
        else:
            self._tree.load_state_dict(state["tree"])
        admitted = state.get("admitted")
        if self._admitted is not None and admitted is not None:
            self._admitted.copy_(admitted)
        elif self._admitted is not None:  # older versions did not save it: rows with a weight were admitted
            self._admitted[:-1].copy_(self._tree.weights > 0)
        self._alpha_now.fill_(self._alphas[0])
        self._beta_now.fill_(self._betas[0])
        self._set_exponents()

    def dumps(self, path: str | Path) -> None:
        """Write :meth:`state_dict` into the folder ``path``."""
        save_checkpoint(self.state_dict(), Path(path) / _FILE)

    def loads(self, path: str | Path) -> None:
        """Restore what :meth:`dumps` wrote."""
        self.load_state_dict(load_checkpoint(Path(path) / _FILE))

    def _init(self) -> None:
        """TorchRL's hook that makes its trees."""

    def _empty(self) -> None:
        self.clear_()

    def clear_(self) -> None:
        """Forget all rows and their priorities, as when the buffer is emptied."""
        self._pending = None
        if self._tree is not None:
            self._tree.clear_()
            self._largest.fill_(1.0)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_storage": None}

    def __repr__(self) -> str:
        return f"{_NAME}(alpha={self._alphas[0]}, beta={self._betas[0]}, eps={self._eps}, reduction={self.reduction})"

    def attach(self, storage: Any, ring: Ring) -> PriorityTree:
        """The tree for the storage's slots. Rows that were there before the sampler count as new."""
        self._storage = storage
        device = ring.cursor.device
        if self._tree is not None and self._tree.num_slots == ring.capacity and self._tree.device == device:
            return self._tree
        return self._make_tree(storage, ring, device)

    @torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
    def _make_tree(self, storage: Any, ring: Ring, device: torch.device) -> PriorityTree:
        refuse_capture(_NAME)
        if self._max_capacity is not None and ring.capacity > self._max_capacity:
            raise ValueError(
                f"{_NAME}: expected at most max_capacity={self._max_capacity} slots, received a storage of "
                f"{ring.capacity}. Remedy: leave max_capacity out."
            )
        if self._device is not None and self._device.type != device.type:
            raise ValueError(
                f"{_NAME}: expected a storage on device={self._device}, where the tree shall be, received one on "
                f"{device}. Remedy: leave device out."
            )
        if self._pending is not None and self._pending["tree"] is not None:
            slots = self._pending["tree"]["num_slots"]
            if slots != ring.capacity:
                raise ValueError(
                    f"{_NAME}: expected a storage of {slots} slots as loaded, received {ring.capacity}. Remedy: a "
                    "storage of the capacity that was saved."
                )
        self._tree = tree = PriorityTree(ring.capacity, device)
        self._count = torch.tensor(int(self._count), device=device)
        self._largest = torch.ones((), device=device)
        self._alpha_now = torch.full((), self._alphas[0], device=device)
        self._beta_now = torch.full((), self._betas[0], device=device)
        self._set_exponents()
        if self.mask_key is not None:
            self._admitted = torch.zeros(ring.capacity + 1, dtype=torch.bool, device=device)
        self._seen_writes = wrote_outside(storage)
        if self._pending is not None:
            self._restore(self._pending)
            self._pending = None
            return tree
        slot = torch.arange(ring.capacity, device=device)
        priority = torch.ones(ring.capacity, device=device)
        if self._admitted is not None and self.mask_key is not None:
            admitted = row_mask(storage, slot, self.mask_key)
            self._admitted[:-1].copy_(admitted)
            priority = admitted.to(torch.float32)
        tree.update_(slot, priority, alpha=self._alpha_now, eps=self._eps, ring=ring)
        return tree

    def _set_exponents(self) -> None:
        if self._anneal_steps is None or not isinstance(self._count, Tensor):
            return
        fraction = (self._count / self._anneal_steps).clamp_(max=1.0)
        for value, (first, last) in ((self._alpha_now, self._alphas), (self._beta_now, self._betas)):
            if first != last:
                value.copy_(first + (last - first) * fraction)


def _on(values: Any, device: torch.device) -> Tensor:
    """Numbers as a tensor on a device; what is one is handed on."""
    is_there = isinstance(values, Tensor) and values.device == device
    return values if is_there else torch.as_tensor(values, device=device)


def _flat(slot: Tensor) -> Tensor:
    """Slots as int64 ``[B]``, in the order that they came in."""
    slot = slot if slot.ndim == 1 else slot.reshape(-1)
    return slot if slot.dtype == torch.int64 else slot.to(torch.int64)


def _in_order(capacity: Any, alpha: Any, beta: Any) -> tuple[int | None, float, float]:
    """``max_capacity``, ``alpha``, ``beta`` from arguments in TorchRL's order, or from only ``(alpha, beta)``.

    A whole number above 1 is a capacity; any other number, without a third argument, an exponent.

    Raises:
        ValueError: for a first argument that is neither.
    """
    is_capacity = capacity is None or (is_whole(capacity) and (capacity > 1 or isinstance(capacity, int)))
    if not is_capacity:
        if beta is not None:
            raise ValueError(
                f"{_NAME}: expected max_capacity as a whole number of at least 1, received {capacity!r}. Remedy: "
                "DevicePrioritizedSampler(max_capacity, alpha, beta), or (alpha, beta)."
            )
        capacity, alpha, beta = None, capacity, alpha
    alpha, beta = 0.6 if alpha is None else alpha, 0.4 if beta is None else beta
    return (None if capacity is None else int(capacity)), alpha, beta
