"""A corridor with a sign at its beginning and a choice at its end."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_perf.envs.arguments import check_count
from torchrl_perf.envs.device_env import DeviceEnv
from torchrl_perf.envs.drawing import BLUE, GREEN, INK, Line

__all__ = ["TMaze"]

_RIGHT = 4.0
_WRONG = -0.1


class TMaze(DeviceEnv):
    """Walk down a corridor to a junction, and turn there to the side that a sign at the beginning has shown.

    Actions: 0 forward, 1 back, 2 left, 3 right. The sign is seen at the first place alone, so that a choice after
    ``length`` steps needs a memory as long. At the junction a turn ends the episode: 4 for the side of the sign, -0.1
    for the other. A step that does not lead forward costs 0.1. Without memory no policy does better than an even chance
    there: 1.95 on average. An episode that takes twice as long as it need is truncated.

    Bakker, "Reinforcement learning with long short-term memory", 2001, whose observations and rewards these are. There
    only standing still costs something; here a step back does too (as in arXiv:2307.03864), so that finding the end of
    a long corridor is no task of its own beside that of remembering.

    State [N, 2]: place from 0 to ``length``, and 1 for a sign to the left or -1 to the right. Observation [N, 3]:
    (0, 1, 1) at a sign to the left, (1, 1, 0) at one to the right, (1, 0, 1) on the way, (0, 1, 0) at the junction.

    Args:
        num_envs: number of envs N.
        length: steps from the sign to the junction, at least 1.
        options: those of :class:`~torchrl_perf.envs.DeviceEnv`; ``max_episode_steps`` is ``2 * (length + 1)`` by
            default.

    Raises:
        ValueError: for a length below 1.
    """

    scene_half_width = 1.2
    num_state = 2
    num_reset_noise = 1
    observation_low: ClassVar[tuple[float, ...]] = (0.0, 0.0, 0.0)
    observation_high: ClassVar[tuple[float, ...]] = (1.0, 1.0, 1.0)
    num_actions = 4

    optimal_return: ClassVar[float] = _RIGHT
    """Undiscounted return of the shortest way and the right turn."""
    memoryless_return: ClassVar[float] = (_RIGHT + _WRONG) / 2
    """The most that a policy without memory is expected to get."""

    def __init__(self, num_envs: int, *, length: int = 10, **options: Any) -> None:
        check_count(type(self).__name__, "length", length)
        self.length = length
        if options.get("max_episode_steps", "default") == "default":
            options["max_episode_steps"] = 2 * (length + 1)
        super().__init__(num_envs, **options)

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, 1] in [0, 1) to the first place and a sign; returns [N, 2]."""
        sign = torch.where(uniform < 0.5, 1.0, -1.0).to(uniform.dtype)
        return torch.cat((torch.zeros_like(sign), sign), -1)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step or turn; see :meth:`DeviceEnv.dynamics`."""
        place, sign = state.unbind(-1)
        forward, back, turns = action == 0, action == 1, action >= 2
        at_end = place >= self.length
        moved = torch.where(forward, place + 1, torch.where(back, place - 1, place)).clamp(0, self.length)
        terminated = at_end & turns
        is_right = (action == 2) == (sign > 0)
        of_turn = torch.where(is_right, _RIGHT, _WRONG)
        reward = torch.where(terminated, of_turn, torch.where(moved > place, 0.0, _WRONG)).to(state.dtype)
        return torch.stack((moved, sign), -1), reward, terminated

    def observe(self, state: Tensor) -> Tensor:
        """Map ``state`` [N, 2] to the sign, the way or the junction [N, 3]."""
        place, sign = state.unbind(-1)
        first, last = place <= 0, place >= self.length
        way = ~(first | last)
        left, right = first & (sign > 0), first & (sign < 0)
        return torch.stack((way | right, first | last, way | left), -1).to(state.dtype)

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return the corridor, its two arms, the sign's side, and the walker."""
        place, sign = state["state"].unbind(-1)
        zero = torch.zeros_like(place)

        def at(x: Tensor, y: Tensor) -> Tensor:
            return torch.stack((x, y), -1)

        x = 2 * place / self.length - 1
        return [
            Line(at(zero - 1, zero), at(zero + 1, zero), 0.03, BLUE),
            Line(at(zero + 1, zero - 0.5), at(zero + 1, zero + 0.5), 0.03, BLUE),
            Line(at(zero - 1, zero), at(zero - 1, 0.2 * sign), 0.04, GREEN),
            Line(at(x - 0.03, zero), at(x + 0.03, zero), 0.08, INK),
        ]
