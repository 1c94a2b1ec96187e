"""Rows of a host collector on another device: one packed copy up and one down a step, and CUDA graphs between them."""

from typing import Any

import numpy as np
import torch

from torchrl_perf.collectors.host_groups import Outcome
from torchrl_perf.collectors.host_rows import Act, GroupRows, HostBatch
from torchrl_perf.runtime import Captured, capture
from torchrl_perf.runtime.transfer import PackedRecord

_INIT = 8  # field of a record: ``is_init``; behind it the observation


class PackedRows(GroupRows):
    """Rows on another device, filled from packed records: one copy up and one down a step.

    A record holds the outcome of the last step, the present root and the rows that both belong to, as numbers, so that
    the same two functions serve every step: ``absorb`` (scatter the record) and ``act`` (policy, scatter its outputs).
    In mode ``"graph"`` each of them is a CUDA graph. Final observations have a record of their own, which is sent when
    an env is done.
    """

    def __init__(
        self, store: HostBatch, first: int, num_envs: int, *, lockstep: bool, graph: bool, policy: Act | None
    ) -> None:
        n, device = num_envs, store.device
        observation = [((n, *leaf.shape), leaf.dtype) for leaf in store.leaves]
        head = [((n,), torch.int64)] * 3 + [((n, 1), torch.float32)] + [((n, 1), torch.bool)] * 5
        action = store.outs[store.action]
        acted = [((n, *action.shape[2:]), action.dtype)]
        self._record = PackedRecord([*head, *observation], device)
        self._final = PackedRecord(observation, device)
        self._action = PackedRecord(acted, device, slots=1)
        self._given = PackedRecord(acted, device)
        self._flat_columns = np.arange(first, first + n)
        self._policy = policy
        self._graph = graph
        self._version = -1
        super().__init__(store, first, num_envs, lockstep=lockstep)
        self._make_calls()

    def _refresh(self, policy: Act | None) -> None:
        """Makes the calls anew where the buffers have moved, or the policy is another: graphs hold addresses."""
        if self._version != self.store.version or policy is not self._policy:
            self._policy = policy
            self._make_calls()

    def _make_calls(self) -> None:
        self.release()
        make = (lambda fn: capture(fn, device=self.store.device, audit=False)) if self._graph else (lambda fn: fn)
        self._absorb_call, self._act_call = make(self._absorb), make(self._act)
        self._version = self.store.version

    def _flat_rows(self) -> np.ndarray:
        """Row and column of each env's present root, as one number."""
        row = np.broadcast_to(np.asarray(self._index[0]), self._flat_columns.shape)
        return row * self.store.num_envs + self._flat_columns

    def write_next(self, outcome: Outcome) -> None:
        """Pack the outcome; it is sent together with the root that follows."""
        next_rows, _, _, reward, terminated, truncated, done, use_final, _, *observation = self._record.write()
        next_rows[:] = self._flat_rows()
        reward[:, 0] = outcome.reward
        terminated[:, 0], truncated[:, 0], done[:, 0] = outcome.terminated, outcome.truncated, outcome.done
        # without final observations of their own, those of the record: a reset is going to overwrite it
        ended = outcome.done if outcome.final is not None else outcome.done.any()
        use_final[:, 0] = ended & self.lockstep
        for view, value in zip(observation, outcome.observation, strict=True):
            view[...] = value
        if use_final.any():
            final = outcome.observation if outcome.final is None else outcome.final
            for view, value in zip(self._final.write(), final, strict=True):
                view[...] = value
            self._final.upload()
        self._outcome_packed = True

    def write_root(self, observation: list[Any]) -> None:
        """Pack the root, send the record, and scatter it on the device."""
        self._refresh(self._policy)
        after_step = self._outcome_packed
        fields = self._record.host_fields if after_step else self._record.write()
        next_rows, root_rows, traj_ids, *_ = fields
        root_rows[:], traj_ids[:] = self._flat_rows(), self.traj_ids
        fields[_INIT][:, 0] = self.began
        if not after_step:  # no step precedes the first root: send that part of the record to the bin row
            next_rows[:] = self.store.bin * self.store.num_envs + self._flat_columns
        for view, value in zip(fields[_INIT + 1 :], observation, strict=True):
            view[...] = value
        self._record.upload()
        self._absorb_call()
        self._outcome_packed = False

    _outcome_packed = False

    def shifted(self) -> None:
        """The buffers have been shifted by T rows: send the present row numbers to the device again."""
        super().shifted()
        self._record.write(advance=False)[1][:] = self._flat_rows()
        self._record.upload()

    def act(self, policy: Act) -> np.ndarray:
        """Call the policy on the present roots and write its outputs; waits for the action alone."""
        self._refresh(policy)
        self._act_call()
        self._action.download()
        return self._action.wait()[0]

    def act_at_random(self, action: np.ndarray) -> None:
        """Write a given action, and zeros for the policy's other outputs."""
        self._given.write()[0][...] = action
        self._given.upload()
        rows = self._record.device_fields[1]
        for i, buffer in enumerate(self.store.outs):
            flat = buffer.flatten(0, 1)
            given = self._given.device_fields[0]
            flat.index_copy_(0, rows, given if i == self.store.action else torch.zeros_like(flat[: len(rows)]))

    def release(self) -> None:
        """Drop the graphs."""
        for call in (getattr(self, "_absorb_call", None), getattr(self, "_act_call", None)):
            if isinstance(call, Captured):
                call.release()

    # -- on the device: static addresses, no host read ------------------------------------------------------------

    def _absorb(self) -> None:
        next_rows, root_rows, traj_ids, *rest = self._record.device_fields
        flags, use_final, began, observation = rest[:4], rest[4], rest[5], rest[6:]
        nexts = []
        for value, final in zip(observation, self._final.device_fields, strict=True):
            nexts.append(torch.where(use_final.view(-1, *(1,) * (value.ndim - 1)), final, value))
        for buffer, value in zip(self.store.nexts, [*nexts, *flags], strict=True):
            buffer.flatten(0, 1).index_copy_(0, next_rows, value)
        for buffer, value in zip(self.store.roots, [*observation, began, traj_ids], strict=True):
            buffer.flatten(0, 1).index_copy_(0, root_rows, value)

    def _act(self) -> None:
        assert self._policy is not None
        fields = self._record.device_fields
        root_rows, began, observation = fields[1], fields[_INIT], fields[_INIT + 1 :]
        values = self._policy([*observation, began])
        for buffer, value in zip(self.store.outs, values, strict=True):
            buffer.flatten(0, 1).index_copy_(0, root_rows, value)
        self._action.device_fields[0].copy_(values[self.store.action])
