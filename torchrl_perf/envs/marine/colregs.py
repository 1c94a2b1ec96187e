"""The rules of the road at sea (COLREGs 13 to 17) as an angle by which a vehicle should have turned to starboard.

Dimension key: ``E`` envs, ``R`` robots.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_perf.envs.marine.vehicle import VEHICLE_RADIUS

__all__ = ["turn_angle"]

_LEAST_SPEED = 0.5  # m/s; a slower vehicle is not under way
_RANGE = 20.0
_MARGIN = 1.0  # metres kept from the other's hull


def turn_angle(position: Tensor, ground: Tensor, active: Tensor) -> Tensor:
    """Angle between a vehicle's course and the one that passes the other vehicle as the rules ask.

    Of the vehicles to which this one has to give way, the nearest counts. It has to give way if, in the frame of the
    other's velocity (origin at the other, x along its velocity), it comes head on (0 <= x <= 17, abs(y) <= 4.5, its
    velocity turned by more than 3/4 pi), or crosses from the left (-9 <= x <= 12, -17 <= y <= 0, not ahead of the line
    from (12, -7) to (0, 0), its velocity turned by pi/4 to 3/4 pi). The desired course leads past the other's starboard
    side, to the tangent at a distance of 1 m plus this vehicle's radius; closer than that it is at a right angle.

    Args:
        position: ``[E, R, 2]`` metres.
        ground: ``[E, R, 2]`` velocity over ground in the world frame, m/s.
        active: bool ``[E, R]``.

    Returns:
        ``[E, R]`` radians in [0, pi]; 0 where the rules require no turn.
    """
    vx, vy = ground.unbind(-1)
    speed = (vx.square() + vy.square()).sqrt()
    course = torch.atan2(vy, vx)
    moving = active & (speed >= _LEAST_SPEED)
    safe = speed.clamp_min(_LEAST_SPEED).unsqueeze(1)
    cos, sin = vx.unsqueeze(1) / safe, vy.unsqueeze(1) / safe  # of the other's course, [E, 1, R]
    x, y = position.unbind(-1)
    away_x, away_y = x.unsqueeze(2) - x.unsqueeze(1), y.unsqueeze(2) - y.unsqueeze(1)  # from the other to the own
    meets = _gives_way(
        cos * away_x + sin * away_y,
        cos * away_y - sin * away_x,
        torch.atan2(cos * vy.unsqueeze(2) - sin * vx.unsqueeze(2), cos * vx.unsqueeze(2) + sin * vy.unsqueeze(2)),
    )
    distance = (away_x.square() + away_y.square()).sqrt()
    robots = active.shape[1]
    others = ~torch.eye(robots, dtype=torch.bool, device=active.device)
    meets = meets & others & moving.unsqueeze(2) & moving.unsqueeze(1) & (distance <= _RANGE + VEHICLE_RADIUS)
    nearest = torch.where(meets, distance, math.inf).argmin(-1, keepdim=True)
    to_x, to_y, far, applies = (v.gather(-1, nearest).squeeze(-1) for v in (-away_x, -away_y, distance, meets))
    # Closer than the tangent distance the arcsine is undefined; clamped to 1 it points abeam.
    base = VEHICLE_RADIUS + _MARGIN
    tangent = (far.square() - base**2).clamp_min(0.0).sqrt()
    turn = (base / far.clamp_min(base)).asin() + torch.atan2(torch.full_like(far, VEHICLE_RADIUS), tangent)
    desired = torch.atan2(to_y, to_x) + turn
    angle = (desired - course + math.pi).remainder(2 * math.pi) - math.pi
    return torch.where(applies, angle.clamp_min(0.0), 0.0)


def _gives_way(x: Tensor, y: Tensor, angle: Tensor) -> Tensor:
    """Whether a vehicle at (x, y) with a velocity of ``angle``, all in the other's velocity frame, has to give way."""
    head_on = (x >= 0) & (x <= 17) & (y.abs() <= 4.5) & (angle.abs() > 0.75 * math.pi)
    beside = (x >= -9) & (x <= 12) & (y >= -17) & (y <= 0) & (y + 7 <= (-7 / 12) * (x - 12))
    return head_on | (beside & (angle >= 0.25 * math.pi) & (angle <= 0.75 * math.pi))
