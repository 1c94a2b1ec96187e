"""Return and length of finished episodes, kept on the device across batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchrl_perf.functional.scan import linear_recurrence
from torchrl_perf.runtime.self_capture import InPlaceReplays

_STATE = ("running", "ring", "count", "batch_count", "batch_return_sum")


class EpisodeStatistics:
    """Follows the unfinished episode of each env and keeps the last finished ones, without a host read.

    ``update`` has static shapes and changes its state in place, so it may be captured in a CUDA graph. Finished
    episodes are ordered by time step, then by env, and enter a ring of ``window`` entries; if one batch finishes more,
    the last ``window`` of them remain. The result does not depend on how the stream is cut into batches.

    The running sums are exact for whole rewards up to 2**24 in float32 (and lengths up to 2**24 steps); pass
    ``dtype=torch.float64`` where more is needed.

    Args:
        num_envs: number of envs ``N``, 1 for a plain one; an env's ``batch_size`` works too. ``N * A`` if agents are
            followed one by one.
        device: where the statistics are computed; by default PyTorch's default device.
        window: number of finished episodes that the means run over.
        dtype: floating dtype of the running sums, float32 or float64.
        capture: on CUDA, :meth:`update` becomes a CUDA graph once a batch's shape has come twice.

    Raises:
        ValueError: if ``num_envs`` or ``window`` is not positive or ``dtype`` is another one.
    """

    def __init__(
        self,
        num_envs: int | Sequence[int],
        device: torch.device | str | None = None,
        *,
        window: int = 100,
        dtype: torch.dtype = torch.float32,
        capture: bool = True,
    ) -> None:
        num_envs = num_envs if isinstance(num_envs, int) else math.prod(num_envs)
        if num_envs < 1 or window < 1 or dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"EpisodeStatistics: expected num_envs >= 1, window >= 1 and dtype float32 or float64, received "
                f"num_envs={num_envs}, window={window}, dtype={dtype}. Remedy: correct the arguments."
            )
        self.device = torch.empty(0, device=device).device
        self.num_envs = num_envs
        self.window = window
        self.dtype = dtype
        # Return and length travel as two features of one recurrence: column 0 and column 1 everywhere below.
        self.running = torch.zeros(num_envs, 2, dtype=dtype, device=self.device)
        """Return and length so far of the unfinished episode of each env, ``[N, 2]``."""
        self.ring = torch.zeros(window, 2, dtype=dtype, device=self.device)
        """Return and length of the last finished episodes, ``[window, 2]``; entry ``k % window`` is the k-th."""
        self.count = torch.zeros((), dtype=torch.int64, device=self.device)
        """Number of episodes finished so far, int64 ``[]``."""
        self.batch_count = torch.zeros((), dtype=torch.int64, device=self.device)
        """Number of episodes that the latest batch finished, int64 ``[]``."""
        self.batch_return_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        """Sum of their returns, float64 ``[]``."""
        self._slots = torch.arange(window, device=self.device)
        self.capture, self._replays = capture, InPlaceReplays(type(self).__name__)

    def update(self, reward: Tensor, done: Tensor, valid: Tensor | None = None, *, time_dim: int | None = None) -> None:
        """Take in one batch, on the device and without a host read.

        A last dim of 1 is optional. Shapes are those of batches ``[N, T]``; ``[N, T, A]`` for N * A streams; ``[T]``
        for one env; and ``[N]`` or ``[N, A]``, one step of all streams.

        Args:
            reward: ``("next", "reward")``, real ``[N, T, 1]``; time-major memory (a transposed ``[T, N, 1]``) is best.
            done: ``("next", "done")``, bool or integer, shaped as ``reward``: the step ended the episode, by
                termination or truncation. One for all agents, ``[N, T, 1]`` beside ``[N, T, A, 1]``, holds for each.
            valid: bool, shaped as ``done``, the steps that count, such as those of agents that were active; the others
                add neither reward, NaN included, nor length, and end nothing. All count by default.
            time_dim: dimension of time in ``reward``, for batches of other dims: 0 for ``[T, A, 1]``, -2 for
                ``[*, T, 1]``. The streams are the other dims in their order.

        Raises:
            ValueError: if a shape, dtype or device is wrong.
        """
        self._check(reward, done, valid)
        time_dim = self._time_dim(reward, done, valid, time_dim)
        reward = reward.detach()
        if self.capture and self._replays.serves(self.device):
            memory = tuple([getattr(self, name).data_ptr() for name in _STATE])
            given, key = (reward, done, valid), (time_dim, memory)
            self._replays(lambda given: self._take(*given, time_dim), given, key, device=self.device)
        else:
            self._take(reward, done, valid, time_dim)

    def _take(self, reward: Tensor, done: Tensor, valid: Tensor | None, time_dim: int | None) -> None:
        """Take in one batch that was checked, in place."""
        steps = reward.shape[time_dim] if time_dim is not None else 1
        done = _like(done, reward)
        if done.dtype != torch.bool:
            done = done != 0
        if valid is not None:
            valid = _like(valid, reward)
            reward, done = torch.where(valid, reward, 0), done & valid
            valid = _rows(valid, time_dim, steps)
        # [T, N]: rows are time steps, so flattening gives the order "time, then env", without a copy if time-major.
        reward, done = _rows(reward, time_dim, steps), _rows(done, time_dim, steps)
        totals = self._running_totals(reward, done, valid)
        last = totals[-1]
        self.running.copy_(torch.where(done[-1].unsqueeze(-1), 0, last))

        ended = done.reshape(-1)
        rank = ended.cumsum(0, dtype=torch.int64)
        finished = rank[-1]
        self._write_ring(totals.view(-1, 2), rank, finished)
        self.count.add_(finished)
        self.batch_count.copy_(finished)
        self.batch_return_sum.copy_(torch.where(done, totals[..., 0], 0).sum(dtype=torch.float64))

    @property
    def mean_return(self) -> Tensor:
        """Mean return of the last ``window`` finished episodes, float64 ``[]``; NaN before the first has finished."""
        return self._mean(0)

    @property
    def mean_length(self) -> Tensor:
        """Mean length in steps of the last ``window`` finished episodes, float64 ``[]``; NaN before the first."""
        return self._mean(1)

    @property
    def max_return(self) -> Tensor:
        """Greatest return among the last ``window`` finished episodes, float64 ``[]``; NaN before the first."""
        greatest = torch.where(self._slots < self.count, self.ring[:, 0], -torch.inf).amax()
        return torch.where(self.count > 0, greatest, torch.nan).to(torch.float64)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the running sums, the ring and the counters, on the device."""
        return {name: getattr(self, name).clone() for name in _STATE}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore what ``state_dict`` returned, in place, so that captured graphs stay valid.

        Args:
            state_dict: tensors of the same shapes, on any device.

        Raises:
            KeyError: if a key is missing.
            ValueError: if a shape or dtype differs, because ``num_envs``, ``window`` or ``dtype`` does.
        """
        if missing := set(_STATE) - set(state_dict):
            raise KeyError(
                f"EpisodeStatistics.load_state_dict: expected keys {list(_STATE)}, received {sorted(state_dict)}; "
                f"{sorted(missing)} missing. Remedy: pass what state_dict() returned."
            )
        for name in _STATE:
            target, source = getattr(self, name), state_dict[name]
            if target.shape != source.shape or target.dtype != source.dtype:
                raise ValueError(
                    f"EpisodeStatistics.load_state_dict: expected {name} of shape {tuple(target.shape)} and "
                    f"{target.dtype}, received {tuple(source.shape)} and {source.dtype}. Remedy: construct it with the "
                    "saved num_envs, window and dtype."
                )
        for name in _STATE:
            getattr(self, name).copy_(state_dict[name])

    def _running_totals(self, reward: Tensor, done: Tensor, valid: Tensor | None) -> Tensor:
        """Return and length so far at each step, ``[T, N, 2]`` contiguous."""
        steps = torch.ones_like(reward, dtype=self.dtype) if valid is None else valid.to(self.dtype)
        increments = torch.stack([reward.to(self.dtype), steps], dim=-1)
        # The running sums already start from zero where the last batch ended an episode.
        keep = torch.ones_like(increments)
        keep[1:] = (~done[:-1]).unsqueeze(-1)
        totals = linear_recurrence(keep.transpose(0, 1), increments.transpose(0, 1), time_dim=-2, initial=self.running)
        return totals.transpose(0, 1).contiguous()

    def _write_ring(self, totals: Tensor, rank: Tensor, finished: Tensor) -> None:
        """Write the last ``window`` finished episodes of a batch into the ring.

        The k-th finished episode of the batch sits where ``rank`` first reaches k, which a binary search finds for
        ``window`` values of k at once. Their ring entries are distinct, so no index is ever written twice; an entry
        whose k is below one is written back as it was.

        Args:
            totals: return and length at each step, ``[T * N, 2]``.
            rank: number of episodes finished up to each step, int64 ``[T * N]``, never falling.
            finished: last value of ``rank``, int64 ``[]``.
        """
        number = finished - self.window + 1 + self._slots
        position = torch.searchsorted(rank, number).clamp(max=rank.shape[0] - 1)
        entry = (self.count + number - 1).remainder(self.window)
        values = torch.where((number >= 1).unsqueeze(-1), totals[position], self.ring[entry])
        self.ring.index_copy_(0, entry, values)

    def _mean(self, column: int) -> Tensor:
        """Mean of a ring column over the entries written so far; 0 / 0 gives the NaN of an empty ring."""
        written = self._slots < self.count
        total = torch.where(written, self.ring[:, column], 0).sum(dtype=torch.float64)
        return total / written.sum(dtype=torch.float64)

    def _time_dim(self, reward: Tensor, done: Tensor, valid: Tensor | None, given: int | None) -> int | None:
        """Dimension of time in ``reward``; None for a single step. Refuses what does not fit the number of streams."""
        shape = reward.shape
        if given is not None:
            dim = given + reward.ndim if given < 0 else given
        elif reward.numel() == self.num_envs:
            dim = None
        else:
            dims = reward.ndim - (reward.ndim > 1 and shape[-1] == 1)
            dim = 1 if dims > 1 else 0 if dims == 1 and self.num_envs == 1 else None
        fits = dim is None or 0 <= dim < reward.ndim
        steps = shape[dim] if fits and dim is not None else 1
        if not fits or not steps or reward.numel() != steps * self.num_envs or not _fit(done, reward, dim):
            raise ValueError(self._expected(reward, done, given))
        if valid is not None and (valid.shape, valid.dtype, valid.device) != (done.shape, torch.bool, done.device):
            raise ValueError(
                f"EpisodeStatistics.update: expected bool valid of shape {tuple(done.shape)} on {self.device}, "
                f"received {tuple(valid.shape)} {valid.dtype} on {valid.device}. Remedy: pass 'valid' of the same [N, "
                "T] batch."
            )
        return dim

    def _check(self, reward: Tensor, done: Tensor, valid: Tensor | None) -> None:
        """Refuse tensors of another dtype or device."""
        is_flag = done.dtype == torch.bool or not (done.is_floating_point() or done.is_complex())
        if reward.device != self.device or done.device != self.device or not is_flag or reward.is_complex():
            raise ValueError(self._expected(reward, done, None))

    def _expected(self, reward: Tensor, done: Tensor, time_dim: int | None) -> str:
        more = (
            " EpisodeStatistics(N * A) follows A agents; a team is the mean of its agents' rewards; time_dim= says "
            "where time is."
        )
        told = "" if time_dim is None else f" with {time_dim=}"
        return (
            f"EpisodeStatistics.update: expected reward and bool done of shape [{self.num_envs}, T, 1] on "
            f"{self.device}, received reward {tuple(reward.shape)} {reward.dtype} on {reward.device} and done "
            f"{tuple(done.shape)} {done.dtype} on {done.device}{told}. Remedy: pass "
            f"('next', 'reward') and ('next', 'done') of a [N, T] batch.{more if reward.ndim > 2 else ''}"
        )


def _rows(values: Tensor, time_dim: int | None, steps: int) -> Tensor:
    """``[T, N]``, a view where time is one of two dims."""
    return (values if time_dim is None else values.movedim(time_dim, 0)).reshape(steps, -1)


def _fit(flag: Tensor, reward: Tensor, time_dim: int | None) -> bool:
    """Whether a flag is shaped as the reward, or lacks the dim of agents before the last one."""
    if flag.shape == reward.shape:
        return True
    agents = reward.ndim - 2
    if flag.ndim == reward.ndim - 1:
        return agents != time_dim and flag.shape == (*reward.shape[:agents], 1) and reward.shape[-1] == 1
    return agents not in (time_dim, -1) and flag.shape == (*reward.shape[:agents], 1, *reward.shape[agents + 1 :])


def _like(flag: Tensor, reward: Tensor) -> Tensor:
    """A flag that :func:`_fit` lets pass, in the shape of the reward."""
    if flag.shape == reward.shape:
        return flag
    return (flag.unsqueeze(-2) if flag.ndim < reward.ndim else flag).expand(reward.shape)
