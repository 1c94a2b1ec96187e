"""A task that needs memory of the present aim, whose optimum is known in closed form."""

from __future__ import annotations

from typing import ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_perf.envs.device_env import DeviceEnv
from torchrl_perf.envs.drawing import BLUE, GREEN, INK, RED, Line

__all__ = ["Ferry"]

_SPEED = 0.2
_LANDING = 0.1


class Ferry(DeviceEnv):
    """Steer a ferry from bank to bank; on the water it cannot see which way it is bound.

    A ferry lies between two banks at 0 and 1 and moves by ``0.2 a`` a step, the action ``a`` in [-1, 1], never beyond
    the banks. The reward is the distance made towards the bank that it is bound for, 1 at full speed and negative
    backwards. Within 0.1 of that bank it has arrived, and is bound for the other one. It observes only where it is: at
    the left bank, on the water, or at the right bank. Episodes begin at one of the banks, are truncated after 50 steps
    and never terminate.

    **Optimum.** No step gives more than 1, and full speed in the right direction gives 1 in each, so that
    :attr:`optimal_return` is 50. It needs two options, one for each way, which last from bank to bank.

    **Without options.** On the water a policy of the observation alone acts the same whichever way it is bound. A
    crossing gives 5 however long it takes; at full speed with an even chance of each way it takes 25 steps on average
    (a walk on 0, ..., 5 that is reflected at 0): about 1 in 5 of the optimum, 10.8 in an episode. A policy that always
    goes the same way on the water crosses once at most. :meth:`memoryless_return` is exact.

    State [N, 2]: position, and 1 or -1 for the bank that it is bound for. Observation [N, 3]: one-hot of left bank,
    water, right bank. Keys, arguments and the rest of the behaviour are those of :class:`DeviceEnv`.
    """

    scene_half_width = 1.5
    num_state = 2
    num_reset_noise = 1
    default_episode_steps = 50
    observation_low: ClassVar[tuple[float, ...]] = (0.0, 0.0, 0.0)
    observation_high: ClassVar[tuple[float, ...]] = (1.0, 1.0, 1.0)
    action_low: ClassVar[tuple[float, ...]] = (-1.0,)
    action_high: ClassVar[tuple[float, ...]] = (1.0,)

    option_names: ClassVar[tuple[str, ...]] = ("west", "east")
    """Names of the options made for the task."""
    option_ranges: ClassVar[tuple[tuple[float, float], ...]] = ((-1.0, 0.0), (0.0, 1.0))
    """Range of the actions of each."""
    optimal_return: ClassVar[float] = 50.0
    """Undiscounted return of an episode of 50 steps at full speed."""

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, 1] in [0, 1) to one of the banks, bound for the other one; returns [N, 2]."""
        right = (uniform >= 0.5).to(uniform.dtype)
        return torch.cat((right, 1.0 - 2.0 * right), -1)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move by 0.2 of the action; see :meth:`DeviceEnv.dynamics`."""
        position, bound = state.unbind(-1)
        moved = (position + _SPEED * action.squeeze(-1).clamp(-1.0, 1.0)).clamp(0.0, 1.0)
        reward = bound * (moved - position) / _SPEED
        arrived = torch.where(bound > 0, moved >= 1.0 - _LANDING, moved <= _LANDING)
        next_bound = torch.where(arrived, -bound, bound)
        return torch.stack((moved, next_bound), -1), reward, torch.zeros_like(arrived)

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return the two banks, the water, and the ferry with the side that it is bound for."""
        position, bound = state["state"].unbind(-1)
        zero = torch.zeros_like(position)

        def at(x: Tensor, y: float) -> Tensor:
            return torch.stack((x, zero + y), -1)

        ferry, side = 2 * position - 1, zero + 1.15
        return [
            Line(at(zero - 1.0, -0.1), at(zero + 1.0, -0.1), 0.03, BLUE),
            *(Line(at(sign * side, -0.1), at(sign * (side + 0.2), -0.1), 0.06, GREEN) for sign in (-1, 1)),
            Line(at(ferry - 0.08, 0.0), at(ferry + 0.08, 0.0), 0.06, INK),
            Line(at(ferry, 0.12), at(ferry + 0.12 * bound, 0.12), 0.02, RED),
        ]

    def observe(self, state: Tensor) -> Tensor:
        """Map ``state`` [N, 2] to left bank, water, right bank [N, 3]."""
        position = state[:, 0]
        left, right = position <= _LANDING, position >= 1.0 - _LANDING
        return torch.stack((left, ~(left | right), right), -1).to(state.dtype)

    @staticmethod
    def termination(tensordict: TensorDictBase) -> Tensor:
        """The rule that ends both options at the banks: [*, 2], 1 there and 0 on the water."""
        water = tensordict.get("observation")[..., 1:2]
        return (1.0 - water).expand(*water.shape[:-1], 2)

    @staticmethod
    def memoryless_return(east: float, steps: int = 50) -> float:
        """Expected return of full speed away from a bank, and on the water to the right with probability ``east``.

        Args:
            east: in [0, 1].
            steps: of the episode.
        """
        # chance of each position 0, ..., 5 with each bank that it may be bound for, from either bank
        chance = {(0, 1): 0.5, (5, -1): 0.5}
        total = 0.0
        for _ in range(steps):
            following: dict[tuple[int, int], float] = {}
            for (position, bound), weight in chance.items():
                rightwards = {0: 1.0, 5: 0.0}.get(position, east)
                for move, share in ((1, rightwards), (-1, 1.0 - rightwards)):
                    total += weight * share * move * bound
                    moved = position + move
                    turned = -bound if moved == (5 if bound > 0 else 0) else bound
                    following[moved, turned] = following.get((moved, turned), 0.0) + weight * share
            chance = following
        return total
