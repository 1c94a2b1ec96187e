"""Comparison of a policy's placements with random ones, columns and those of centralities.

Dimension key: ``L`` landscapes, ``H``, ``W`` cells.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.envs.fuel_breaks import (
    FuelBreaks,
    betweenness_breaks,
    column_breaks,
    domirank_breaks,
    random_breaks,
)

__all__ = ["Paired", "PlacementFigures", "burned_by", "compare", "draw", "paired", "place", "placements"]

Policy = Callable[[TensorDictBase], TensorDictBase]
RANDOM_PLACEMENTS = 8


@dataclass(frozen=True)
class PlacementFigures:
    """Burned fractions of several placements under the same fires, means over the landscapes."""

    burned: dict[str, float]
    """By name: ``policy``, ``random``, ``column``, ``domirank``, ``betweenness``, ``none``."""
    error: dict[str, float]
    """Standard errors of the fires, with the landscapes and placements taken as given."""
    fires: int
    """Fires of each placement in each landscape."""

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {share:.3f} ± {self.error[name]:.3f}" for name, share in self.burned.items())
        return f"burned: {parts} ({self.fires} fires each)"


class Paired(NamedTuple):
    """How much less burns with one placement than with another, on the same landscapes under the same fires.

    Attributes:
        saved: mean over the landscapes of the difference of burned shares.
        error: its standard error over the landscapes.
        t: the ratio of the two (Student, 1908); beyond 2 hardly chance. Infinite where all differences are equal.
        better: landscapes where the first one burns less.
        landscapes: their number.
    """

    saved: float
    error: float
    t: float
    better: int
    landscapes: int


def burned_by(env: FuelBreaks, breaks: Tensor, *, fires: int = 1024, seed: int = 0) -> Tensor:
    """Burned share float64 ``[L]`` in each landscape of an env under the same fires, all landscapes at once.

    Args:
        env: gives the landscapes.
        breaks: bool ``[L, H, W]``.
        fires: in each landscape, rounded up to a multiple of 64.
        seed: names them.
    """
    count = len(env.burnable())
    number = torch.arange(count, device=env.device)
    groups = -(-fires // 64)
    total = torch.zeros(count, dtype=torch.float64, device=env.device)
    for group in range(groups):
        named = number.new_full((count,), (seed + 1) * 1_000_003 + group)
        total += env.light(breaks, landscape_id=number, seed=named, fires=64).double()
    return total / groups


def paired(first: Tensor, second: Tensor) -> Paired:
    """Compare two results ``[L]`` of :func:`burned_by` landscape by landscape.

    Raises:
        ValueError: for fewer than two landscapes, or different numbers of them.
    """
    if first.shape != second.shape or first.numel() < 2:
        raise ValueError(
            f"expected two results [L] of L >= 2 landscapes, received {list(first.shape)} and {list(second.shape)}. "
            "Remedy: burned_by() of one env."
        )
    saved = (second - first).double()
    mean, error = float(saved.mean()), float(saved.std() / math.sqrt(saved.numel()))
    t = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    return Paired(mean, error, t, int((saved > 0).sum()), saved.numel())


@torch.no_grad()
def place(policy: Policy, env: FuelBreaks) -> Tensor:
    """Let a policy place its breaks in each landscape of an env, without exploration; the env is not changed.

    Args:
        policy: reads breaks, remaining, landscape_id, action_mask, writes action; such as a trainer's.
        env: gives landscapes and budget.

    Returns:
        Breaks, bool ``[L, H, W]``.
    """
    burnable = env.burnable()
    count, device = len(burnable), burnable.device
    breaks = torch.zeros_like(burnable)
    number = torch.arange(count, device=device).unsqueeze(-1)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        for placed in range(env.budget):
            remaining = torch.full((count, 1), (env.budget - placed) / env.budget, dtype=env.dtype, device=device)
            allowed = (burnable & ~breaks).flatten(1)
            seen = {"breaks": breaks, "remaining": remaining, "landscape_id": number, "action_mask": allowed}
            if not env.compact:
                seen["observation"] = env.planes(breaks, remaining, number)
            action = policy(TensorDict(seen, batch_size=[count], device=device)).get("action")
            chosen = torch.arange(allowed.shape[1], device=device) == action.unsqueeze(-1)
            breaks = breaks | (chosen & allowed).view_as(breaks)
    return breaks


def placements(policy: Policy | None, env: FuelBreaks, *, seed: int = 0) -> dict[str, Tensor]:
    """Breaks by name, bool ``[L, H, W]`` each: the policy's, random ones, a column, by DomiRank, by betweenness, none.

    Args:
        policy: as for :func:`place`; None leaves it out.
        env: gives landscapes and budget.
        seed: of the random ones.
    """
    burnable = env.burnable()
    generator = torch.Generator(burnable.device).manual_seed(seed)
    found = {} if policy is None else {"policy": place(policy, env)}
    return found | {
        "random": random_breaks(burnable, env.budget, generator=generator),
        "column": column_breaks(burnable, env.budget),
        "domirank": domirank_breaks(burnable, env.budget, neighbours=env.neighbours),
        "betweenness": betweenness_breaks(burnable, env.budget, neighbours=env.neighbours),
        "none": torch.zeros_like(burnable),
    }


def compare(policy: Policy | None, env: FuelBreaks, *, fires: int = 1024, seed: int = 0) -> PlacementFigures:
    """Light the same fires for each placement in each landscape.

    Args:
        policy: as for :func:`place`; None leaves it out.
        env: gives landscapes and budget.
        fires: of each placement in each landscape, rounded up to a multiple of 64.
        seed: names fires and random placements, of which there are 8 in each landscape.

    Raises:
        ValueError: for fewer than one fire.
    """
    count = len(env.burnable())
    burned: dict[str, float] = {}
    error: dict[str, float] = {}
    lit = fires
    for name, breaks in _several(policy, env, seed).items():
        number = torch.arange(count, device=breaks.device).repeat(len(breaks) // count)
        found = env.assess(breaks, landscape_id=number, fires=fires, seed=seed)
        lit = found.fires
        burned[name] = float(found.burned.mean())
        # placements in one landscape share their fires, those in different ones do not
        shared = found.error.view(-1, count).mean(0)
        error[name] = float(shared.square().sum().sqrt() / count)
    return PlacementFigures(burned, error, lit)


def _several(policy: Policy | None, env: FuelBreaks, seed: int) -> Mapping[str, Tensor]:
    """The placements, the random ones several times ``[8 L, H, W]``."""
    found = placements(policy, env, seed=seed)
    rows = env.burnable().repeat(RANDOM_PLACEMENTS, 1, 1)
    generator = torch.Generator(rows.device).manual_seed(seed)
    return {**found, "random": random_breaks(rows, env.budget, generator=generator)}


def draw(
    policy: Policy | None,
    env: FuelBreaks,
    path: str | Path,
    *,
    landscape_id: int = 0,
    fires: int = 1024,
    seed: int = 0,
) -> Path:
    """Draw the placements of one landscape side by side, and how often each cell burned.

    Args:
        policy: as for :func:`place`; None leaves it out.
        env: gives landscapes and budget.
        path: picture to write.
        landscape_id: which landscape.
        fires: of each placement, rounded up to a multiple of 64.
        seed: names fires and the random placement.

    Returns:
        The path that was written.

    Raises:
        IndexError: for a landscape that the env does not have.
    """
    from torchrl_perf.systems.fuel_breaks.picture import draw_fire_maps, fire_maps

    found = {name: breaks[landscape_id] for name, breaks in placements(policy, env, seed=seed).items()}
    return draw_fire_maps(fire_maps(env, found, landscape_id=landscape_id, fires=fires, seed=seed), path)
