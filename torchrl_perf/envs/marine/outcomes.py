"""The rewards of a step: progress, goals, collisions, the rules of the road.

Dimension key: ``E`` envs, ``R`` robots, ``O`` obstacles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_perf.envs.marine.vehicle import VEHICLE_RADIUS

__all__ = ["COLLISION", "GOAL", "NOTHING", "events", "reward"]

NOTHING, GOAL, COLLISION = 0, 1, 2
"""Values of an event."""
GOAL_RADIUS = 2.0
"""Metres from the goal at which a robot has reached it."""
STEP_REWARD, GOAL_REWARD, COLLISION_REWARD, COLREGS_REWARD = -0.1, 10.0, -5.0, -0.1


def events(position: Tensor, goal: Tensor, active: Tensor, obstacles: Tensor, exists: Tensor) -> Tensor:
    """The event that ended each robot, judged by true positions.

    All robots are judged at once: two that touch both collide. A robot that touches something at its goal has collided.

    Args:
        position: ``[E, R, 2]`` after the step.
        goal: ``[E, R, 2]``.
        active: bool ``[E, R]``, before the step; others neither collide nor arrive.
        obstacles: ``[E, O, 3]`` x, y, radius.
        exists: bool ``[E, O]``.

    Returns:
        int8 ``[E, R]``: 0 nothing, 1 goal, 2 collision.
    """
    robots = active.shape[1]
    others = ~torch.eye(robots, dtype=torch.bool, device=active.device)
    apart = (position.unsqueeze(2) - position.unsqueeze(1)).square().sum(-1)  # [E, R, R]
    hit = ((apart <= (2 * VEHICLE_RADIUS) ** 2) & others & active.unsqueeze(1)).any(-1)
    gap = (position.unsqueeze(2) - obstacles[..., :2].unsqueeze(1)).square().sum(-1)  # [E, R, O]
    reach = (obstacles[..., 2] + VEHICLE_RADIUS).square().unsqueeze(1)
    hit = hit | ((gap <= reach) & exists.unsqueeze(1)).any(-1)
    arrived = (position - goal).square().sum(-1) <= GOAL_RADIUS**2
    event = arrived.to(torch.int8).masked_fill(hit, COLLISION)
    return event.masked_fill(~active, NOTHING)


def reward(before: Tensor, position: Tensor, goal: Tensor, event: Tensor, turn: Tensor) -> Tensor:
    """Reward of each robot: -0.1, the metres made good, -0.1 for each radian of ``turn``, -5 or +10 at its end.

    Args:
        before: ``[E, R, 2]`` before the step.
        position: ``[E, R, 2]`` after the step.
        goal: ``[E, R, 2]``.
        event: int8 ``[E, R]`` of :func:`events`.
        turn: ``[E, R]`` of :func:`~torchrl_perf.envs.marine.colregs.turn_angle`.

    Returns:
        ``[E, R]``; undefined for inactive robots.
    """
    made_good = _distance(before, goal) - _distance(position, goal)
    # a truth value times a number would have torch's default dtype
    arrived, collided = ((event == kind).to(made_good.dtype) for kind in (GOAL, COLLISION))
    ending = arrived * GOAL_REWARD + collided * COLLISION_REWARD
    return STEP_REWARD + made_good + COLREGS_REWARD * turn + ending


def _distance(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).square().sum(-1).sqrt()
