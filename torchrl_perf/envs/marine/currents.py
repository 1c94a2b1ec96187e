"""Currents of vortices. Dimension key: ``E`` envs, ``R`` points, ``C`` vortex cores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["CORE_RADIUS", "CORE_STRENGTH", "EDGE_SPEED", "current"]

CORE_RADIUS = 0.5
"""Metres; inside, the water turns like a rigid body."""
EDGE_SPEED = 3.0
"""Speed of the water at the edge of a core, m/s."""
CORE_STRENGTH = 2 * math.pi * CORE_RADIUS * EDGE_SPEED
"""Circulation of a core, m^2/s."""


def current(x: Tensor, y: Tensor, cores: Tensor) -> tuple[Tensor, Tensor]:
    """Velocity of the water, the sum over all vortices (Rankine's).

    The speed at distance ``d`` is ``strength d / (2 pi r0^2)`` inside the core and ``strength / (2 pi d)`` outside, at
    a right angle to the vector to the core: that vector turned by ``sign`` times 90 degrees from x to y. Written as a
    factor of that vector, it needs no division by ``d``, and the water at the centre is at rest.

    Args:
        x: ``[E, R]`` metres.
        y: ``[E, R]`` metres.
        cores: ``[E, C, 4]``: x, y, sign (1 or -1), strength (m^2/s, 0 for a missing core).

    Returns:
        Both components ``[E, R]``, m/s.
    """
    if not cores.shape[-2]:
        return torch.zeros_like(x), torch.zeros_like(y)
    core_x, core_y, sign, strength = cores.unsqueeze(1).unbind(-1)
    to_x, to_y = core_x - x.unsqueeze(-1), core_y - y.unsqueeze(-1)
    factor = sign * strength / (2 * math.pi * (to_x.square() + to_y.square()).clamp_min(CORE_RADIUS**2))
    return -(factor * to_y).sum(-1), (factor * to_x).sum(-1)
