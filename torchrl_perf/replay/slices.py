"""Sampling of slices: windows of consecutive rows of one stream, drawn in O(batch)."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_perf.replay._checks import (
    check_entries_of_state,
    check_tensor_of_state,
    check_tree_state,
    refuse_options,
    state_error,
)
from torchrl_perf.replay.layout import Key
from torchrl_perf.replay.prioritized import DevicePrioritizedSampler
from torchrl_perf.replay.priority_tree import PriorityTree
from torchrl_perf.replay.random import reads, refuse_capture, ring_of, sampled_ring, wrote_outside
from torchrl_perf.replay.ring import Ring, capturing
from torchrl_perf.replay.signatures import shows_arguments
from torchrl_perf.replay.slice_rows import INIT, SliceRows
from torchrl_perf.runtime.files import load_checkpoint, save_checkpoint

__all__ = ["DeviceSliceSampler"]

_NAME = "DeviceSliceSampler"
_FILE = "slices.pt"
_ENV_ROWS = "slices follow the rows of an env, which have their place in the ring, up to the flag end_key"
SLICE_SAMPLER: dict[str, tuple[Any, str]] = {
    "cache_values": (None, ""),
    "compile": (None, ""),
    "use_gpu": (None, ""),
    "end_keys": ((), "one flag ends an episode, ('next', 'done') by default, which holds for all ways to end"),
    "traj_key": ((), _ENV_ROWS),
    "step_key": ("step_count", _ENV_ROWS),
    "fragmented": (False, _ENV_ROWS),
    "ends": ((), _ENV_ROWS),
    "trajectories": ((), _ENV_ROWS),
    "init_key": (INIT, "recurrent parts read 'is_init'"),
    "strict_length": (True, "shapes are static, so that all slices have slice_len rows"),
    "pad_output": (False, "shapes are static, so that all slices have slice_len rows"),
    "span": (False, "shapes are static, so that all slices have slice_len rows"),
}
"""Options of TorchRL's slice sampler: their defaults (None: any value), and why others have no meaning here."""


@shows_arguments
class DeviceSliceSampler(Sampler):
    """Draws slices of ``slice_len`` consecutive rows of one stream, uniformly or by priority, without a host wait.

    The counterpart of TorchRL's ``SliceSampler`` and ``PrioritizedSliceSampler``, which search the whole storage for
    episodes at each draw. Here a sum tree holds the rows that a slice may start at and is kept up to date by writes, so
    a draw costs O(batch) at any capacity and may be recorded in a CUDA graph, as may a write.

    *Within an episode* (the default) a slice holds no episode end except in its last row, and each such window of the
    stored rows is drawn with the same probability. As long as there is none, slices are drawn as below.

    *Not within an episode*, each window of the stored rows is drawn with the same probability, whatever it crosses.

    A sample is flat, ``[S * slice_len]``, slice after slice: ``batch.view(-1, slice_len)`` gives ``[S, slice_len]``.
    Values, advantages and targets then need no further care: the last row of a slice is marked as truncated if its
    episode goes on, so that it bootstraps from its next observation, and nothing crosses from one slice to the next.

    Info that goes into the sample:
        ``("next", "done")``: bool, as stored, and True at the last row of a slice.
        ``("next", "truncated")``: bool, as stored, and True at the last row of a slice whose episode goes on.
        ``("collector", "mask")``: bool ``[B]``, False after the first episode end of a slice and for inactive rows. All
            True for slices within an episode. Rows that are no longer, or not yet, stored are False.
        ``"is_init"``: as stored, and True at the first row of a slice. Only where it is stored.
        ``"priority_weight"``: float32 ``[B]``, ``"index_generation"``: int64 ``[B]``. Only with ``alpha``.

    Prioritised (``alpha`` given; arXiv:1511.05952): the start of a slice carries the slice's priority, see
    :meth:`update_priority`, and a new one the largest priority seen.

    Args:
        slice_len: rows L of a slice.
        num_slices: S, to be checked; by default ``batch_size / slice_len``.
        within_episode: whether a slice must not cross an episode end.
        alpha: exponent of priorities; None for uniform draws.
        beta: exponent of the importance weights, in [0, 1].
        eps: added to positive priorities.
        mask_key: bool entry, False for rows of inactive agents: no slice within an episode contains one, others mark
            it in the mask. Terminal rows count as active.
        end_key: bool entry that ends an episode.
        truncated_key: where the end of a slice is marked; None to leave all flags as stored.
        **options: of TorchRL's ``SliceSampler``: ``cache_values``, ``compile`` and ``use_gpu``, which say how it
            searches, are taken and have nothing to do here; the others are refused where they ask for something else.

    Raises:
        ValueError: for numbers out of range, for ``num_slices`` without ``slice_len``, for options of slices by
            priority without ``alpha``, and for options of TorchRL's that have no meaning here.
    """

    def __init__(
        self,
        slice_len: int | None = None,
        *,
        num_slices: int | None = None,
        within_episode: bool = True,
        alpha: float | None = None,
        beta: float | None = None,
        eps: float | None = None,
        mask_key: NestedKey | None = None,
        end_key: NestedKey = ("next", "done"),
        truncated_key: NestedKey | None = ("next", "truncated"),
        **options: Any,
    ) -> None:
        refuse_options(_NAME, options, SLICE_SAMPLER)
        if slice_len is None:
            raise ValueError(
                f"{_NAME}: expected slice_len, the rows of a slice, received num_slices={num_slices} alone: which rows "
                "a slice may start at is learned with each write, before a batch size is known. Remedy: "
                "slice_len=batch_size // num_slices."
            )
        if alpha is None and (beta is not None or eps is not None):
            raise ValueError(
                f"{_NAME}: expected alpha together with beta or eps, received alpha=None, beta={beta}, eps={eps}: "
                "uniform slices have no priorities. Remedy: alpha=0.6, or neither."
            )
        if slice_len < 1 or (num_slices is not None and num_slices < 1):
            raise ValueError(
                f"{_NAME}: expected slice_len and num_slices of at least 1, received {slice_len} and {num_slices}. "
                "Remedy: 1 or more of both."
            )
        self.slice_len, self.num_slices, self.within_episode = slice_len, num_slices, within_episode
        self.mask_key = None if mask_key is None else unravel_key(mask_key)
        self.end_key = unravel_key(end_key)
        self.truncated_key = None if truncated_key is None else unravel_key(truncated_key)
        self._priorities = None
        if alpha is not None:
            self._priorities = DevicePrioritizedSampler(alpha=alpha, beta=beta, eps=eps or 0.0)
        self._has_tree = within_episode or alpha is not None
        self._tree: PriorityTree | None = None
        self._run: Tensor | None = None
        self._starts: Tensor | None = None  # where slices by priority may start, when last computed
        self._is_stale = False
        self._seen_writes = 0  # writes through views that the starts know of
        self._pending: dict[str, Any] | None = None
        self._ring: Ring | None = None
        self._rows: SliceRows | None = None
        self._storage: Any = None

    # --- drawing

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        """Draw ``batch_size / slice_len`` slices.

        Args:
            storage: a :class:`~torchrl_perf.replay.DeviceStorage` of single steps (``n_step=1``).
            batch_size: rows B of all slices together.

        Returns:
            Slots, ``[B]`` int64, and the info described above.

        Raises:
            ValueError: if ``batch_size`` is no multiple of ``slice_len``, or more rows or longer streams are asked for
                than there are.
            TypeError: for another storage.
        """
        S, L = self._count(batch_size), self.slice_len
        ring = sampled_ring(storage, batch_size, _NAME)
        if not ring.recorded and ring.host_length < L:
            raise ValueError(
                f"{_NAME}: expected slices of at most the {ring.host_length} rows that each stream holds, received "
                f"slice_len={L}. Remedy: extend first, or draw shorter slices."
            )
        if ring is not self._ring or storage is not self._storage or not ring.ordered:
            self._attach(storage)
        self._catch_up(storage)
        index, info = self._read(storage, ring, S)
        ring.vouch(index)
        if self._priorities is not None:
            index.generation = info["index_generation"]  # pyright: ignore[reportAttributeAccessIssue]
        return index, info

    def is_steady(self, storage: Any) -> bool:
        """Whether the host has no part in the next draw: rows are there, and the starts are up to date."""
        ring = storage.ring
        if ring is not self._ring or not ring.ordered:
            return False
        if self._run is not None and (self._is_stale or wrote_outside(storage) != self._seen_writes):
            return False
        return ring.recorded or ring.host_length >= self.slice_len

    @property
    def learns_rows(self) -> bool:
        """Whether :meth:`mark_update` has something to do."""
        return self._has_tree

    @property
    def eps(self) -> float | None:
        """Added to positive priorities; None for uniform slices."""
        return None if self._priorities is None else self._priorities.eps

    def _count(self, batch_size: int) -> int:
        count, rest = divmod(batch_size, self.slice_len)
        if rest or count < 1 or self.num_slices not in (None, count):
            fitting = (self.num_slices or max(count, 1)) * self.slice_len
            raise ValueError(
                f"{_NAME}: expected a batch size of whole slices of {self.slice_len} rows"
                f"{'' if self.num_slices is None else f', {self.num_slices} of them'}, received {batch_size}. Remedy: "
                f"batch_size={fitting}."
            )
        return count

    def _read(self, storage: Storage, ring: Ring, count: int) -> tuple[Tensor, dict[Any, Any]]:
        """Slots of the rows of drawn slices, and the info of the sample."""
        uniform, info, start = ring.uniform(count, self._rng), {}, None
        tree = self._tree if self._priorities is None else self._priorities.tree
        if self._priorities is not None:
            start, info = self._priorities.sample(storage, count, generator=self._rng)
        elif tree is not None:
            start = tree.draw(uniform)
        rows = self._rows
        rows = rows if rows is not None and rows.ring is ring else self._rows_of(storage, ring)
        return rows.read(uniform, start, tree, info)

    def _rows_of(self, storage: Storage, ring: Ring) -> SliceRows:
        """What follows slices through a storage's rows, made at the first look."""
        rows = self._rows
        if rows is None or rows.ring is not ring:
            with torch.inference_mode(False):  # what is made in inference mode could not be written outside of it
                rows = SliceRows(storage, self.slice_len, self.end_key, self.truncated_key, self.mask_key)
            self._rows = rows
        return rows

    # --- keeping the starts up to date

    @property
    def tree(self) -> PriorityTree | None:
        """Weights of the slots that a slice may start at; None where every row may, and before the first write."""
        return self._tree if self._priorities is None else self._priorities.tree

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Learn of new rows. Buffers call it after each write, with the slots of a whole batch.

        A new row completes the window of the ``slice_len`` rows up to it, which may be drawn from now on if the episode
        is that long; the row itself, in place of the slot's old row, cannot start a slice yet.

        Args:
            index: slots of the newest rows, ``[N, T]`` or ``[B]`` of one stream.
            storage: the storage that holds them.
        """
        if storage is None or not self._has_tree or self._attach(storage):
            return
        steps = ring_of(storage, _NAME).steps
        time_rows = index.shape[-1] if isinstance(index, Tensor) and index.ndim else 1
        if time_rows > steps and self._run is not None:
            self._run.zero_()
        if time_rows:
            self._learn(storage, min(time_rows, steps))

    def refresh(self, storage: Storage, slot: Tensor | None = None, keys: Iterable[Key] | None = None) -> None:
        """Read ends and mask from the rows again, at the next draw, or at once while a graph is recorded.

        Slices that may be drawn as before keep their priorities, those that may be drawn from now on get the largest
        one.

        Args:
            storage: the storage that holds the rows.
            slot: int64 slots that were written in place; None for all.
            keys: the entries that were written; None for any.
        """
        end_key = self.end_key if self.within_episode else None
        if self._run is None or self._ring is None or not reads(keys, self.mask_key, end_key):
            return
        self._is_stale = True
        if slot is None or capturing():
            self._catch_up(storage)

    def _catch_up(self, storage: Any) -> None:
        """Recompute all starts if rows were written in place since the last time."""
        writes = storage.count_outside_writes()
        if self._run is None or (not self._is_stale and writes == self._seen_writes):
            return
        self._is_stale, self._seen_writes = False, writes
        self._run.zero_()
        self._learn(storage, ring_of(storage, _NAME).steps, keep=True)

    def _learn(self, storage: Any, time_rows: int, keep: bool = False) -> None:
        """Set the weights of all starts that the newest ``time_rows`` time rows may have changed.

        With ``keep`` slices that could be drawn before keep their priorities.
        """
        assert self._run is not None
        rows = self._rows_of(storage, ring_of(storage, _NAME))
        slots, is_start = rows.starts(self._run, time_rows, self.within_episode)
        self._set_starts(storage, slots, is_start, keep)

    def _set_starts(self, storage: Any, slots: Tensor, is_start: Tensor, keep: bool) -> None:
        ring = ring_of(storage, _NAME)
        if self._priorities is not None and self._starts is not None:
            priority = torch.where(is_start, self._priorities.default_priority, 0.0)
            if keep:
                priority = torch.where(is_start & self._starts[slots], torch.nan, priority)  # NaN changes nothing
            self._starts.index_put_((slots,), is_start)
            self._priorities.update_priority(slots, priority, storage=storage)
        elif self._tree is not None:
            self._tree.set_(slots, is_start.to(torch.float32))
        if getattr(storage, "compact", False) and self.tree is not None:
            self.tree.forget_(ring)

    def _attach(self, storage: Any) -> bool:
        """Make the state for a storage; returns whether the starts of all its rows were just computed."""
        ring = ring_of(storage, _NAME)
        if not ring.ordered:
            raise ValueError(
                f"{_NAME}: expected rows in the order of time, received a storage whose rows a writer put at slots of "
                "its own choice (TensorDictMaxValueWriter, say). Remedy: DeviceWriter, or TorchRL's round-robin "
                "writers."
            )
        self._storage = storage
        if self._ring is ring:
            return False
        if getattr(storage, "n_step", 1) > 1:
            raise ValueError(
                f"{_NAME}: expected a storage of single steps, received n_step={storage.n_step}. Remedy: n_step=1, and "
                "a return over the slice, for example TD(lambda)."
            )
        if self.slice_len > ring.steps:
            raise ValueError(
                f"{_NAME}: expected slice_len of at most the {ring.steps} time rows of the ring, received "
                f"{self.slice_len}. Remedy: a larger capacity (it is divided among {ring.num_streams} streams)."
            )
        refuse_capture(_NAME)
        self._ring = ring
        if not self._has_tree:
            return False
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
            self._run = torch.zeros(ring.num_streams, dtype=torch.int64, device=ring.device)
            self._tree = PriorityTree(ring.capacity, ring.device) if self._priorities is None else None
            if self._priorities is not None:
                self._starts = torch.zeros(ring.capacity, dtype=torch.bool, device=ring.device)
        if self._priorities is not None:
            self._priorities.attach(storage, ring)
        self._is_stale, self._seen_writes = False, wrote_outside(storage)
        if self._pending is not None:
            self._restore(self._pending)
            self._pending = None
            return False
        self._learn(storage, ring.steps)
        return True

    # --- priorities

    @property
    def is_prioritized(self) -> bool:
        """Whether slices have priorities."""
        return self._priorities is not None

    def update_priority(
        self,
        index: Tensor,
        priority: Tensor,
        *,
        storage: Storage | None = None,
        generation: Tensor | None = None,
    ) -> None:
        """Set the priorities of slices. Without ``alpha`` nothing happens.

        Args:
            index: slots of the rows of whole slices, slice after slice as sampled, ``[S * L]`` or ``[S, L]``,
                or of their first rows alone, ``[S, 1]``.
            priority: one a row, of which the largest of a slice counts, or one a slice, ``[S]``.
            storage: storage of the rows; by default the one of the last sample or extend.
            generation: int64, of index's shape, as in the sample's "index_generation": slices that were overwritten
                since are left alone. By default the attribute ``generation`` of ``index``.

        Raises:
            ValueError: if the rows are not those of whole slices or the priorities do not match them.
        """
        if self._priorities is None:
            return
        generation = getattr(index, "generation", None) if generation is None else generation
        length = 1 if index.ndim == 2 and index.shape[1] == 1 else self.slice_len
        count, rest = divmod(index.numel(), length)
        if rest or priority.numel() not in (count, count * length):
            raise ValueError(
                f"{_NAME}: expected the slots of whole slices of {length} rows and one priority a row or a slice, "
                f"received slots {tuple(index.shape)}, priorities {tuple(priority.shape)}. Remedy: pass whole samples."
            )
        start = index.reshape(count, length)[:, 0]
        priority = priority.detach().reshape(count, -1).amax(1).to(torch.float32)
        if self.tree is not None:
            # An invalid slice, drawn because there was no valid one, must not become valid; NaN leaves a row unchanged.
            priority = torch.where(self.tree.weight_of(start) > 0, priority, torch.nan)
        if generation is not None:
            generation = generation.reshape(count, length)[:, 0]
        self._priorities.update_priority(start, priority, storage=storage, generation=generation)

    # --- state

    def _empty(self) -> None:
        self._pending = None
        self._is_stale = False
        for kept in (self._run, self._starts):
            if kept is not None:
                kept.zero_()
        if self._tree is not None:
            self._tree.clear_()
        if self._priorities is not None:
            self._priorities.clear_()

    def state_dict(self) -> dict[str, Any]:
        """A copy: which rows a slice may start at, how long each stream has run, the priorities' state."""
        if self._pending is not None:
            return {**self._pending}
        state: dict[str, Any] = {
            "slice_len": self.slice_len,
            "run": None,
            "tree": None,
            "priorities": None,
            "starts": None,
        }
        if self._run is not None:
            if self._storage is not None:
                self._catch_up(self._storage)
            state["run"] = self._run.clone()
            state["starts"] = None if self._starts is None else self._starts.clone()
        if self._tree is not None and self._ring is not None:
            filled = min(self._ring.read()[0], self._ring.steps) * self._ring.num_streams
            state["tree"] = self._tree.state_dict(filled)
        if self._priorities is not None:
            state["priorities"] = self._priorities.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, bit for bit and in place: recorded graphs stay valid.

        Raises:
            ValueError: if the state is of another slice length, kind, sampler or capacity.
        """
        self.check_state(state_dict)
        if self._run is None:
            self._pending = dict(state_dict)
        else:
            self._restore(state_dict)

    def check_state(self, state_dict: Any) -> None:
        """Check that a state is one of this sampler, of its capacity.

        Raises:
            ValueError: if not.
        """
        check_entries_of_state(state_dict, {}, _NAME)
        kinds = (state_dict.get("slice_len"), state_dict.get("priorities") is not None)  # none, of another sampler
        if not isinstance(kinds[0], int | NoneType):
            raise state_error(_NAME, "'slice_len' as int", type(kinds[0]).__name__)
        if kinds != (self.slice_len, self._priorities is not None):
            raise ValueError(
                f"{_NAME}: expected the state of slices of {self.slice_len} rows, prioritised: "
                f"{self._priorities is not None}, received {kinds[0]}, {kinds[1]}. Remedy: make the sampler with the "
                "arguments of the checkpoint."
            )
        check_entries_of_state(state_dict, {"run": (Tensor, NoneType), "tree": (Mapping, NoneType)}, _NAME)
        if self._priorities is not None:
            self._priorities.check_state(state_dict["priorities"])
        run, tree, starts = state_dict["run"], state_dict["tree"], state_dict.get("starts")
        if run is None:
            return
        check_tensor_of_state(run, run.new_empty(run.shape[:1], dtype=torch.int64), "run", _NAME)
        if self._run is not None:
            check_tensor_of_state(run, self._run, "run", _NAME)
        if self._has_tree and self._priorities is None:
            check_tree_state(tree, None if self._tree is None else self._tree.num_slots, _NAME)
        if self._starts is not None and starts is not None:
            check_tensor_of_state(starts, self._starts, "starts", _NAME)

    def _restore(self, state: Mapping[str, Any]) -> None:
        assert self._run is not None
        if state["run"] is None:
            self._empty()
            return
        if self._tree is not None:
            self._tree.load_state_dict(state["tree"])
        if self._priorities is not None:
            self._priorities.load_state_dict(state["priorities"])
        starts = state.get("starts")
        if self._starts is not None and starts is not None:
            self._starts.copy_(starts)
        elif self._starts is not None and self.tree is not None:  # older versions did not save them
            self._starts.copy_(self.tree.weights > 0)
        self._run.copy_(state["run"])
        self._is_stale, self._seen_writes = False, wrote_outside(self._storage)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_storage": None, "_rows": None}

    def dumps(self, path: str | Path) -> None:
        """Write :meth:`state_dict` into the folder ``path``."""
        save_checkpoint(self.state_dict(), Path(path) / _FILE)

    def loads(self, path: str | Path) -> None:
        """Restore what :meth:`dumps` wrote."""
        self.load_state_dict(load_checkpoint(Path(path) / _FILE))
