"""What a robot perceives: itself, and the nearest objects around it.

Dimension key: ``E`` envs, ``R`` robots, ``O`` obstacles, ``M = R + O`` objects, 5 objects perceived.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.envs.marine.vehicle import VEHICLE_RADIUS

__all__ = [
    "NUM_OBJECTS",
    "OBJECT_SCALE",
    "OBSERVATION_SIZE",
    "SELF_SCALE",
    "observe_objects",
    "observe_self",
    "sensor_noise",
    "split_observation",
    "von_mises_quantiles",
]

RANGE = 20.0
"""Metres from the robot's centre to the surface of an object that it perceives."""
NUM_OBJECTS = 5
"""How many objects are perceived at most."""
OBSERVATION_SIZE = 7 + NUM_OBJECTS * 6
SELF_SCALE = (1 / 55, 1 / 55, 1 / 3.4, 1 / 3.4, 1.0, 1 / 1000, 1 / 1000)
"""What the goal (m, body frame), u, v (m/s, over ground), yaw rate (rad/s) and both thrusts (N) are multiplied by."""
OBJECT_SCALE = (1 / 20, 1 / 20, 1 / 3.4, 1 / 3.4, 1.0)
"""What position (m, body frame), velocity (m/s, over ground, body frame) and radius (m) are multiplied by."""
NOISE = 0.05
"""Standard deviation of perceived positions (m) and velocities (m/s)."""


def observe_self(
    position: Tensor, heading: Tensor, ground: Tensor, yaw_rate: Tensor, goal: Tensor, thrust: Tensor
) -> Tensor:
    """A robot's own part of the observation, scaled by ``SELF_SCALE``.

    Args:
        position: ``[E, R, 2]``.
        heading: ``[E, R]``.
        ground: ``[E, R, 2]`` velocity over ground in the world frame.
        yaw_rate: ``[E, R]``.
        goal: ``[E, R, 2]``.
        thrust: ``[E, R, 2]``.

    Returns:
        ``[E, R, 7]``.
    """
    cos, sin = heading.cos(), heading.sin()
    goal_x, goal_y = _turned(goal - position, cos, sin)
    u, v = _turned(ground, cos, sin)
    left, right = thrust.unbind(-1)
    parts = (goal_x, goal_y, u, v, yaw_rate, left, right)
    return torch.stack([part * scale for part, scale in zip(parts, SELF_SCALE, strict=True)], -1)


def observe_objects(
    position: Tensor,
    heading: Tensor,
    ground: Tensor,
    active: Tensor,
    obstacles: Tensor,
    exists: Tensor,
    noise: Tensor | None = None,
) -> Tensor:
    """The nearest objects that each robot perceives, in the order of the distance to their surface.

    Active robots and obstacles are perceived if their surface is within 20 m of the robot. That distance and the order
    use the perceived position and radius. Missing objects are zeros. The order comes from counting nearer objects,
    which, unlike a sort, is compiled together with the rest; ties go by index.

    Args:
        position: ``[E, R, 2]``.
        heading: ``[E, R]``.
        ground: ``[E, R, 2]`` velocity over ground in the world frame.
        active: bool ``[E, R]``.
        obstacles: ``[E, O, 3]`` x, y, radius.
        exists: bool ``[E, O]``.
        noise: ``[E, R, M, 5]`` of :func:`sensor_noise`.

    Returns:
        ``[E, R, 30]``: five times position, velocity, radius scaled by ``OBJECT_SCALE``, then five flags, 1 where there
        is an object.
    """
    robots = position.shape[1]
    cos, sin = heading.cos().unsqueeze(-1), heading.sin().unsqueeze(-1)
    places = torch.cat((position, obstacles[..., :2]), 1)
    speeds = F.pad(ground, (0, 0, 0, obstacles.shape[1]))
    radii = torch.cat((torch.full_like(heading, VEHICLE_RADIUS), obstacles[..., 2]), 1)
    there = torch.cat((active, exists), 1)
    others = ~torch.eye(robots, there.shape[1], dtype=torch.bool, device=there.device)
    x, y = _turned(places.unsqueeze(1) - position.unsqueeze(2), cos, sin)
    vx, vy = _turned(speeds.unsqueeze(1), cos, sin)
    radius = radii.unsqueeze(1)
    if noise is None:
        radius = radius.expand_as(x)
    else:
        x, y, vx, vy = (one + error for one, error in zip((x, y, vx, vy), noise.unbind(-1), strict=False))
        radius = radius * noise[..., 4]
    surface = (x.square() + y.square()).sqrt() - radius
    visible = there.unsqueeze(1) & others & (surface <= RANGE)
    surface = torch.where(visible, surface, math.inf)
    features = torch.stack([part * scale for part, scale in zip((x, y, vx, vy, radius), OBJECT_SCALE, strict=True)], -1)
    return _nearest(surface, visible, features)


def _nearest(surface: Tensor, visible: Tensor, features: Tensor) -> Tensor:
    """Five of ``features`` [E, R, M, 5] in the order of ``surface`` [E, R, M], flat, and their flags: [E, R, 30]."""
    index = torch.arange(surface.shape[-1], device=surface.device)
    one, other = surface.unsqueeze(-1), surface.unsqueeze(-2)
    nearer = (other < one) | ((other == one) & (index < index.unsqueeze(-1)))
    rank = nearer.sum(-1)  # [E, R, M], a permutation of the objects
    order = torch.zeros_like(rank).scatter(-1, rank, index.expand_as(rank))[..., :NUM_OBJECTS]
    taken = visible.gather(-1, order)
    chosen = features.gather(-2, order.unsqueeze(-1).expand(*order.shape, features.shape[-1]))
    chosen = torch.where(taken.unsqueeze(-1), chosen, 0.0)
    free = NUM_OBJECTS - order.shape[-1]  # slots beyond the number of objects M
    return torch.cat((F.pad(chosen, (0, 0, 0, free)).flatten(-2), F.pad(taken, (0, free)).to(features.dtype)), -1)


def sensor_noise(normal: Tensor, uniform: Tensor, quantiles: Tensor) -> Tensor:
    """Errors of perceived objects: metres, m/s, and the factor ``0.8 + 0.2 angle / pi`` of the radius.

    Args:
        normal: ``[*, 4]`` standard normal.
        uniform: ``[*]`` in [0, 1), for an angle of von Mises' distribution with mean 0 and concentration 1.
        quantiles: of :func:`von_mises_quantiles`.

    Returns:
        ``[*, 5]``.
    """
    steps = quantiles.numel() - 1
    place = uniform * steps
    index = place.long().clamp(0, steps - 1)
    low, high = quantiles[index], quantiles[index + 1]
    angle = low + (high - low) * (place - index)
    return torch.cat((normal * NOISE, (0.8 + 0.2 / math.pi * angle).unsqueeze(-1)), -1)


def von_mises_quantiles(steps: int = 1024) -> Tensor:
    """Angles at which von Mises' distribution (mean 0, concentration 1) reaches 0, 1/steps, ..., 1.

    Sampling by its inverse needs one uniform number and no rejection. The density is above 0.046 everywhere, so that
    interpolation between the quantiles errs by less than 1e-5.

    Returns:
        float64 ``[steps + 1]`` on the CPU, from -pi to pi.
    """
    angle = torch.linspace(-math.pi, math.pi, 64 * steps + 1, dtype=torch.float64)
    density = angle.cos().exp()
    mass = F.pad(((density[1:] + density[:-1]) / 2).cumsum(0), (1, 0))
    wanted = torch.linspace(0, 1, steps + 1, dtype=torch.float64) * mass[-1]
    index = torch.searchsorted(mass, wanted).clamp(1, mass.numel() - 1)
    share = (wanted - mass[index - 1]) / (mass[index] - mass[index - 1])
    return angle[index - 1] + share * (angle[index] - angle[index - 1])


def split_observation(observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``[*, 37]`` into the robot's own part ``[*, 7]``, objects ``[*, 5, 5]`` and their mask bool ``[*, 5]``."""
    own, objects, flags = observation.split((7, NUM_OBJECTS * 5, NUM_OBJECTS), -1)
    return own, objects.unflatten(-1, (NUM_OBJECTS, 5)), flags > 0.5


def _turned(vector: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Components of world vectors ``[*, 2]`` in the frame turned by an angle."""
    x, y = vector.unbind(-1)
    return cos * x + sin * y, cos * y - sin * x
