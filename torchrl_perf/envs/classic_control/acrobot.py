"""Acrobot-v1 in tensors."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from torchrl_perf.envs.device_env import DeviceEnv
from torchrl_perf.envs.drawing import BLUE, RED, Line

__all__ = ["Acrobot"]

_TIME_STEP = 0.2  # seconds
_MAX_VELOCITY_1 = 4 * math.pi
_MAX_VELOCITY_2 = 9 * math.pi
_GRAVITY = 9.8
# Both links: length 1 m, mass 1 kg, centre of mass at 0.5 m, moment of inertia 1 kg m^2.
_CENTRE = 0.5
_INERTIA_2 = _CENTRE**2 + 1.0
_INERTIA = _INERTIA_2 + _CENTRE**2 + 2.0


class Acrobot(DeviceEnv):
    """Gymnasium's ``Acrobot-v1``: swing the free end of a two-link chain above its own length.

    The equations are those of the book (Gymnasium's default). Action 0, 1, 2: torque -1, 0, 1 N m on the joint between
    the links. State [N, 4]: angle of the first link (0 hangs down), angle of the second relative to the first, both in
    [-pi, pi], and their velocities. Observation [N, 6]: cos and sin of the first angle, of the second, velocities.
    Reward -1 a step, 0 at the step that terminates. Initial state uniform in +-0.1.

    Sutton, "Generalization in reinforcement learning: successful examples using sparse coarse coding", 1996.
    """

    scene_half_width = 3.4
    num_state = 4
    num_reset_noise = 4
    default_episode_steps = 500
    observation_low: ClassVar[tuple[float, ...]] = (-1.0, -1.0, -1.0, -1.0, -_MAX_VELOCITY_1, -_MAX_VELOCITY_2)
    observation_high: ClassVar[tuple[float, ...]] = (1.0, 1.0, 1.0, 1.0, _MAX_VELOCITY_1, _MAX_VELOCITY_2)
    num_actions = 3

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, 4] in [0, 1) to states [N, 4] in [-0.1, 0.1)."""
        return uniform * 0.2 - 0.1

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One Runge-Kutta step of fourth order and 0.2 s; see :meth:`DeviceEnv.dynamics`."""
        torque = action.to(state.dtype) - 1.0
        start = state.T
        k1 = _rates(start, torque)
        k2 = _rates(start + 0.5 * _TIME_STEP * k1, torque)
        k3 = _rates(start + 0.5 * _TIME_STEP * k2, torque)
        k4 = _rates(start + _TIME_STEP * k3, torque)
        end = start + _TIME_STEP / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        angles = _wrap_angle(end[:2])
        velocity_1 = end[2].clamp(-_MAX_VELOCITY_1, _MAX_VELOCITY_1)
        velocity_2 = end[3].clamp(-_MAX_VELOCITY_2, _MAX_VELOCITY_2)
        next_state = torch.stack((angles[0], angles[1], velocity_1, velocity_2), -1)
        terminated = -angles[0].cos() - (angles[1] + angles[0]).cos() > 1.0
        return next_state, terminated.to(state.dtype) - 1.0, terminated

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return both links, the axle and the height to reach."""
        first, second = state["state"][:, 0], state["state"][:, :2].sum(-1)
        axle = torch.zeros_like(state["state"][:, :2])
        elbow = torch.stack((first.sin(), -first.cos()), -1)
        tip = elbow + torch.stack((second.sin(), -second.cos()), -1)
        goal = [axle + torch.tensor([x, 1.0], dtype=axle.dtype, device=axle.device) for x in (-3.0, 3.0)]
        return [Line(*goal, 0.02), Line(axle, elbow, 0.1, BLUE), Line(elbow, tip, 0.1, RED), Line(axle, axle, 0.05)]

    def observe(self, state: Tensor) -> Tensor:
        """Map ``state`` [N, 4] to cos and sin of both angles and the two velocities [N, 6]."""
        angles, (velocity_1, velocity_2) = state[:, :2], state[:, 2:].unbind(-1)
        (cos_1, cos_2), (sin_1, sin_2) = angles.cos().unbind(-1), angles.sin().unbind(-1)
        return torch.stack((cos_1, sin_1, cos_2, sin_2, velocity_1, velocity_2), -1)


def _rates(state: Tensor, torque: Tensor) -> Tensor:
    """Time derivative [4, N] of ``state`` [4, N] under ``torque`` [N]; variables first, so that each row is contiguous.

    Gymnasium's ``_dsdt`` with its link constants put in and cos(x - pi/2) written as sin(x).
    """
    angle_1, angle_2, velocity_1, velocity_2 = state.unbind(0)
    cos_2, sin_2 = angle_2.cos(), angle_2.sin()
    inertia = _INERTIA + cos_2
    coupling = _INERTIA_2 + _CENTRE * cos_2
    half_sin = _CENTRE * sin_2
    weight_2 = _CENTRE * _GRAVITY * (angle_1 + angle_2).sin()
    weight_1 = (
        (_CENTRE + 1.0) * _GRAVITY * angle_1.sin() + weight_2 - half_sin * velocity_2 * (velocity_2 + 2 * velocity_1)
    )
    ratio = coupling / inertia
    acceleration_2 = (torque + ratio * weight_1 - half_sin * velocity_1.square() - weight_2) / (
        _INERTIA_2 - coupling * ratio
    )
    acceleration_1 = -(coupling * acceleration_2 + weight_1) / inertia
    return torch.stack((velocity_1, velocity_2, acceleration_1, acceleration_2))


def _wrap_angle(angle: Tensor) -> Tensor:
    """Shift ``angle`` by whole turns into [-pi, pi]; a value already inside, both ends included, keeps its bits."""
    turn = 2 * math.pi
    above = ((angle - math.pi) / turn).ceil().clamp(min=0)
    below = ((angle + math.pi) / turn).floor().clamp(max=0)
    return angle - turn * (above + below)
