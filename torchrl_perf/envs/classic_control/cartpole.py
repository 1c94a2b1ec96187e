"""CartPole-v1 in tensors."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from torchrl_perf.envs.device_env import DeviceEnv
from torchrl_perf.envs.drawing import RED, Line

__all__ = ["CartPole"]

_GRAVITY = 9.8
_POLE_MASS = 0.1
_TOTAL_MASS = 1.1
_HALF_LENGTH = 0.5
_POLE_MASS_LENGTH = 0.05
_FORCE = 10.0
_TIME_STEP = 0.02  # seconds
_ANGLE_LIMIT = 12 * 2 * math.pi / 360  # radians
_POSITION_LIMIT = 2.4


class CartPole(DeviceEnv):
    """Gymnasium's ``CartPole-v1``: balance a pole on a cart by pushing it left (0) or right (1).

    State and observation [N, 4]: cart position (m), cart velocity, pole angle (rad), pole angular velocity.
    Reward 1 at every step, the last one included. Terminates when the cart leaves +-2.4 m or the pole leans more than
    12 degrees. Initial state uniform in +-0.05.

    Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems", 1983.

    Example:
        >>> env = CartPole(4096, device="cuda")
        >>> env.rollout(100, break_when_any_done=False).batch_size
        torch.Size([4096, 100])
    """

    scene_half_width = 2.4
    num_state = 4
    num_reset_noise = 4
    default_episode_steps = 500
    observation_low: ClassVar[tuple[float, ...]] = (-4.8, -math.inf, -2 * _ANGLE_LIMIT, -math.inf)
    observation_high: ClassVar[tuple[float, ...]] = (4.8, math.inf, 2 * _ANGLE_LIMIT, math.inf)
    num_actions = 2

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, 4] in [0, 1) to states [N, 4] in [-0.05, 0.05)."""
        return uniform * 0.1 - 0.05

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One explicit Euler step of 0.02 s; see :meth:`DeviceEnv.dynamics`."""
        position, velocity, angle, angular_velocity = state.unbind(-1)
        cos, sin = angle.cos(), angle.sin()
        force = action.to(state.dtype) * (2 * _FORCE) - _FORCE
        push = (force + _POLE_MASS_LENGTH * angular_velocity.square() * sin) / _TOTAL_MASS
        angular_acceleration = (_GRAVITY * sin - cos * push) / (
            _HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * cos.square() / _TOTAL_MASS)
        )
        acceleration = push - _POLE_MASS_LENGTH * angular_acceleration * cos / _TOTAL_MASS
        rates = torch.stack((velocity, acceleration, angular_velocity, angular_acceleration), -1)
        next_state = state + _TIME_STEP * rates
        position = position + _TIME_STEP * velocity
        angle = angle + _TIME_STEP * angular_velocity
        terminated = (position.abs() > _POSITION_LIMIT) | (angle.abs() > _ANGLE_LIMIT)
        return next_state, torch.ones_like(position), terminated

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return the track, the cart and the pole."""
        position, _, angle, _ = state["state"].unbind(-1)
        floor, zero = torch.full_like(position, -0.8), torch.zeros_like(position)
        cart = torch.stack((position, floor), -1)
        tip = cart + 2 * _HALF_LENGTH * torch.stack((angle.sin(), angle.cos()), -1)
        ends = [torch.stack((zero + x, floor), -1) for x in (-_POSITION_LIMIT, _POSITION_LIMIT)]
        half = torch.stack((zero + 0.2, zero), -1)
        return [Line(*ends, 0.015), Line(cart - half, cart + half, 0.12), Line(cart, tip, 0.05, RED)]

    def observe(self, state: Tensor) -> Tensor:
        """Return ``state`` [N, 4]: it is observed as it is."""
        return state
