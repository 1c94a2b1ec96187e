"""A proportional heading controller, a baseline for learned policies. Dimension key: ``E`` envs, ``R`` robots."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from torchrl_perf.envs.marine.vehicle import SUBSTEPS, THRUST_HIGH, THRUST_LOW, THRUST_RATE, TIME_STEP

__all__ = ["scripted_action"]


class _HasSnapshot(Protocol):
    def snapshot(self) -> dict[str, Tensor]: ...


def scripted_action(source: _HasSnapshot | dict[str, Tensor]) -> Tensor:
    """Action that steers towards the goal and ignores everything else.

    With the goal's bearing ``e`` off the bow and yaw rate ``r``: ``700 max(0, cos e)`` newtons forward from each
    thruster, and ``500 clip(1.2 e - 0.9 r, -1, 1)`` more from the left, less from the right one. In an empty world it
    reaches a goal 40 m away in 30 to 38 steps and returns about 45.3.

    Args:
        source: a :class:`MarineNavigation`, or a snapshot of one.

    Returns:
        ``[E, R, 2]`` in [-1, 1], continuous.
    """
    seen = source if isinstance(source, dict) else source.snapshot()
    way_x, way_y = (seen["goal"] - seen["position"]).unbind(-1)
    error = torch.atan2(way_y, way_x) - seen["heading"]
    error = (error + math.pi).remainder(2 * math.pi) - math.pi
    forward = 700.0 * error.cos().clamp_min(0.0)
    turn = 500.0 * (1.2 * error - 0.9 * seen["yaw_rate"]).clamp(-1.0, 1.0)
    wanted = torch.stack((forward + turn, forward - turn), -1).clamp(THRUST_LOW, THRUST_HIGH)
    return ((wanted - seen["thrust"]) / (THRUST_RATE * SUBSTEPS * TIME_STEP)).clamp(-1.0, 1.0)
