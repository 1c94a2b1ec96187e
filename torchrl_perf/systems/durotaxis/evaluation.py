"""Statistics of finished episodes of a colony, kept on the device across batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrl_perf.functional.scan import linear_recurrence

_STATE = ("running", "ring", "count")


class EpisodeColumns:
    """Means over the last finished episodes, of totals of an episode and of values at its end, without a host read.

    ``update`` has static shapes and changes its state in place, so that it may be captured in a CUDA graph. Finished
    episodes are ordered by time step, then by env; the result does not depend on how the stream is cut into batches.

    Args:
        num_envs: number of envs ``N``.
        totals: names of the ``C`` columns that are summed over an episode.
        ends: names of the ``K`` columns whose value at the last step counts.
        device: where the statistics are computed.
        window: number of finished episodes that the means run over.

    Attributes:
        names: ``totals`` and ``ends``.
        running: totals so far of the unfinished episode of each env, float32 ``[N, C]``.
        ring: the last finished episodes, float32 ``[window, C + K]``; entry ``k % window`` is the k-th.
        count: number of episodes finished so far, int64 0-d.

    Raises:
        ValueError: for a number of envs or a window below 1, no names, or a name given twice.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        totals: Sequence[str],
        ends: Sequence[str],
        device: torch.device | str,
        window: int = 100,
    ) -> None:
        self.names = (*totals, *ends)
        if num_envs < 1 or window < 1 or not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(
                "EpisodeColumns: expected num_envs >= 1, window >= 1 and names that differ, received "
                f"num_envs={num_envs}, window={window}, names={self.names}. Remedy: values in these ranges, each name "
                "once."
            )
        self.window, self._columns = window, (len(totals), len(ends))
        self.running = torch.zeros(num_envs, len(totals), device=device)
        self.ring = torch.zeros(window, len(self.names), device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._slots = torch.arange(window, device=device)

    def update(self, totals: Tensor, ends: Tensor, done: Tensor) -> None:
        """Take in one batch.

        Args:
            totals: what each step adds, float ``[N, T, C]``.
            ends: values that count if the step ends the episode, real ``[N, T, K]``.
            done: ``("next", "done")``, bool ``[N, T, 1]``.

        Raises:
            ValueError: for other shapes.
        """
        rows = (self.running.shape[0], done.shape[1])
        expected = [(*rows, self._columns[0]), (*rows, self._columns[1]), (*rows, 1)]
        received = [tuple(tensor.shape) for tensor in (totals, ends, done)]
        if received != expected:
            raise ValueError(
                f"EpisodeColumns.update: expected shapes {expected}, received {received}. Remedy: columns of one env "
                "a row."
            )
        sums = self._sums(totals.detach().transpose(0, 1).float(), done.transpose(0, 1))
        self.running.copy_(torch.where(done[:, -1], 0.0, sums[-1]))
        rows_ = torch.cat([sums, ends.detach().transpose(0, 1).float()], -1).flatten(0, 1)
        rank = done.transpose(0, 1).reshape(-1).cumsum(0, dtype=torch.int64)
        finished = rank[-1]
        # the k-th finished episode of the batch sits where the rank first reaches k; no entry is written twice
        number = finished - self.window + 1 + self._slots
        position = torch.searchsorted(rank, number).clamp(max=rank.shape[0] - 1)
        entry = (self.count + number - 1).remainder(self.window)
        values = torch.where((number >= 1).unsqueeze(-1), rows_[position], self.ring[entry])
        self.ring.index_copy_(0, entry, values)
        self.count.add_(finished)

    def _sums(self, totals: Tensor, done: Tensor) -> Tensor:
        """Totals of the episode so far at each step, ``[T, N, C]``."""
        keep = torch.ones_like(totals)
        keep[1:] = (~done[:-1]).to(totals.dtype)
        sums = linear_recurrence(keep.transpose(0, 1), totals.transpose(0, 1), time_dim=-2, initial=self.running)
        return sums.transpose(0, 1)

    def means(self) -> dict[str, Tensor]:
        """Name to mean over the finished episodes kept, float32 0-d each; NaN before the first has finished."""
        written = (self._slots < self.count).unsqueeze(-1)
        means = torch.where(written, self.ring, 0.0).sum(0) / written.sum()
        return dict(zip(self.names, means.unbind(), strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of running totals, ring and counter, on the device."""
        return {name: getattr(self, name).clone() for name in _STATE}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned, in place, so that captured graphs stay valid.

        Raises:
            KeyError: if an entry is missing.
            ValueError: for entries of other shapes.
        """
        expected = {name: list(getattr(self, name).shape) for name in _STATE}
        received = {name: list(state_dict[name].shape) for name in _STATE}
        if expected != received:
            raise ValueError(
                f"EpisodeColumns.load_state_dict: expected shapes {expected}, received {received}. Remedy: the "
                "num_envs, columns and window that it was saved with."
            )
        for name in _STATE:
            getattr(self, name).copy_(state_dict[name])
