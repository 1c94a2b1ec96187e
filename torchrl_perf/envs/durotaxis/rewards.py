"""The reward of a colony in columns, weighted by a mode or by the user.

Dimension key: ``N`` envs, ``M`` slots, ``C = M / 2``, ``K`` columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_perf.envs.durotaxis.dynamics import Colony, stiffness
from torchrl_perf.envs.durotaxis.features import Summary, edge_distance, is_firmer, is_softer, mean_of
from torchrl_perf.envs.durotaxis.settings import ColonySettings

__all__ = ["COMPONENT_NAMES", "MILESTONES", "OUTCOMES", "Step", "component_weights", "reward_components"]

RewardMode = Literal["centroid", "full", "delete"]

OUTCOMES = ("running", "success", "overgrowth", "empty", "out_of_bounds", "leftward", "truncated")
"""How an episode ends, by the number in "outcome"."""

TERMINATION_REWARD = (0.0, 500.0, -15.0, -100.0, -100.0, -50.0, 0.0)
"""What each outcome is worth in mode "full"."""
TERMINATION_SCALE, TERMINATION_CLIP = 0.02, 10.0
"""In the other modes it is scaled by this, and clipped: 10 for success, -0.3 for over-growth."""

MILESTONES = ((0.25, 50.0), (0.5, 150.0), (0.75, 300.0), (0.9, 500.0))
"""Shares of the distance to the goal, and the reward when the centroid first gets so far."""

CROWD = 50
"""Number of nodes beyond which growth is a burden."""

COMPONENT_NAMES = (
    "connectivity",  # -5 with fewer than 2 nodes
    "growth",  # -3 (1 + excess / 50) with more than 50 nodes, by the number in excess of them
    "survival",  # .1 each step
    "action",  # .01 for each node before the step, which are those that act
    "centroid",  # 5 times the way of the centroid to the right; in all modes but "full" as a share of the goal's x
    "movement",  # 3 times the mean way to the right from parent to child
    "intensity",  # .3 times the mean stiffness
    "boundary",  # mean over nodes: -5, -2, -.5 within 3, 8, 15 % of the height of an edge, .05 in its middle 30 %
    "contrast",  # -.3 times the share of nodes on less than the colony's mean stiffness, 1.5 times that on more
    "spawn",  # sum over children: -8, -3 within 3, 8 % of an edge, else 2.5 for a gain in stiffness of 2.5, else -1
    "edge",  # sum over children: .5 to the right of the parent, else -.05
    "delete",  # 2 for each marked node that was deleted, -2 for each that was not and each unmarked one that was
    "milestone",  # see MILESTONES
    "termination",  # see TERMINATION_REWARD
)
"""Names of the columns of "reward_components", in order."""

_MODES: dict[str, tuple[str, ...]] = {
    "centroid": ("centroid", "termination"),
    "full": COMPONENT_NAMES,
    "delete": ("delete", "termination"),
}


class Step(NamedTuple):
    """One step of a colony, as the rewards see it.

    Attributes:
        before: the colony before it, of whose slots the first C count.
        marked: bool [N, C], nodes on less than the colony's mean stiffness before the step.
        deleted: bool [N, C].
        after: the colony after it.
        parent_x: float [N, M], place of the parent of each child.
        is_child: bool [N, M], slots of the children.
        moved: float [N], way of the centroid.
        milestones: int32 [2, N], number reached before and after.
        outcome: int64 [N].
    """

    before: Colony
    marked: Tensor
    deleted: Tensor
    after: Colony
    parent_x: Tensor
    is_child: Tensor
    moved: Tensor
    milestones: Tensor
    outcome: Tensor


def component_weights(mode: str, weights: Mapping[str, float] | None) -> list[float]:
    """The weight of each column: 1 for those of the mode and 0 for the others, unless given by name.

    Raises:
        ValueError: for an unknown mode or name.
    """
    if mode not in _MODES:
        raise ValueError(f"reward_mode: expected one of {tuple(_MODES)}, received {mode!r}. Remedy: one of these.")
    if weights is None:
        return [float(name in _MODES[mode]) for name in COMPONENT_NAMES]
    unknown = sorted(set(weights) - set(COMPONENT_NAMES))
    if unknown:
        raise ValueError(
            f"reward_weights: expected names among {COMPONENT_NAMES}, received {unknown}. Remedy: take the others out."
        )
    return [float(weights.get(name, 0.0)) for name in COMPONENT_NAMES]


def reward_components(
    step: Step, summary: Summary, tables: tuple[Tensor, Tensor], goal: Tensor | None, settings: ColonySettings
) -> Tensor:
    """The columns ``COMPONENT_NAMES`` of one step.

    Args:
        step: what happened.
        summary: of the colony after it.
        tables: rewards by outcome [7], and sums of the milestones' rewards by the number reached [5].
        goal: [N] place of the goal, of which the way of the centroid is a share; None in mode "full".
        settings: of the env.

    Returns:
        float [N, K].
    """
    after, alive, count = step.after, summary.alive, step.after.count
    ends, passed = tables
    dtype = after.x.dtype
    near = edge_distance(after.y, settings)
    gain = summary.intensity - stiffness(step.parent_x, settings)
    spawn = _zones(near, ((0.03, -8.0), (0.08, -3.0)), _pick(gain >= 2.5, 2.5, -1.0, dtype))
    boundary = _zones(near, ((0.03, -5.0), (0.08, -2.0), (0.15, -0.5)), _pick(near >= 0.35, 0.05, 0.0, dtype))
    ahead = after.x - step.parent_x
    intensity, mean = summary.intensity, summary.mean_intensity
    contrast = torch.where(is_softer(intensity, mean), -0.3, _pick(is_firmer(intensity, mean), 1.5, 0.0, dtype))
    excess = (count - CROWD).to(dtype)
    slots = step.deleted.shape[-1]
    lived = torch.arange(slots, device=count.device) < step.before.count.unsqueeze(-1)
    right = lived & (step.marked == step.deleted)
    wrong = lived & (step.marked != step.deleted)
    # An unmarked node that stays is right, and worth 0.
    proper = (right & step.marked).sum(-1) - wrong.sum(-1)
    move = 5.0 * step.moved
    columns = (
        _pick(count < 2, -5.0, 0.0, dtype),
        torch.where(excess > 0, -3.0 * (1.0 + excess / 50.0), 0.0),
        torch.full_like(step.moved, 0.1),
        0.01 * step.before.count.to(dtype),
        move if goal is None else move / goal,
        3.0 * mean_of(ahead, step.is_child, count // 2),
        0.3 * summary.mean_intensity,
        mean_of(boundary, alive, count),
        mean_of(contrast, alive, count),
        torch.where(step.is_child, spawn, 0.0).sum(-1),
        torch.where(step.is_child, _pick(ahead > 0, 0.5, -0.05, dtype), 0.0).sum(-1),
        2.0 * proper,
        passed[step.milestones[1]] - passed[step.milestones[0]],
        ends[step.outcome],
    )
    return torch.stack([column.to(dtype) for column in columns], -1)


def _zones(near: Tensor, zones: tuple[tuple[float, float], ...], rest: Tensor) -> Tensor:
    """The value of the innermost of the zones (width, value) in which a place lies, else ``rest``."""
    for width, value in reversed(zones):
        rest = torch.where(near < width, value, rest)
    return rest


def _pick(condition: Tensor, one: float, other: float, dtype: torch.dtype) -> Tensor:
    """``torch.where`` of two numbers, which are not rounded to the default dtype first."""
    return torch.where(condition, torch.full((), one, dtype=dtype, device=condition.device), other)
