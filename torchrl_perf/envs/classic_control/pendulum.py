"""Pendulum-v1 in tensors."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from torchrl_perf.envs.device_env import DeviceEnv
from torchrl_perf.envs.drawing import RED, Line

__all__ = ["Pendulum"]

_MAX_SPEED = 8.0
_MAX_TORQUE = 2.0
_TIME_STEP = 0.05  # seconds
_GRAVITY_GAIN = 15.0  # 3 g / (2 l) with g = 10, l = 1
_TORQUE_GAIN = 3.0  # 3 / (m l^2) with m = l = 1


class Pendulum(DeviceEnv):
    """Gymnasium's ``Pendulum-v1``: swing a pendulum up and hold it there with a torque in +-2 N m.

    State [N, 2]: angle (rad, 0 is upright), angular velocity (rad/s). Observation [N, 3]: cos, sin, angular velocity.
    Reward: -(angle^2 + 0.1 velocity^2 + 0.001 torque^2) of the state before the step, with the angle in [-pi, pi) and
    the clipped torque. Never terminates. Initial angle uniform in +-pi, velocity in +-1.
    """

    scene_half_width = 2.0
    num_state = 2
    num_reset_noise = 2
    default_episode_steps = 200
    observation_low: ClassVar[tuple[float, ...]] = (-1.0, -1.0, -_MAX_SPEED)
    observation_high: ClassVar[tuple[float, ...]] = (1.0, 1.0, _MAX_SPEED)
    action_low: ClassVar[tuple[float, ...]] = (-_MAX_TORQUE,)
    action_high: ClassVar[tuple[float, ...]] = (_MAX_TORQUE,)

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, 2] in [0, 1) to an angle in [-pi, pi) and a velocity in [-1, 1); returns [N, 2]."""
        angle, velocity = (uniform * 2.0 - 1.0).unbind(-1)
        return torch.stack((angle * math.pi, velocity), -1)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One semi-implicit Euler step of 0.05 s; see :meth:`DeviceEnv.dynamics`."""
        angle, velocity = state.unbind(-1)
        torque = action.squeeze(-1).clamp(-_MAX_TORQUE, _MAX_TORQUE)
        wrapped = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = wrapped.square() + 0.1 * velocity.square() + 0.001 * torque.square()
        next_velocity = velocity + (_GRAVITY_GAIN * angle.sin() + _TORQUE_GAIN * torque) * _TIME_STEP
        next_velocity = next_velocity.clamp(-_MAX_SPEED, _MAX_SPEED)
        next_angle = angle + next_velocity * _TIME_STEP
        terminated = torch.zeros_like(cost, dtype=torch.bool)
        return torch.stack((next_angle, next_velocity), -1), -cost, terminated

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return the rod and its axle."""
        angle = state["state"][:, 0]
        axle = torch.zeros_like(state["state"])
        tip = torch.stack((-angle.sin(), angle.cos()), -1)
        return [Line(axle, tip, 0.1, RED), Line(axle, axle, 0.05)]

    def observe(self, state: Tensor) -> Tensor:
        """Map ``state`` [N, 2] to cos and sin of the angle and the velocity [N, 3]."""
        angle, velocity = state.unbind(-1)
        return torch.stack((angle.cos(), angle.sin(), velocity), -1)
