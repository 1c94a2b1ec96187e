"""How a colony divides, in tensors of static shape.

Dimension key: ``N`` envs, ``M`` slots, ``C = M / 2`` slots that a colony fills which has not over-grown.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_perf.envs.durotaxis.settings import START_HEIGHT, START_WIDTH, ColonySettings
from torchrl_perf.functional import leftmost_k

__all__ = ["Colony", "deletion_count", "divide", "fresh_colony", "hill_radius", "living", "select_deleted", "stiffness"]


class Colony(NamedTuple):
    """The nodes of N colonies. The living ones fill the first ``count`` slots; what is beyond is 0.

    Attributes:
        x: float [N, M], place along the gradient.
        y: float [N, M], place across it.
        age: int32 [N, M], steps since the node was born.
        pid: int32 [N, M], its number, which it keeps as long as it lives and which is unique within the episode.
        count: int32 [N], number of nodes.
        next_pid: int32 [N], number of the next node to be born.
    """

    x: Tensor
    y: Tensor
    age: Tensor
    pid: Tensor
    count: Tensor
    next_pid: Tensor


def living(count: Tensor, slots: int) -> Tensor:
    """Which of the slots hold a node: bool [N, slots] for ``count`` [N]."""
    return torch.arange(slots, dtype=count.dtype, device=count.device) < count.unsqueeze(-1)


def stiffness(x: Tensor, settings: ColonySettings) -> Tensor:
    """Stiffness at places ``x`` [*]: ``m x + b`` or ``b exp(m x)``, of ``x`` cut to a whole number in [0, W - 1]."""
    place = x.clamp(0.0, settings.size[0] - 1.0).floor()
    if settings.field == "linear":
        return settings.slope * place + settings.intercept
    return settings.intercept * (settings.slope * place).exp()


def hill_radius(gamma: Tensor, alpha: Tensor, noise: Tensor, intensity: Tensor) -> Tensor:
    """Distance of a child from its parent, ``gamma / (1 + (alpha / I)^2) + noise``, a Hill curve of the stiffness I.

    (5, 2, .5) gives 1.5 at I = 1, 3.9615 at 3 and 4.8103 at 5. ``noise`` is a constant that is added, not random.
    Arguments broadcast; the stiffness is positive.
    """
    return gamma / (1.0 + (alpha / intensity).square()) + noise


def deletion_count(share: Tensor, count: Tensor) -> Tensor:
    """``floor(share * count)`` of the product rounded to the dtype of ``share``: int32 [N] for [N] each."""
    return (share * count).floor().to(torch.int32)


def select_deleted(colony: Colony, share: Tensor, settings: ColonySettings) -> Tensor:
    """The nodes to delete for a share: those farthest left, ties by slot; or random ones.

    Args:
        colony: the colony.
        share: float [N] in [0, 1].
        settings: of the env.

    Returns:
        bool [N, C].
    """
    slots = settings.critical_nodes
    place = colony.x[:, :slots]
    key = place if settings.deletion == "leftmost" else torch.rand_like(place)
    return leftmost_k(key, living(colony.count, slots), deletion_count(share, colony.count))


def divide(colony: Colony, deleted: Tensor, shape: Tensor, settings: ColonySettings) -> tuple[Colony, Tensor]:
    """Delete nodes; each of the others stays in place and has one child, at a distance that depends on the stiffness.

    Survivors move up to the first slots, in their order, and their children follow in the same order.

    Args:
        colony: at most C nodes each.
        deleted: bool [N, C]; slots without a node count as deleted.
        shape: float [N, 4], gamma, alpha, noise and the angle theta from the x axis.
        settings: of the env.

    Returns:
        The colony of twice the survivors, and the place ``x`` of the parent of each child, 0 elsewhere, [N, M].
    """
    slots, half = settings.slots, settings.critical_nodes
    survive = living(colony.count, half) & ~deleted
    rank = survive.cumsum(-1)
    survivors = rank[:, -1:]
    # Slot of the r-th survivor. The others write to an extra column, which is dropped.
    number = torch.arange(half, device=survive.device).expand_as(rank)
    target = torch.where(survive, rank - 1, half)
    origin = torch.zeros(rank.shape[0], half + 1, dtype=rank.dtype, device=rank.device).scatter(-1, target, number)
    slot = torch.arange(slots, device=survive.device)
    is_child = (slot >= survivors) & (slot < 2 * survivors)
    origin = origin.gather(-1, torch.where(is_child, slot - survivors, slot).clamp_max(half - 1))

    gamma, alpha, noise, theta = shape.unsqueeze(-1).unbind(1)
    from_x, from_y = colony.x.gather(-1, origin), colony.y.gather(-1, origin)
    radius = hill_radius(gamma, alpha, noise, stiffness(from_x, settings))
    child_x, child_y = from_x + radius * theta.cos(), from_y + radius * theta.sin()
    if settings.confine:
        (width, height), (margin_x, margin_y) = settings.size, settings.margin
        child_x = child_x.clamp(margin_x, width - margin_x)
        child_y = child_y.clamp(margin_y, height - margin_y)

    stays = slot < survivors
    exists = stays | is_child
    zero = torch.zeros((), dtype=colony.age.dtype, device=survive.device)
    born = (colony.next_pid.unsqueeze(-1) + (slot - survivors)).to(colony.pid.dtype)
    survivors = survivors.squeeze(-1).to(colony.count.dtype)
    grown = Colony(
        x=torch.where(exists, torch.where(is_child, child_x, from_x), 0.0),
        y=torch.where(exists, torch.where(is_child, child_y, from_y), 0.0),
        age=torch.where(stays, colony.age.gather(-1, origin) + 1, zero),
        pid=torch.where(stays, colony.pid.gather(-1, origin), torch.where(is_child, born, zero)),
        count=2 * survivors,
        next_pid=colony.next_pid + survivors,
    )
    return grown, torch.where(is_child, from_x, 0.0)


def fresh_colony(uniform: Tensor, settings: ColonySettings) -> Colony:
    """Colonies as they start: nodes near the left edge, numbered from left to right.

    Args:
        uniform: float [N, start_nodes, 2] in [0, 1), the random numbers.
        settings: of the env.

    Returns:
        x uniform in the first tenth of the width, y in the middle fifth of the height, age 0.
    """
    (num_envs, start, _), device = uniform.shape, uniform.device
    width, height = settings.size
    low, high = START_HEIGHT
    order = uniform[..., 0].argsort(dim=-1, stable=True)
    across = uniform[..., 1].gather(-1, order)
    x = START_WIDTH * width * uniform[..., 0].gather(-1, order)
    y = height * (low + (high - low) * across)
    pid = torch.arange(start, dtype=torch.int32, device=device).expand(num_envs, start)
    rest = settings.slots - start
    return Colony(
        x=_padded(x, rest),
        y=_padded(y, rest),
        age=torch.zeros(num_envs, settings.slots, dtype=torch.int32, device=device),
        pid=_padded(pid, rest),
        count=torch.full((num_envs,), start, dtype=torch.int32, device=device),
        next_pid=torch.full((num_envs,), start, dtype=torch.int32, device=device),
    )


def _padded(values: Tensor, rest: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, rest))
