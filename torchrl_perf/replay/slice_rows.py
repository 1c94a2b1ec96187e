"""Where slices may start, and from their starts to their rows and to the flags that their samples carry."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_perf.functional.rows.windows import run_lengths
from torchrl_perf.kernels import slice_kernels
from torchrl_perf.replay.priority_tree import PriorityTree
from torchrl_perf.replay.random import row_mask
from torchrl_perf.replay.ring import Ring

MASK = ("collector", "mask")
INIT = "is_init"


class SliceRows:
    """Follows slices of a storage's ring; its views of the stored flags are made once.

    Args:
        storage: a :class:`~torchrl_perf.replay.DeviceStorage` with rows.
        length: rows L of a slice.
        end_key: bool entry that ends an episode.
        truncated_key: where the end of a slice is marked; None to leave all flags as stored.
        mask_key: bool entry, False for rows of inactive agents; None where all are active.

    Attributes:
        ring: the ring that the views belong to.

    Raises:
        KeyError: if ``end_key`` or ``mask_key`` is not stored.
    """

    def __init__(
        self,
        storage: Any,
        length: int,
        end_key: NestedKey,
        truncated_key: NestedKey | None,
        mask_key: NestedKey | None,
    ) -> None:
        self.ring: Ring = storage.ring
        self._storage, self._length, self._mask_key = storage, length, mask_key
        self._end_key, self._truncated_key = end_key, truncated_key
        self._order = torch.arange(length, device=self.ring.device)
        self._is_first, self._is_last = self._order == 0, self._order == length - 1
        self._end = storage.field(end_key).flatten(0, 1)
        self._truncated = None if truncated_key is None else _stored(storage, truncated_key)
        self._init = _stored(storage, INIT)
        self._flags = self._kernel_flags()

    def _kernel_flags(self) -> Any:
        """Flags as the kernel reads them; None where it cannot: several flags a row, other dtypes, or no CUDA."""
        kernels = slice_kernels(self._end)
        if kernels is None or self._length > kernels.MAX_LENGTH:
            return None
        mask = None if self._mask_key is None else self._storage.field(self._mask_key).flatten(0, 1)
        terminated = None if mask is None else _stored(self._storage, ("next", "terminated"))
        found = (self._end, self._truncated, self._init, mask, terminated)
        known = [flag for flag in found if flag is not None]
        is_single = all(flag.dtype == torch.bool and math.prod(flag.shape[1:]) == 1 for flag in known)
        if not is_single or len({flag.stride(0) for flag in known}) > 1:
            return None
        if self._truncated is not None and self._truncated.shape != self._end.shape:
            return None
        flat = [None if flag is None else flag.view(flag.shape[0]).view(torch.uint8) for flag in found]
        return kernels.Flags(*flat)

    def read(
        self, uniform: Tensor, drawn: Tensor | None, tree: PriorityTree | None, info: dict[Any, Any]
    ) -> tuple[Tensor, dict[Any, Any]]:
        """Follows slices.

        Args:
            uniform: ``[S]`` float64 in [0, 1): says where a slice starts for which the tree has no start.
            drawn: starts ``[S]`` int64 that were drawn from ``tree``; None where every row may be a start.
            tree: weights of the starts.
            info: of the draw: "priority_weight" ``[S]`` for slices by priority, else nothing.

        Returns:
            Slots ``[S * L]`` int64 and the info of the sample.
        """
        kernels = None if self._flags is None else slice_kernels(uniform)
        if kernels is None:
            return self._read(uniform, drawn, tree, info)
        ring, marks = self.ring, self._truncated_key is not None
        found = kernels.launch_slices(
            uniform, None if tree is None else (drawn, tree.words), info.get("priority_weight"), self._flags,
            self._length, counters=(ring.cursor, ring.length, ring.steps, ring.num_streams), marks=marks,
        )  # fmt: skip
        mask, end, truncated, init = found.flags.unbind()
        info = {MASK: mask}
        if marks:
            shape = (-1, *self._end.shape[1:])
            info[self._truncated_key], info[self._end_key] = truncated.view(shape), end.view(shape)
        if self._init is not None:
            info[INIT] = init.view(-1, *self._init.shape[1:])
        if found.generation is not None:
            info["priority_weight"], info["index_generation"] = found.weight, found.generation
        return found.index, info

    def _read(
        self, uniform: Tensor, drawn: Tensor | None, tree: PriorityTree | None, info: dict[Any, Any]
    ) -> tuple[Tensor, dict[Any, Any]]:
        """The same in torch operations."""
        ring, length = self.ring, self._length
        start = ring.slots_at(uniform, length - 1)
        if tree is not None:
            start = torch.where(tree.total > 0, drawn, start)
        rows = torch.add(start.unsqueeze(1), self._order, alpha=ring.num_streams).remainder_(ring.capacity)
        # Where no slice of valid rows is left, rows are drawn in front of the oldest or behind the newest one too.
        age = ring.age(start).unsqueeze(1) - self._order
        index, weight = rows.view(-1), info.get("priority_weight")
        info = self._marks(rows, (age >= 0) & (age < ring.length))
        if weight is not None:
            info["priority_weight"] = weight.unsqueeze(1).expand(rows.shape).reshape(-1)
            info["index_generation"] = ring.generation(index)
        return index, info

    def _marks(self, rows: Tensor, exists: Tensor) -> dict[Any, Any]:
        """The flags of slices ``rows [S, L]``; ``exists [S, L]`` says which rows are valid."""
        S, L = rows.shape
        done, ended = self.ends(rows)
        first_end = torch.where(ended, self._order, L - 1).amin(1, keepdim=True)
        mask = exists & (self._order <= first_end)
        if self._mask_key is not None:
            mask = mask & row_mask(self._storage, rows.view(-1), self._mask_key).view(S, L)
        info: dict[Any, Any] = {MASK: mask.view(-1)}
        if self._truncated_key is not None:
            # Nothing may reach over the last row of a slice, nor over the last row before one that the mask leaves out.
            is_cut = self._is_last.repeat(S, 1)
            is_cut[:, :-1] = mask[:, :-1] & ~mask[:, 1:]
            is_cut = is_cut.view(S, L, *(1 for _ in done.shape[2:]))
            truncated, stored = is_cut & ~done, self._truncated
            info[self._truncated_key] = (truncated if stored is None else truncated | stored[rows]).flatten(0, 1)
            info[self._end_key] = (is_cut | done).flatten(0, 1)
        if self._init is not None:
            is_first = self._is_first.view(1, L, *(1 for _ in self._init.shape[1:]))
            info[INIT] = (is_first | self._init[rows]).flatten(0, 1)
        return info

    def starts(self, run: Tensor, time_rows: int, within_episode: bool) -> tuple[Tensor, Tensor]:
        """Finds the slots that slices may start at since the newest ``time_rows`` time rows were written.

        Args:
            run: int64 ``[N]``, rows since the last break of each stream before them; brought up to date.
            time_rows: number of new time rows, at most the steps of the ring.
            within_episode: whether an end breaks a run.

        Returns:
            Slots ``[R * N]`` int64 of the newest R = min(time_rows + L - 1, steps) time rows, in the order of time, and
            whether a slice may start there, bool.
        """
        ring, L = self.ring, self._length
        kernels = None if self._flags is None else slice_kernels(run)
        if kernels is not None and time_rows + L <= kernels.MAX_TIME_ROWS:
            counters = (ring.cursor, ring.length, ring.steps, ring.num_streams)
            return kernels.launch_starts(run, self._flags, time_rows, L, counters=counters, has_end=within_episode)
        count = min(time_rows + L - 1, ring.steps)
        streams = torch.arange(ring.num_streams, device=ring.device)
        back = torch.arange(-count, 0, device=ring.device)
        slots = ((back + ring.cursor) % ring.steps).unsqueeze(1) * ring.num_streams + streams

        newest = slots[-time_rows:]
        active = (back[-time_rows:] + ring.length >= 0).unsqueeze(1).expand_as(newest)
        if self._mask_key is not None:
            active = active & row_mask(self._storage, newest.reshape(-1), self._mask_key).view_as(newest)
        ended = self.ends(newest)[1] if within_episode else torch.zeros_like(active)
        lengths, carry = run_lengths(ended, active, run)
        run.copy_(carry)

        is_start = torch.zeros_like(slots, dtype=torch.bool)
        is_start[: count - L + 1] = lengths[time_rows - (count - L + 1) :] >= L
        return slots.view(-1), is_start.view(-1)

    def ends(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The stored flag of rows, ``[*, *F]`` bool, and whether any of a row's flags is set, ``[*]`` bool."""
        done = self._end[rows]
        done = done if done.dtype == torch.bool else done.bool()
        return done, done.flatten(rows.ndim).any(-1) if done.ndim > rows.ndim else done


def _stored(storage: Any, key: NestedKey) -> Tensor | None:
    """A stored entry, ``[capacity, *F]``, a view; None if there is none."""
    try:
        return storage.field(key).flatten(0, 1)
    except KeyError:
        return None
