"""Card games of memory: name the suit of a card that was seen before."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_perf.envs.arguments import check_count
from torchrl_perf.envs.device_env import DeviceEnv

__all__ = ["RepeatFirst", "RepeatPrevious"]

_SUITS = 4
_CARDS_OF_A_SUIT = 13


class _Cards(DeviceEnv):
    """Cards dealt one a step from a shuffled deck, of which the suits are seen.

    State [N, 4 + R]: how many cards of each suit are left, and R remembered suits, -1 for none. A card is drawn from
    those that are left, which is the same as shuffling all of them at the beginning, and costs a number a step.
    """

    num_reset_noise = 1
    observation_low: ClassVar[tuple[float, ...]] = (0.0,) * _SUITS
    observation_high: ClassVar[tuple[float, ...]] = (1.0,) * _SUITS
    num_actions = _SUITS

    def __init__(self, num_envs: int, *, num_decks: int, remembered: int, options: dict[str, Any]) -> None:
        check_count(type(self).__name__, "num_decks", num_decks)
        self.num_decks, self.num_cards = num_decks, num_decks * _SUITS * _CARDS_OF_A_SUIT
        self.num_state = _SUITS + remembered
        most, steps = self.num_cards - 1, options.get("max_episode_steps", "default")
        if steps is None or (steps != "default" and steps > most):
            raise ValueError(
                f"{type(self).__name__}: expected max_episode_steps of at most {most}, with which the deck ends, "
                f"received {steps}. Remedy: leave it out, or more num_decks."
            )
        super().__init__(num_envs, **{**options, "max_episode_steps": most if steps == "default" else steps})

    def _deal(self, left: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Cards left after one, and its suit ``[N, 1]``, of those left ``[N, 4]`` and a number in [0, 1) ``[N, 1]``."""
        upto = left.cumsum(-1)
        # a product that is rounded up would name a card behind the last one
        card = torch.minimum((uniform * upto[:, -1:]).floor(), upto[:, -1:] - 1)
        suit = (card >= upto).sum(-1, keepdim=True)
        suits = torch.arange(_SUITS, device=left.device)
        return left - (suits == suit).to(left.dtype), suit.to(left.dtype)

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, 1] in [0, 1) to a full deck with one card dealt."""
        full = uniform.new_full((len(uniform), _SUITS), self.num_cards / _SUITS)
        left, suit = self._deal(full, uniform)
        none = uniform.new_full((len(uniform), self.num_state - _SUITS - 1), -1.0)
        return torch.cat((left, suit, none), -1)

    def _seen(self, suit: Tensor) -> Tensor:
        """One-hot [N, 4] of a suit [N]."""
        return (torch.arange(_SUITS, device=suit.device) == suit.unsqueeze(-1)).to(suit.dtype)

    def _scored(self, action: Tensor, wanted: Tensor, rewarded_steps: int) -> Tensor:
        """Reward [N]: the best return of an episode is 1, and the worst -1."""
        share = 1.0 / rewarded_steps
        scored = torch.where(action == wanted, share, -share)
        return torch.where(wanted < 0, 0.0, scored).to(wanted.dtype)


class RepeatPrevious(_Cards):
    """Name the suit of the card that was dealt ``k - 1`` steps ago (arXiv:2303.01859).

    One card of a deck is shown at each step; with ``k = 1`` it is the card itself. A right answer gives
    ``1 / (52 * num_decks - k)`` and a wrong one takes as much, so that the best return is 1 and that of guessing -0.5;
    before the k-th card answers count nothing. The episode is truncated with the last card but one: POPGym's rules.

    Observation [N, 4]: one-hot of the suit of the present card. Action: the suit, 0 to 3.

    Args:
        num_envs: number of envs N.
        k: which card, counted from the present one. POPGym's tasks have 4 with one deck, 32 with two, 64 with three.
        num_decks: of 52 cards each.
        options: those of :class:`~torchrl_perf.envs.DeviceEnv`.

    Raises:
        ValueError: for counts below 1, a deck of no more than ``k`` cards, an episode longer than the deck.
    """

    def __init__(self, num_envs: int, *, k: int = 4, num_decks: int = 1, **options: Any) -> None:
        check_count(type(self).__name__, "k", k)
        check_count(type(self).__name__, "num_decks", num_decks)
        if k >= num_decks * _SUITS * _CARDS_OF_A_SUIT:
            raise ValueError(
                f"RepeatPrevious: expected k below the {num_decks * _SUITS * _CARDS_OF_A_SUIT} cards, received {k}. "
                "Remedy: a smaller k, or more num_decks."
            )
        self.k = k
        super().__init__(num_envs, num_decks=num_decks, remembered=k, options=options)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Score the answer and deal a card; see :meth:`DeviceEnv.dynamics`."""
        left, recent = state[:, :_SUITS], state[:, _SUITS:]
        reward = self._scored(action, recent[:, -1], self.num_cards - self.k)
        left, suit = self._deal(left, torch.rand_like(state[:, :1]))
        following = torch.cat((left, suit, recent[:, :-1]), -1)
        return following, reward, torch.zeros_like(reward, dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        """Map ``state`` [N, 4 + k] to the present card's suit [N, 4]."""
        return self._seen(state[:, _SUITS])


class RepeatFirst(_Cards):
    """Name the suit of the first card of the episode, at each step (arXiv:2303.01859).

    One card of a deck is shown at each step. A right answer gives ``1 / (52 * num_decks - 1)`` and a wrong one takes as
    much, so that the best return is 1 and that of guessing -0.5. The episode is truncated with the last card but one:
    POPGym's rules.

    Observation [N, 4]: one-hot of the suit of the present card. Action: the suit, 0 to 3.

    Args:
        num_envs: number of envs N.
        num_decks: of 52 cards each. POPGym's tasks have 1, 8 and 16.
        options: those of :class:`~torchrl_perf.envs.DeviceEnv`.

    Raises:
        ValueError: for a count below 1, an episode longer than the deck.
    """

    def __init__(self, num_envs: int, *, num_decks: int = 1, **options: Any) -> None:
        super().__init__(num_envs, num_decks=num_decks, remembered=2, options=options)

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, 1] in [0, 1) to a full deck with one card dealt, the present one and the first."""
        state = super().initial_state(uniform)
        return torch.cat((state[:, :-1], state[:, _SUITS : _SUITS + 1]), -1)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Score the answer and deal a card; see :meth:`DeviceEnv.dynamics`."""
        first = state[:, -1:]
        reward = self._scored(action, first.squeeze(-1), self.num_cards - 1)
        left, suit = self._deal(state[:, :_SUITS], torch.rand_like(first))
        return torch.cat((left, suit, first), -1), reward, torch.zeros_like(reward, dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        """Map ``state`` [N, 6] to the present card's suit [N, 4]."""
        return self._seen(state[:, _SUITS])
