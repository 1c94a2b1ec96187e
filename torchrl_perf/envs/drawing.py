"""Pictures of all envs at once, drawn in tensors: thick lines on a light ground, or the numbers of a state as bars.

Dimension key: ``N`` envs, ``H`` and ``W`` pixels, ``K`` numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Line", "bars", "canvas", "heights", "lines"]

Colour = tuple[int, int, int]
GROUND: Colour = (250, 250, 250)
INK: Colour = (40, 44, 52)
RED: Colour = (204, 76, 60)
BLUE: Colour = (54, 110, 184)
MAX_BARS = 64


class Line(NamedTuple):
    """A line with round ends; a disc where both ends are the same.

    Attributes:
        start: x and y, ``[N, 2]``, in units of the scene, y upwards.
        end: ``[N, 2]``.
        radius: half its width, in the same units.
        colour: red, green, blue, 0 to 255.
    """

    start: Tensor
    end: Tensor
    radius: float
    colour: Colour = INK


def canvas(num_envs: int, height: int, width: int, device: torch.device | None) -> Tensor:
    """An empty picture of each env, ``[N, H, W, 3]`` float, 0 to 255."""
    ground = torch.tensor(GROUND, dtype=torch.float32, device=device)
    return ground.expand(num_envs, height, width, 3).clone()


def lines(scene: Sequence[Line], height: int, width: int, *, half_width: float) -> Tensor:
    """Pictures ``[N, H, W, 3]`` uint8 of the lines, later ones on top.

    Args:
        scene: at least one line.
        height: H.
        width: W.
        half_width: x from the middle to the right edge; y has the same scale, and 0 in the middle.
    """
    picture = canvas(len(scene[0].start), height, width, scene[0].start.device)
    pixel = 2 * half_width / width
    x = (torch.arange(width, device=picture.device) + 0.5) * pixel - half_width
    y = (height / 2 - 0.5 - torch.arange(height, device=picture.device)) * pixel
    points = torch.stack(torch.broadcast_tensors(x[None, :], y[:, None]), -1)
    for line in scene:
        start, end = line.start.float()[:, None, None], line.end.float()[:, None, None]
        along = end - start
        share = ((points - start) * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True).clamp(min=1e-9)
        distance = (points - start - share.clamp(0, 1) * along).square().sum(-1, keepdim=True).sqrt()
        cover = ((line.radius - distance) / pixel + 0.5).clamp(0, 1)  # an edge as wide as a pixel looks smooth
        picture = picture + cover * (torch.tensor(line.colour, dtype=torch.float32, device=picture.device) - picture)
    return picture.round().to(torch.uint8)


def heights(values: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Where numbers ``[N, K]`` are between their bounds, 0 to 1; unbounded ones by an arc tangent, NaN as 0."""
    values = values.float()
    share = values.atan() / math.pi + 0.5
    if low is not None and high is not None:
        low, high = low.float(), high.float()
        bounded = low.isfinite() & high.isfinite() & (high - low < 1e6) & (high > low)
        share = torch.where(bounded, (values - low) / (high - low), share)
    return share.nan_to_num().clamp(0, 1)


def bars(shares: Tensor, height: int, width: int) -> Tensor:
    """Pictures ``[N, H, W, 3]`` uint8 of numbers 0 to 1 ``[N, K]`` as bars from the bottom; the first 64 of them."""
    shares = shares[:, :MAX_BARS]
    picture = canvas(len(shares), height, width, shares.device)
    if shares.shape[1] == 0:
        return picture.to(torch.uint8)
    place = (torch.arange(width, device=shares.device) + 0.5) * shares.shape[1] / width
    bar = place.long().clamp(max=shares.shape[1] - 1)
    inside = ((place - bar) - 0.5).abs() < 0.4
    level = (height - 0.5 - torch.arange(height, device=shares.device)) / height
    filled = (level[None, :, None] < shares[:, bar][:, None, :]) & inside
    colour = torch.tensor(BLUE, dtype=torch.float32, device=shares.device)
    return torch.where(filled.unsqueeze(-1), colour, picture).round().to(torch.uint8)
