"""The picture that both mountain-car tasks draw."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torchrl_perf.envs.drawing import RED, Line

_LEFT, _RIGHT, _PIECES = -1.2, 0.6, 24


def hills(position: Tensor, goal: float) -> list[Line]:
    """Return the ground, sin(3 x), the goal and the car at ``position`` [N]."""
    corners = [torch.full_like(position, _LEFT + (_RIGHT - _LEFT) * i / _PIECES) for i in range(_PIECES + 1)]
    ground = [Line(_point(one), _point(other), 0.01) for one, other in pairwise(corners)]
    flag = _point(torch.full_like(position, goal))
    car = _point(position, lift=0.04)
    return [*ground, Line(flag, _point(torch.full_like(position, goal), lift=0.15), 0.012), Line(car, car, 0.05, RED)]


def _point(position: Tensor, lift: float = 0.0) -> Tensor:
    """Where the ground is at ``position`` [N], with the middle of the valley's ends in the middle: [N, 2]."""
    return torch.stack((position + 0.3, (3 * position).sin() * 0.45 + lift), -1)
