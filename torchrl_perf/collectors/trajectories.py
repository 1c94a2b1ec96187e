"""Trajectory numbers, computed for a whole batch at once on the device."""

import torch
from torch import Tensor


class TrajectoryIds:
    """Gives each episode its own number: 0..N-1 for the first ones, then in order of time and env.

    Args:
        num_envs: N.
        num_steps: T of the batches.
        device: where the numbers live.

    Attributes:
        ids: ``[T, N]`` int64, overwritten by :meth:`update`.
    """

    def __init__(self, num_envs: int, num_steps: int, device: torch.device):
        self.ids = torch.zeros((num_steps, num_envs), dtype=torch.int64, device=device)
        self._current = torch.arange(num_envs, device=device)
        self._next = torch.full((), num_envs, dtype=torch.int64, device=device)

    def update(self, done: Tensor) -> None:
        """Numbers the steps of a batch, for ``done [N, T, 1]`` (the end of the step's episode)."""
        ended = done.squeeze(-1).transpose(0, 1)
        rank = ended.flatten().cumsum(0).view(ended.shape)
        # an id only grows along an env's time, so the running maximum carries it on until the next episode begins
        started = torch.where(ended, self._next + rank - 1, 0)
        following = torch.maximum(started.cummax(0).values, self._current)
        self.ids[0].copy_(self._current)
        self.ids[1:].copy_(following[:-1])
        self._current.copy_(following[-1])
        self._next += rank[-1, -1]

    def restart(self, chosen: Tensor | None = None) -> Tensor:
        """Envs start a new episode although no step has ended the last one: each of them gets a new number.

        Args:
            chosen: bool ``[N]``, which envs; None for all.

        Returns:
            The numbers that are no longer used, ``[N]`` or those of the chosen envs.
        """
        old = self._current.clone()
        if chosen is None:
            self._current.copy_(self._next + torch.arange(len(self._current), device=self._current.device))
            self._next += len(self._current)
            return old
        rank = chosen.cumsum(0)
        self._current.copy_(torch.where(chosen, self._next + rank - 1, self._current))
        self._next += rank[-1]
        return old[chosen]

    def state_dict(self) -> dict[str, Tensor]:
        """The running numbers, copied."""
        return {"current": self._current.clone(), "next": self._next.clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Restores :meth:`state_dict` in place."""
        self._current.copy_(state_dict["current"])
        self._next.copy_(state_dict["next"])
