"""The state of a sum tree over the slots of a replay buffer: weights, their sums, and proportional draws."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchrl_perf.functional.priority_tree import (
    FAN_OUT,
    LARGEST_PRIORITY,
    draw_leaves,
    importance_weight,
    leaf_weights,
    priority_weight,
    refresh_nodes_,
    row_age,
    uniform_rows,
    write_leaves_,
)
from torchrl_perf.kernels import gather_rows, row_kernels, tree_kernels

__all__ = ["PriorityTree", "RingCounters", "Rows"]

MAX_SLOTS = 2**28
_TOP = 64  # a program of the draw kernel sums the top level itself


class RingCounters(Protocol):
    """The counters of a :class:`~torchrl_perf.replay.ring.Ring` that a tree reads."""

    steps: int
    num_streams: int
    cursor: Tensor
    length: Tensor

    def generation(self, slot: Tensor) -> Tensor:
        """How often slots were written before their present rows."""
        ...

    def age_and_generation(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Time rows written after the rows of slots, and their generations."""
        ...


class Rows(NamedTuple):
    """Drawn rows, each ``[B]``: slots int64, importance weights float32, generations int64."""

    index: Tensor
    weight: Tensor
    generation: Tensor


def _level_sizes(num_slots: int, largest_top: int) -> tuple[int, ...]:
    """Sizes of the levels above the leaves; all but the last are multiples of ``FAN_OUT``."""
    sizes = [-(-num_slots // FAN_OUT)]
    while sizes[-1] > largest_top and len(sizes) < 3:  # the kernels descend at most three levels
        nodes = -(-sizes[-1] // FAN_OUT)
        sizes[-1] = nodes * FAN_OUT
        sizes.append(nodes)
    return tuple(sizes)


class PriorityTree:
    """Weights of slots with a sum tree of fan-out 64 above them.

    Sums are float64 and always recomputed from the children of a node: they do not drift, and a draw resolves
    probabilities down to 2**-53 at any number of slots. Everything runs without a host wait and may be recorded in a
    CUDA graph. On a CPU one level of sums is kept, about 8.2 bytes a slot in all; on CUDA up to three
    and the running sums of each node's children, 16.4 bytes a slot.

    Weights must be finite; NaN, negative ones and an index out of range are ignored.

    Args:
        num_slots: number of slots, 1 to 2**28.
        device: device of the tree.
        largest_top: most nodes of the top level; None for the device's default.

    Attributes:
        num_slots: number of slots.
        device: device of the tree.

    Raises:
        ValueError: if ``num_slots`` is out of range.
    """

    def __init__(self, num_slots: int, device: torch.device | str = "cpu", *, largest_top: int | None = None) -> None:
        if not 1 <= num_slots <= MAX_SLOTS:
            raise ValueError(
                f"expected num_slots from 1 to {MAX_SLOTS}, received {num_slots}. Remedy: a capacity in this range"
            )
        self.num_slots = num_slots
        self.device = torch.device(device)
        if largest_top is None:
            largest_top = _TOP if self.device.type == "cuda" else MAX_SLOTS
        self._levels = _level_sizes(num_slots, largest_top)
        self._num_nodes = -(-num_slots // FAN_OUT)
        self._words = torch.zeros(self._num_nodes * FAN_OUT, dtype=torch.int64, device=device)
        self._sums = torch.zeros(sum(self._levels), dtype=torch.float64, device=device)
        self._minima = torch.full((sum(self._levels),), torch.inf, device=device)
        # read only by the kernels
        self._running = self._make_running() if self.device.type == "cuda" else ()
        # Views are made once: a slice costs as much host time as a small operation.
        self._leaves = leaf_weights(self._words)
        self._first_sums, self._first_minima = self._sums[: self._num_nodes], self._minima[: self._num_nodes]
        self._top_sums, self._top_minima = self._sums[-self._levels[-1] :], self._minima[-self._levels[-1] :]

    def _make_running(self) -> tuple[Tensor, ...]:
        """Running sums of leaves and nodes, and what the kernels count: arrivals, and those that they expect."""
        arrived, counts = (
            torch.zeros(size, dtype=torch.int32, device=self._sums.device)
            for size in (self._levels[-1], 2 * sum(self._levels[1:]))
        )
        return torch.zeros_like(self._words, dtype=torch.float64), torch.zeros_like(self._sums), arrived, counts

    @property
    def words(self) -> Tensor:
        """The leaves as kernels read them, ``[num_slots and more]`` int64: a float32 weight in the low half of each."""
        return self._words

    @property
    def weights(self) -> Tensor:
        """Weights of all slots, ``[num_slots]`` float32, a strided view to read."""
        return self._leaves[: self.num_slots]

    @property
    def total(self) -> Tensor:
        """Sum of all weights, 0-d float64."""
        return self._top_sums.sum()

    @property
    def minimum(self) -> Tensor:
        """Smallest positive weight, 0-d float32; infinity if there is none."""
        return self._top_minima.amin()

    def weight_of(self, index: Tensor) -> Tensor:
        """Weights of slots.

        Args:
            index: ``[*]`` int64 in [0, num_slots).

        Returns:
            ``[*]`` float32.
        """
        return self._leaves[index]

    def set_(self, index: Tensor, weight: Tensor, keep: Tensor | None = None) -> None:
        """Sets weights. Of several for one slot the last that is kept counts, as in a loop over the rows.

        Args:
            index: ``[B]`` int64 slots.
            weight: ``[B]`` or 0-d float32, finite, at least 0.
            keep: ``[B]`` bool; rows that are False leave their slot unchanged.
        """
        self.update_(index, weight, keep=keep)

    def update_(
        self,
        index: Tensor,
        priority: Tensor,
        *,
        alpha: Tensor | None = None,
        eps: float = 0.0,
        keep: Tensor | None = None,
        max_priority: Tensor | None = None,
        ring: RingCounters | None = None,
        generation: Tensor | None = None,
    ) -> None:
        """Sets weights to ``priority ** alpha``; see :func:`~torchrl_perf.functional.priority_tree.priority_weight`.

        Args:
            index: ``[B]`` int64 slots.
            priority: ``[B]`` or 0-d, floating point.
            alpha: exponent, 0-d float32; None for 1.
            eps: added to positive priorities.
            keep: ``[B]`` bool; rows that are False leave their slot unchanged.
            max_priority: 0-d float32, raised to the largest finite priority that is written.
            ring: rows that are no longer valid in it are ignored.
            generation: ``[B]`` int64; rows whose slot now holds another generation are ignored. Needs ``ring``.
        """
        if index.shape[0] == 0:
            return
        kernels = tree_kernels(self._words)
        if kernels is not None:
            counters = None if ring is None else (ring.cursor, ring.length, ring.steps, ring.num_streams, generation)
            kernels.launch_update(
                self._words, self._sums, self._minima, self._running, self._levels, index, priority,
                num_slots=self.num_slots, eps=eps, keep=keep, alpha=alpha, max_priority=max_priority, ring=counters,
            )  # fmt: skip
            return
        priority = priority.to(torch.float32)
        weight, usable = priority_weight(priority, 1.0 if alpha is None else alpha, eps)
        kept = usable & (index >= 0) & (index < self.num_slots)
        if keep is not None:
            kept = kept & keep
        if ring is not None:
            age, present = ring.age_and_generation(index)
            kept = kept & (age < ring.length)
            kept = kept if generation is None else kept & (present == generation)
        if max_priority is not None:
            finite = torch.where(kept & (priority < torch.inf), priority, 0.0)
            torch.maximum(max_priority, finite.amax().clamp_(max=LARGEST_PRIORITY), out=max_priority)
        write_leaves_(self._words, index, weight, kept)
        self.refresh_(torch.where(kept, index, 0))

    def refresh_(self, index: Tensor | None = None) -> None:
        """Recomputes the sums above slots.

        Args:
            index: ``[B]`` int64 slots; None for all.
        """
        kernels = tree_kernels(self._words)
        if kernels is not None:
            self._refresh_kernels(kernels, index)
            return
        refresh_nodes_(self._words, self._first_sums, self._first_minima, index)
        below = 0
        for size_below in self._levels[:-1]:
            children = slice(below, below + size_below)
            below += size_below
            nodes = slice(below, below + size_below // FAN_OUT)
            self._sums[nodes] = self._sums[children].view(-1, FAN_OUT).sum(-1)
            self._minima[nodes] = self._minima[children].view(-1, FAN_OUT).amin(-1)

    def _refresh_kernels(self, kernels: Any, index: Tensor | None) -> None:
        kernels.launch_refresh(
            self._words, self._sums, self._minima, self._running, index, self._levels, self.num_slots
        )

    def draw(self, uniform: Tensor) -> Tensor:
        """Draws slots, each with probability weight / total. Undefined where all weights are 0: see ``total``.

        Args:
            uniform: ``[B]`` float64 in [0, 1).

        Returns:
            ``[B]`` int64.
        """
        kernels = tree_kernels(self._words)
        if kernels is not None:
            return kernels.launch_draw(
                self._words, self._sums, self._minima, self._running, uniform, self._levels, None, None
            )[0]
        return draw_leaves(self._words, self._first_sums, uniform)[0]

    def draw_rows(self, uniform: Tensor, beta: Tensor, ring: RingCounters) -> Rows:
        """Draws rows of a ring with their importance weights and generations.

        Where all weights are 0, valid rows are drawn uniformly with weight 1.

        Args:
            uniform: ``[B]`` float64 in [0, 1).
            beta: exponent of the importance weights, 0-d float32.
            ring: counters of the ring, of ``num_slots`` slots.

        Returns:
            Slots, weights ``(w / minimum) ** -beta``, generations.
        """
        kernels = tree_kernels(self._words)
        if kernels is not None:
            counters = (ring.cursor, ring.length, ring.steps, ring.num_streams)
            return Rows(
                *kernels.launch_draw(
                    self._words, self._sums, self._minima, self._running, uniform, self._levels, beta, counters
                )
            )
        index, weight, total = draw_leaves(self._words, self._first_sums, uniform)
        is_empty = total <= 0
        any_row = uniform_rows(uniform, ring.cursor, ring.length, ring.steps, ring.num_streams)
        index = torch.where(is_empty, any_row, index)
        weight = torch.where(is_empty, 1.0, importance_weight(weight, self._first_minima.amin(), beta))
        return Rows(index, weight, ring.generation(index))

    def draw_memory(self, uniform: Tensor, beta: Tensor, ring: RingCounters, memory: Tensor) -> tuple[Rows, Tensor]:
        """:meth:`draw_rows`, and the bytes of the rows: in one launch on CUDA.

        Args:
            uniform: as there, and so are the next two.
            beta: as there.
            ring: as there.
            memory: ``[num_slots, row_bytes]`` uint8, contiguous.

        Returns:
            The rows, and ``[B, row_bytes]``.
        """
        kernels = None if tree_kernels(self._words) is None else row_kernels(memory)
        if kernels is None:
            rows = self.draw_rows(uniform, beta, ring)
            return rows, gather_rows(memory, rows.index)
        tree = (self._words, self._sums, self._minima, *self._running[:2])
        counters = (ring.cursor, ring.length, ring.steps, ring.num_streams)
        *found, out = kernels.launch_draw_by_weight_and_gather(memory, tree, self._levels, uniform, beta, counters)
        return Rows(*found), out

    def forget_(self, ring: RingCounters) -> None:
        """Sets the weights of rows that are no longer valid in the ring to 0; takes time in proportion to the slots."""
        time_slot = torch.arange(ring.steps, device=self.device)
        is_valid = row_age(time_slot, ring.cursor, ring.steps, 1)[0] < ring.length
        self._words[: self.num_slots].view(ring.steps, -1).mul_(is_valid.unsqueeze(-1))
        self.refresh_()

    def raise_(self, exponent: float | Tensor) -> None:
        """Raises all weights to a power; weights of 0 stay 0."""
        limits = torch.finfo(torch.float32)
        raised = self._leaves.pow(exponent).clamp_(limits.tiny, limits.max)
        self._words.copy_(torch.where(self._leaves > 0, raised, 0.0).view(torch.int32))
        self.refresh_()

    def clear_(self) -> None:
        """Sets all weights to 0."""
        self._words.zero_()
        self._sums.zero_()
        self._minima.fill_(torch.inf)
        for running in self._running:
            running.zero_()

    def state_dict(self, filled: int | None = None) -> dict[str, Any]:
        """Copies the weights.

        Args:
            filled: slots from 0 on that can have a weight; None for all.

        Returns:
            ``num_slots`` (int) and ``weights`` (``[filled]`` float32).
        """
        return {
            "num_slots": self.num_slots,
            "weights": self.weights[:filled].clone(memory_format=torch.contiguous_format),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`, bit for bit and in place: recorded graphs stay valid.

        Raises:
            ValueError: if the state is of another number of slots; the tree is then unchanged.
        """
        weights, num_slots = state.get("weights"), state.get("num_slots")
        if not isinstance(weights, Tensor) or weights.dtype != torch.float32 or not isinstance(num_slots, int):
            raise ValueError(
                f"expected weights as a float32 tensor, received {getattr(weights, 'dtype', type(weights).__name__)}. "
                "Remedy: load what state_dict() returned"
            )
        if num_slots != self.num_slots or weights.ndim != 1 or weights.shape[0] > num_slots:
            raise ValueError(
                f"expected the weights of {self.num_slots} slots, received those of {num_slots} in a tensor of shape "
                f"{tuple(weights.shape)}. Remedy: build the buffer with the capacity and streams of the checkpoint"
            )
        self.clear_()
        self._words[: weights.shape[0]].copy_(weights.to(self.device).view(torch.int32))
        self.refresh_()
