"""n-step windows over a ring: from a row to the last row of its window, along its stream."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_perf.functional.n_step import n_step_window
from torchrl_perf.replay.ring import Ring


class NStepWindow:
    """Windows of at most ``n`` rows that end at an episode's end or at the newest row and never cross the cursor.

    n-step returns: Sutton and Barto, section 7.1; as used for Q-learning in Rainbow, arXiv 1710.02298.

    Args:
        n: rows of a full window.
        gamma: discount.
        ring: counters of the rows.
        reward: live view of the stored rewards, ``[capacity, *shape]``.
        done: live view of the stored done flags, bool ``[capacity, ...]`` with one flag a row.
    """

    def __init__(self, n: int, gamma: float, ring: Ring, reward: Tensor, done: Tensor) -> None:
        self.n, self.gamma, self.ring = n, gamma, ring
        self.reward, self.done = reward, done.view(done.shape[0])
        self.steps_ahead = torch.arange(n, device=ring.device)
        exponents = torch.arange(n + 1, dtype=torch.float64, device=ring.device)
        powers = torch.pow(gamma, exponents)
        self.powers = powers if reward.dtype == torch.float64 else powers.float()

    def read(self, slot: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Follows each row's window.

        Args:
            slot: int64 ``[B]``.

        Returns:
            reward: discounted sum ``[B, *shape]`` in the stored dtype (float32 for integers).
            steps: rows used, int64 ``[B, 1]``, from 1 to ``n``.
            gamma: ``gamma ** steps``, ``[B, 1]``, float64 where rewards are, else float32.
            last: slot of each window's last row, int64 ``[B]``.
        """
        N, capacity = self.ring.num_streams, self.ring.capacity
        age = self.ring.age(slot).unsqueeze(1)
        ahead = torch.minimum(self.steps_ahead, age)  # [B, n]
        rows = (slot.unsqueeze(1) + ahead * N).remainder_(capacity)
        reward, done = self.reward[rows], self.done[rows]
        if not reward.is_floating_point():
            reward = reward.float()
        entries = math.prod(reward.shape[2:])
        per_entry = reward.view(*rows.shape, entries).transpose(1, 2)  # [B, R, n]
        returns, used = n_step_window(
            per_entry,
            done.unsqueeze(1).expand(-1, entries, -1),
            (age + 1).expand(-1, entries),
            self.gamma,
        )
        steps = used[:, :1]
        last = (slot + (steps.squeeze(1) - 1) * N).remainder_(capacity)
        dtype = self.reward.dtype if self.reward.is_floating_point() else torch.float32
        returns = returns.to(dtype).view(slot.shape[0], *reward.shape[2:])
        return returns, steps, self.powers[steps], last
