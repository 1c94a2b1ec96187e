"""Where a host collector's transitions go: time-major rows on the device, each env with a row number of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.collectors.host_groups import Outcome
from torchrl_perf.collectors.host_spaces import DONE_KEYS, INIT_KEY, Leaf

Act = Callable[[list[Tensor]], list[Tensor]]
"""Policy of a collector: observation leaves ``[n, *shape]`` and ``is_init`` in, a value for each output out."""


class HostBatch:
    """The buffers ``[rows + 1, N, *shape]`` of a batch, and the batch ``[N, T]``, a view of their first T rows.

    Rows from T on hold what belongs to the next batch: its first roots, and the steps that faster envs have already
    collected. The last row is a bin for values that are not kept.

    Args:
        leaves: of the observation.
        outputs: policy outputs by key, ``[N, *shape]``, as an example; ``"action"`` among them.
        num_steps: T.
        num_envs: N.
        device: of the buffers.

    Attributes:
        rows: rows that can be used, the bin left out.
        roots: observation leaves, ``is_init`` (bool ``[*, N, 1]``) and trajectory numbers (int64).
        nexts: next observation leaves, reward (float32), terminated, truncated and done (bool), each ``[*, N, 1]``.
        outs: policy outputs.
        batch: TensorDict ``[N, T]`` over the buffers.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        outputs: dict[NestedKey, Tensor],
        num_steps: int,
        num_envs: int,
        device: torch.device,
    ) -> None:
        self.num_steps, self.num_envs, self.device = num_steps, num_envs, device
        self.rows = num_steps + 1
        self.leaves = leaves
        self.out_keys = list(outputs)
        self.action = self.out_keys.index("action")
        self.roots = [self._zeros(leaf.shape, leaf.dtype) for leaf in leaves]
        self.roots += [self._zeros((1,), torch.bool), self._zeros((), torch.int64)]
        flags = [self._zeros((1,), torch.bool) for _ in DONE_KEYS]
        self.nexts = [
            *(self._zeros(leaf.shape, leaf.dtype) for leaf in leaves),
            self._zeros((1,), torch.float32),
            *flags,
        ]
        self.outs = [self._zeros(value.shape[1:], value.dtype) for value in outputs.values()]
        self._no_flags = torch.zeros((num_steps, num_envs, 1), dtype=torch.bool, device=device)
        self.version = 0
        self._view()

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros((self.rows + 1, self.num_envs, *shape), dtype=dtype, device=self.device)

    def _view(self) -> None:
        """The batch, and on a CPU arrays over the same memory."""
        batch = TensorDict({}, [self.num_envs, self.num_steps], device=self.device, names=[None, "time"])
        keys = [leaf.key for leaf in self.leaves]
        named = [
            *zip([*keys, INIT_KEY, ("collector", "traj_ids")], self.roots, strict=True),
            *zip(self.out_keys, self.outs, strict=True),
            *zip(map(_next, [*keys, "reward", "terminated", "truncated", "done"]), self.nexts, strict=True),
            *((key, self._no_flags) for key in (*DONE_KEYS, ("next", INIT_KEY))),
        ]
        for key, buffer in named:
            batch.set(key, buffer[: self.num_steps].transpose(0, 1))
        self.batch = batch
        self.views: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        if self.device.type == "cpu":
            roots, nexts, outs = ([np.asarray(b) for b in kind] for kind in (self.roots, self.nexts, self.outs))
            self.views = (roots, [*nexts[:-4], *(scalar[..., 0] for scalar in nexts[-4:])], outs)
        self._tables: dict[tuple[int, int, int], list[Tensor]] = {}
        self.version += 1

    @property
    def bin(self) -> int:
        """The row for what is not kept."""
        return self.rows

    def root_row(self, row: int, first: int, last: int) -> list[Tensor]:
        """What a policy reads, ``[n, *shape]``, of one row and the envs from ``first`` to ``last``."""
        key = (row, first, last)
        if key not in self._tables:
            self._tables[key] = [buffer[row, first:last] for buffer in self.roots[:-1]]
        return self._tables[key]

    def shift(self, ahead: int) -> None:
        """Moves row T and the ``ahead`` rows behind it to the front, for the next batch."""
        first = self.num_steps
        for buffer in self.roots:
            buffer[: ahead + 1] = buffer[first : first + ahead + 1].clone()
        if ahead:
            for buffer in (*self.nexts, *self.outs):
                buffer[:ahead] = buffer[first : first + ahead].clone()

    def grow(self) -> None:
        """Doubles the rows, contents kept; the batch becomes another TensorDict."""
        old, self.rows = self.rows, 2 * self.rows
        for kind in (self.roots, self.nexts, self.outs):
            for i, buffer in enumerate(kind):
                kind[i] = self._zeros(buffer.shape[2:], buffer.dtype)
                kind[i][:old] = buffer[:old]
        self._view()


def _next(key: NestedKey) -> NestedKey:
    return ("next", key) if isinstance(key, str) else ("next", *key)


class GroupRows:
    """The rows of one group's envs: which one each env is at, and what goes where.

    Args:
        store: the buffers.
        first: number of the group's first env.
        num_envs: n, envs of the group.
        lockstep: whether all envs advance by one row a step. If not (mode NEXT_STEP), the step after a done one is a
            reset: it fills no row, and the env falls one row behind.

    Attributes:
        row: ``[n]``, the row of each env's present root.
        resetting: ``[n]``, whether the next step only resets the env.
        began: ``[n]``, whether the present root is the first of its episode.
    """

    def __init__(self, store: HostBatch, first: int, num_envs: int, *, lockstep: bool) -> None:
        self.store = store
        self.first, self.last = first, first + num_envs
        self.lockstep = lockstep
        self.row = np.zeros(num_envs, dtype=np.int64)
        self.resetting = np.zeros(num_envs, dtype=bool)
        self.began = np.ones(num_envs, dtype=bool)
        self.traj_ids = np.zeros(num_envs, dtype=np.int64)
        self._columns = np.arange(first, self.last)
        self._slice = slice(first, self.last)
        self._uniform = True
        self._place()

    def _place(self) -> None:
        """Where the present root's row lies, for numpy: one row of all envs as a slice, where they are level."""
        row = int(self.row[0])
        if self._uniform:
            self._index: tuple[Any, Any] = (self.store.bin if self.resetting[0] else row, self._slice)
        else:
            self._index = (np.where(self.resetting, self.store.bin, self.row), self._columns)

    @property
    def slowest(self) -> int:
        """Complete rows of the env that has the fewest."""
        return int(self.row[0] if self._uniform else self.row.min())

    @property
    def ahead(self) -> int:
        """Complete rows of the env that has the most."""
        return int(self.row[0] if self._uniform else self.row.max())

    def restart(self, observation: list[Any], traj_ids: np.ndarray) -> None:
        """All envs begin an episode in row 0."""
        self.row[:] = 0
        self.resetting[:] = False
        self.began = np.ones_like(self.began)
        self._uniform = True
        self.traj_ids[:] = traj_ids
        self._place()
        self.write_root(observation)

    def shifted(self) -> None:
        """The buffers have been shifted by T rows."""
        self.row -= self.store.num_steps
        self._place()

    def store_outcome(self, outcome: Outcome) -> np.ndarray:
        """Writes what a step led to and moves on; returns which envs it ended, ``[n]`` bool."""
        self.write_next(outcome)
        ended = outcome.done
        if self.lockstep:
            self.row += 1
            self.began = ended
        else:
            self.row += ~self.resetting
            was_resetting, ended = self.resetting, outcome.done & ~self.resetting
            self.began = was_resetting
            self.resetting = ended.copy()
            if (was_resetting.any() or ended.any()) and self._uniform:
                self._uniform = bool((self.row == self.row[0]).all() and (self.resetting == self.resetting[0]).all())
        if self.ahead >= self.store.rows:
            self.store.grow()
        return ended

    def store_root(self, observation: list[Any], traj_ids: np.ndarray) -> None:
        """Writes the observation that the next action answers to."""
        self.traj_ids[:] = traj_ids
        self._place()
        self.write_root(observation)

    # -- where the two kinds of device differ ---------------------------------------------------------------------

    def write_next(self, outcome: Outcome) -> None:
        """Write the outcome into the row of the present root."""
        raise NotImplementedError

    def write_root(self, observation: list[Any]) -> None:
        """Write observation, ``is_init`` and trajectory numbers into the row of the present root."""
        raise NotImplementedError

    def act(self, policy: Act) -> np.ndarray:
        """Call the policy on the present roots and write its outputs; returns the action ``[n, *shape]``."""
        raise NotImplementedError

    def act_at_random(self, action: np.ndarray) -> None:
        """Write a given action, and zeros for the policy's other outputs."""
        raise NotImplementedError

    def release(self) -> None:
        """Drop what was captured."""


class DirectRows(GroupRows):
    """Rows in the memory of the CPU, written by numpy: each value is copied once, from the env to its place."""

    def __init__(self, store: HostBatch, first: int, num_envs: int, *, lockstep: bool) -> None:
        super().__init__(store, first, num_envs, lockstep=lockstep)
        # envs that are not level have no row in common that a policy could read
        self._present = [buffer.new_zeros((num_envs, *buffer.shape[2:])) for buffer in store.roots[:-1]]
        self._present_views = [np.asarray(each) for each in self._present]

    def write_next(self, outcome: Outcome) -> None:
        """Write the outcome into the row of the present root."""
        row, columns = self._index
        *views, reward, terminated, truncated, done = self.store.views[1]
        for view, value in zip(views, outcome.observation, strict=True):
            view[row, columns] = value
        if outcome.final is not None:
            ended = np.flatnonzero(outcome.done)
            for view, value in zip(views, outcome.final, strict=True):
                view[row, self._columns[ended]] = value[ended]
        reward[row, columns] = outcome.reward
        terminated[row, columns] = outcome.terminated
        truncated[row, columns] = outcome.truncated
        done[row, columns] = outcome.done

    def write_root(self, observation: list[Any]) -> None:
        """Write observation, ``is_init`` and trajectory numbers into the row of the present root."""
        read = [*observation, self.began[:, None]]
        for view, value in zip(self.store.views[0], [*read, self.traj_ids], strict=True):
            view[self._index] = value
        if not self._uniform:
            for view, value in zip(self._present_views, read, strict=True):
                view[...] = value

    def act(self, policy: Act) -> np.ndarray:
        """Call the policy on the present roots and write its outputs; returns the action ``[n, *shape]``."""
        present = self._present
        if self._uniform:
            present = self.store.root_row(self._index[0], self.first, self.last)
        values = [np.asarray(value) for value in policy(present)]
        for view, value in zip(self.store.views[2], values, strict=True):
            view[self._index] = value
        return values[self.store.action]

    def act_at_random(self, action: np.ndarray) -> None:
        """Write a given action, and zeros for the policy's other outputs."""
        for i, view in enumerate(self.store.views[2]):
            view[self._index] = action if i == self.store.action else 0
