"""What is observed of a colony: 11 numbers of each node and 19 of the whole.

Dimension key: ``N`` envs, ``M`` slots.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_perf.envs.durotaxis.dynamics import Colony, living, stiffness
from torchrl_perf.envs.durotaxis.settings import LEFTWARD_LIMIT, ColonySettings

__all__ = [
    "GRAPH_FEATURES",
    "NODE_FEATURES",
    "Summary",
    "edge_distance",
    "graph_features",
    "is_firmer",
    "is_softer",
    "mean_of",
    "node_features",
    "summarize",
]

NODE_FEATURES = (
    "x",  # place along the gradient / W
    "y",  # place across it / H
    "stiffness",  # / greatest of the substrate
    "offset_x",  # from the centroid, in tenths of W
    "offset_y",  # from the centroid, in tenths of H
    "relative_x",  # 0 for the leftmost node to 1 for the rightmost; 0 if all are at the same place
    "age",  # steps s since birth as s / (s + 10)
    "newborn",  # 1 if born in the last step
    "goal_distance",  # from the place of the goal, signed, / W
    "edge_distance",  # from the nearer of the upper and lower edges / (H / 2); negative beyond it
    "marked",  # 1 if the stiffness is less than the colony's mean: what the component "delete" wants deleted
)
"""Columns of "nodes"; all are 0 in slots without a node."""

GRAPH_FEATURES = (
    "nodes",  # number of nodes / the number beyond which the colony has over-grown
    "progress",  # x of the centroid / x of the goal
    "log_nodes",  # log(1 + number) / log(1 + M)
    "center_y",  # y of the centroid / H
    "spread_x",  # standard deviation of x, in tenths of W
    "spread_y",  # standard deviation of y, in tenths of H
    "low_x",  # least x / W
    "high_x",  # greatest x / W
    "low_y",  # least y / H
    "high_y",  # greatest y / H
    "mean_stiffness",  # / greatest of the substrate
    "low_stiffness",  # at the leftmost node, / greatest of the substrate
    "high_stiffness",  # at the rightmost node, / greatest of the substrate
    "goal_distance",  # of the rightmost node from the goal, signed, / W
    "moved",  # by the centroid in the last step, in tenths of W
    "leftward",  # consecutive steps of the centroid to the left / 30
    "time",  # steps of the episode / their greatest number; 0 without a limit
    "milestones",  # reached, of 4, / 4
    "age",  # mean steps s since birth as s / (s + 10)
)
"""Columns of "graph"; of an empty colony those of places, stiffness and age are 0."""

AGE_SCALE = 10.0
TIE = 1e-5
"""Share of a mean by which a stiffness has to differ from it: one of equal numbers is rounded."""


class Summary(NamedTuple):
    """Quantities of a colony that both the rewards and the features use.

    Attributes:
        alive: bool [N, M].
        intensity: float [N, M], stiffness under the nodes; any where there is none.
        mean_intensity: float [N].
        center_x: float [N], as all below; 0 for an empty colony.
        center_y: of the centroid.
        low_x: least x.
        high_x: greatest x.
        low_y: least y.
        high_y: greatest y.
    """

    alive: Tensor
    intensity: Tensor
    mean_intensity: Tensor
    center_x: Tensor
    center_y: Tensor
    low_x: Tensor
    high_x: Tensor
    low_y: Tensor
    high_y: Tensor


def mean_of(values: Tensor, alive: Tensor, count: Tensor) -> Tensor:
    """Mean over the living nodes, [N] for ``values`` and ``alive`` [N, M]; 0 for none."""
    return torch.where(alive, values, 0.0).sum(-1) / count.clamp_min(1)


def summarize(colony: Colony, settings: ColonySettings) -> Summary:
    """The summary of each colony."""
    x, y, count = colony.x, colony.y, colony.count
    alive = living(count, x.shape[-1])
    intensity = stiffness(x, settings)
    empty = count == 0
    ends = []
    for place in (x, y):
        low = torch.where(alive, place, math.inf).amin(-1)
        high = torch.where(alive, place, -math.inf).amax(-1)
        ends += [low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)]
    return Summary(
        alive,
        intensity,
        mean_of(intensity, alive, count),
        mean_of(x, alive, count),
        mean_of(y, alive, count),
        *ends,
    )


def is_softer(intensity: Tensor, mean: Tensor) -> Tensor:
    """Which nodes lie on less than the mean stiffness: bool [N, M] for ``intensity`` [N, M] and ``mean`` [N]."""
    return intensity < (mean * (1.0 - TIE)).unsqueeze(-1)


def is_firmer(intensity: Tensor, mean: Tensor) -> Tensor:
    """Which nodes lie on more than the mean stiffness: bool [N, M] for ``intensity`` [N, M] and ``mean`` [N]."""
    return intensity > (mean * (1.0 + TIE)).unsqueeze(-1)


def edge_distance(y: Tensor, settings: ColonySettings) -> Tensor:
    """Distance of places ``y`` [*] from the nearer of the upper and lower edges, as a share of the height."""
    height = settings.size[1]
    return torch.minimum(y, height - y) / height


def node_features(colony: Colony, summary: Summary, goal: Tensor, settings: ColonySettings) -> Tensor:
    """The columns ``NODE_FEATURES`` of each node, float [N, M, 11]; ``goal`` [N] is the place of the goal."""
    (width, height), highest = settings.size, settings.stiffness_range[1]
    x, y = colony.x, colony.y
    low, span = summary.low_x.unsqueeze(-1), (summary.high_x - summary.low_x).unsqueeze(-1)
    age = colony.age.to(x.dtype)
    columns = (
        x / width,
        y / height,
        summary.intensity / highest,
        (x - summary.center_x.unsqueeze(-1)) / (0.1 * width),
        (y - summary.center_y.unsqueeze(-1)) / (0.1 * height),
        torch.where(span > 0, (x - low) / torch.where(span > 0, span, 1.0), 0.0),
        age / (age + AGE_SCALE),
        (colony.age == 0).to(x.dtype),
        (goal.unsqueeze(-1) - x) / width,
        2.0 * edge_distance(y, settings),
        is_softer(summary.intensity, summary.mean_intensity).to(x.dtype),
    )
    return torch.where(summary.alive.unsqueeze(-1), torch.stack(columns, -1), 0.0)


def graph_features(
    colony: Colony,
    summary: Summary,
    state: dict[str, Tensor],
    limits: tuple[Tensor, Tensor, int | None],
    settings: ColonySettings,
) -> Tensor:
    """The columns ``GRAPH_FEATURES`` of each colony.

    Args:
        colony: its nodes.
        summary: of the colony.
        state: [N] each: "moved", "left_run", "steps" and "milestones".
        limits: place of the goal [N], greatest number of nodes [N], greatest number of steps.
        settings: of the env.

    Returns:
        float [N, 19].
    """
    (width, height), highest = settings.size, settings.stiffness_range[1]
    goal, critical, steps = limits
    count, dtype = colony.count, colony.x.dtype
    exists = count > 0
    spread = [
        mean_of((place - center.unsqueeze(-1)).square(), summary.alive, count).sqrt()
        for place, center in ((colony.x, summary.center_x), (colony.y, summary.center_y))
    ]
    ends = stiffness(torch.stack((summary.low_x, summary.high_x)), settings) / highest
    low_stiffness, high_stiffness = torch.where(exists, ends, 0.0).unbind(0)
    age = mean_of(colony.age.to(dtype), summary.alive, count)
    columns = (
        count.to(dtype) / critical,
        summary.center_x / goal,
        (count + 1).to(dtype).log() / math.log(1 + settings.slots),
        summary.center_y / height,
        spread[0] / (0.1 * width),
        spread[1] / (0.1 * height),
        summary.low_x / width,
        summary.high_x / width,
        summary.low_y / height,
        summary.high_y / height,
        summary.mean_intensity / highest,
        low_stiffness,
        high_stiffness,
        torch.where(exists, (goal - summary.high_x) / width, 0.0),
        state["moved"] / (0.1 * width),
        state["left_run"].to(dtype) / LEFTWARD_LIMIT,
        state["steps"].to(dtype) / (math.inf if steps is None else steps),
        state["milestones"].to(dtype) / 4,
        age / (age + AGE_SCALE),
    )
    return torch.stack([column.to(dtype) for column in columns], -1)
