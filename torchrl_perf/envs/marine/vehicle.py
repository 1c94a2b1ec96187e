"""Motion of a surface vehicle: three degrees of freedom after Fossen, explicit Euler, ten substeps per action.

Frames: world x north, y east; body u forward, v to starboard; yaw clockwise. SI units. Dimension key: ``E`` envs, ``R``
robots, ``C`` vortex cores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_perf.envs.marine.currents import current

__all__ = ["SUBSTEPS", "THRUST_HIGH", "THRUST_LOW", "THRUST_RATE", "TIME_STEP", "VEHICLE_RADIUS", "drive"]

TIME_STEP = 0.05
"""Seconds of a substep."""
SUBSTEPS = 10
"""Substeps of an action, which lasts half a second."""
VEHICLE_RADIUS = 0.5 * math.hypot(5.0, 2.5)
"""Metres: half of the diagonal of the hull."""
THRUST_LOW, THRUST_HIGH = -500.0, 1000.0
"""Newtons of each of the two thrusters."""
THRUST_RATE = 1000.0
"""Greatest change of a thrust, newtons per second."""

_MASS = 400.0
_INERTIA_U, _INERTIA_V, _INERTIA_R = 380.0, 400.0, 1430.0  # with added mass
_ADDED_MASS_U = -20.0
_LINEAR, _LINEAR_R = 100.0, 980.0
_QUADRATIC, _QUADRATIC_R = 150.0, 950.0
_ARM = 1.25  # metres from the midline to a thruster


def drive(
    position: Tensor, heading: Tensor, velocity: Tensor, thrust: Tensor, cores: Tensor, *, substeps: int = SUBSTEPS
) -> tuple[Tensor, Tensor, Tensor]:
    """Move vehicles under constant thrust through the currents.

    Each substep moves the vehicle with the velocity over ground that it has at the beginning, turns it, and then
    changes its velocity relative to the water by the forces in the body frame of the new heading.

    Args:
        position: ``[E, R, 2]`` metres.
        heading: ``[E, R]`` radians.
        velocity: ``[E, R, 3]``, relative to the water in the world frame, m/s, and yaw rate, rad/s.
        thrust: ``[E, R, 2]`` left and right, newtons.
        cores: ``[E, C, 4]``, see :func:`current`.
        substeps: of 0.05 s each.

    Returns:
        position, heading in [-pi, pi), velocity, of the shapes given.
    """
    x, y = position.unbind(-1)
    vx, vy, r = velocity.unbind(-1)
    left, right = thrust.unbind(-1)
    push, moment = left + right, (left - right) * _ARM
    still = not cores.shape[-2]  # without vortices the water is at rest, and half of the rotations is saved
    for _ in range(substeps):
        ground_x, ground_y = (vx, vy) if still else _plus(vx, vy, current(x, y, cores))
        x, y = x + TIME_STEP * ground_x, y + TIME_STEP * ground_y
        heading = heading + TIME_STEP * r
        cos, sin = heading.cos(), heading.sin()
        u_r, v_r = cos * vx + sin * vy, cos * vy - sin * vx
        u, v = (u_r, v_r) if still else (cos * ground_x + sin * ground_y, cos * ground_y - sin * ground_x)
        # The added mass of the surge alone counts in the Coriolis terms, as in the original system.
        force_u = push + _MASS * r * v - (_LINEAR + _QUADRATIC * u_r.abs()) * u_r
        force_v = -_MASS * r * u - _ADDED_MASS_U * u_r * r - (_LINEAR + _QUADRATIC * v_r.abs()) * v_r
        force_r = moment + _ADDED_MASS_U * u_r * v_r - (_LINEAR_R + _QUADRATIC_R * r.abs()) * r
        u_r = u_r + force_u * (TIME_STEP / _INERTIA_U)
        v_r = v_r + force_v * (TIME_STEP / _INERTIA_V)
        r = r + force_r * (TIME_STEP / _INERTIA_R)
        vx, vy = cos * u_r - sin * v_r, sin * u_r + cos * v_r
    heading = (heading + math.pi).remainder(2 * math.pi) - math.pi
    return torch.stack((x, y), -1), heading, torch.stack((vx, vy, r), -1)


def _plus(x: Tensor, y: Tensor, stream: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return x + stream[0], y + stream[1]
