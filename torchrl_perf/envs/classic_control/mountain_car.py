"""MountainCar-v0 in tensors."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from torchrl_perf.envs.classic_control.hills import hills
from torchrl_perf.envs.device_env import DeviceEnv
from torchrl_perf.envs.drawing import Line

__all__ = ["MountainCar"]

_MIN_POSITION = -1.2
_MAX_POSITION = 0.6
_MAX_SPEED = 0.07
_GOAL_POSITION = 0.5
_FORCE = 0.001
_GRAVITY = 0.0025


class MountainCar(DeviceEnv):
    """Gymnasium's ``MountainCar-v0``: rock a weak car out of a valley.

    Action 0, 1, 2: push left, nothing, push right. State and observation [N, 2]: position, velocity. Reward -1 at every
    step. Terminates at position 0.5. The wall at -1.2 stops the car. Initial position uniform in [-0.6, -0.4), at
    rest.

    Moore, "Efficient memory-based learning for robot control", 1990.
    """

    scene_half_width = 1.0
    num_state = 2
    num_reset_noise = 1
    default_episode_steps = 200
    observation_low: ClassVar[tuple[float, ...]] = (_MIN_POSITION, -_MAX_SPEED)
    observation_high: ClassVar[tuple[float, ...]] = (_MAX_POSITION, _MAX_SPEED)
    num_actions = 3

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, 1] in [0, 1) to a position in [-0.6, -0.4) at rest; returns [N, 2]."""
        position = uniform * 0.2 - 0.6
        return torch.cat((position, torch.zeros_like(position)), -1)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of unit time; see :meth:`DeviceEnv.dynamics`."""
        position, velocity = state.unbind(-1)
        push = (action.to(state.dtype) - 1.0) * _FORCE
        velocity = (velocity + (push - (3.0 * position).cos() * _GRAVITY)).clamp(-_MAX_SPEED, _MAX_SPEED)
        position = (position + velocity).clamp(_MIN_POSITION, _MAX_POSITION)
        velocity = velocity.masked_fill((position <= _MIN_POSITION) & (velocity < 0), 0.0)
        terminated = (position >= _GOAL_POSITION) & (velocity >= 0)
        return torch.stack((position, velocity), -1), torch.full_like(position, -1.0), terminated

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return the hills, the goal and the car."""
        return hills(state["state"][:, 0], _GOAL_POSITION)

    def observe(self, state: Tensor) -> Tensor:
        """Return ``state`` [N, 2]: it is observed as it is."""
        return state
