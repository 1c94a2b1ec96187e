"""Pictures of all envs at once, drawn in tensors: thick lines on a light ground, or the numbers of a state as bars.

Dimension key: ``N`` envs, ``H`` and ``W`` pixels, ``K`` numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BLUE", "GREEN", "INK", "PALE", "RED", "Line", "bars", "canvas", "cells", "heights", "lines"]

Colour = tuple[int, int, int]
GROUND: Colour = (250, 250, 250)
INK: Colour = (40, 44, 52)
RED: Colour = (204, 76, 60)
BLUE: Colour = (54, 110, 184)
GREEN: Colour = (92, 148, 90)
PALE: Colour = (206, 212, 220)
MAX_BARS = 64


class Line(NamedTuple):
    """A line with round ends, or K of them in one colour; a disc where both ends are the same, nothing at NaN.

    Attributes:
        start: x and y, ``[N, 2]`` or ``[N, K, 2]``, in units of the scene, y upwards.
        end: shaped as ``start``.
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
    for line in scene:
        distance = _distance(line, x, y).unsqueeze(-1)
        cover = ((line.radius - distance) / pixel + 0.5).clamp(0, 1)  # an edge as wide as a pixel looks smooth
        picture = picture + cover * (torch.tensor(line.colour, dtype=torch.float32, device=picture.device) - picture)
    return picture.round().to(torch.uint8)


def _distance(line: Line, x: Tensor, y: Tensor) -> Tensor:
    """From points of columns ``x [W]`` and rows ``y [H]`` to the nearest of the lines, ``[N, H, W]``."""
    count, discs = line.start.shape[0], line.start is line.end
    starts, ends = (each.float().reshape(count, -1, 2).unbind(1) for each in (line.start, line.end))
    nearest = torch.full((count, len(y), len(x)), torch.inf, device=x.device)
    for start, end in zip(starts, ends, strict=True):
        across, up = x - start[:, :1, None], y[:, None] - start[:, 1:, None]
        if not discs:
            along_x, along_y = (end - start)[:, :, None, None].unbind(1)
            length = (along_x.square() + along_y.square()).clamp(min=1e-9)
            share = ((across * along_x + up * along_y) / length).clamp(0, 1)
            across, up = across - share * along_x, up - share * along_y
        nearest = torch.fmin(nearest, across.square() + up.square())  # a line that does not exist is NaN
    return nearest.sqrt()


def cells(colours: Tensor, height: int, width: int) -> Tensor:
    """Pictures ``[N, H, W, 3]`` uint8 of grids of squares in the middle.

    Args:
        colours: ``[N, h, w, 3]``, 0 to 255.
        height: H.
        width: W.
    """
    count, rows, columns, _ = colours.shape
    picture = canvas(count, height, width, colours.device)
    side = min(height / rows, width / columns)
    top, left = (height - side * rows) / 2, (width - side * columns) / 2
    row = ((torch.arange(height, device=colours.device) + 0.5 - top) / side).floor().long()
    column = ((torch.arange(width, device=colours.device) + 0.5 - left) / side).floor().long()
    inside = ((row >= 0) & (row < rows))[:, None] & ((column >= 0) & (column < columns))[None]
    taken = colours[:, row.clamp(0, rows - 1)][:, :, column.clamp(0, columns - 1)].float()
    return torch.where(inside[..., None], taken, picture).round().to(torch.uint8)


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
