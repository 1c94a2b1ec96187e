"""Pictures of fuel breaks in their landscape, and of where fires burn despite them.

Dimension key: ``N`` envs, ``H``, ``W`` cells.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_perf.metrics.figure import new_figure, save_figure

if TYPE_CHECKING:
    from torchrl_perf.envs.fuel_breaks import FuelBreaks

__all__ = ["FireMap", "draw_fire_maps", "fire_maps", "record_breaks"]

BREAK_COLOR = "#2166ac"
BARE_COLOR = "0.75"


@dataclass(frozen=True)
class FireMap:
    """One placement and its fires, on the host.

    Attributes:
        name: of the placement.
        breaks: bool ``[H, W]``.
        burnable: bool ``[H, W]``.
        fuel: ignition probability on flat ground without wind ``[H, W]``.
        elevation: hundreds of metres above the mean ``[H, W]``.
        wind: mean velocity of the wind towards east and north, m/s.
        probability: share of the fires that burned each cell ``[H, W]``.
        burned: mean share of all cells that burned.
        error: its standard error.
        fires: number of fires.
    """

    name: str
    breaks: Tensor
    burnable: Tensor
    fuel: Tensor
    elevation: Tensor
    wind: tuple[float, float]
    probability: Tensor
    burned: float
    error: float
    fires: int


def record_breaks(
    env: FuelBreaks, policy: Callable[[TensorDictBase], TensorDictBase] | None = None
) -> tuple[Tensor, Tensor]:
    """Reset an env, let a policy act for one episode, and return the breaks that it has placed in each row.

    Args:
        env: its rows are reset, so do not pass the env that a run collects from.
        policy: writes the action, under the exploration type of the caller; allowed actions at random by default.

    Returns:
        Breaks bool ``[N, H, W]`` and landscape_id int64 ``[N, 1]``, on the env's device.
    """
    act = env.rand_action if policy is None else policy
    with torch.no_grad():
        root = env.reset()
        stepped = root
        for _ in range(env.budget if env.mode == "sequential" else 1):
            stepped, root = env.step_and_maybe_reset(act(root))
    following = stepped.get("next")
    return following.get("breaks"), following.get("landscape_id")


def fire_maps(
    env: FuelBreaks, placements: Mapping[str, Tensor], *, landscape_id: int = 0, fires: int = 1024, seed: int = 0
) -> list[FireMap]:
    """Light the same fires for each of several placements in one landscape.

    Args:
        env: has the landscapes.
        placements: breaks by name, bool ``[H, W]`` or ``[1, H, W]``.
        landscape_id: which landscape.
        fires: how many, rounded up to a multiple of 64.
        seed: names the fires.

    Returns:
        A map of each placement, in their order.

    Raises:
        IndexError: for a landscape that the env does not have.
        ValueError: for no placement, or breaks of another size.
    """
    if not 0 <= landscape_id < len(env.landscape):
        raise IndexError(
            f"landscape_id: expected one of the env's {len(env.landscape)}, received {landscape_id}. Remedy: "
            "landscape_id=0, for example."
        )
    grid = (env.height, env.width)
    for name, breaks in placements.items():
        if tuple(breaks.shape) not in (grid, (1, *grid)):
            raise ValueError(
                f"placements[{name!r}]: expected breaks {list(grid)}, received {list(breaks.shape)}. Remedy: breaks "
                "[H, W] of that landscape."
            )
    if not placements:
        raise ValueError(
            "placements: expected at least one, received none. Remedy: a mapping of names to breaks [H, W]."
        )
    stacked = torch.stack([breaks.reshape(grid) for breaks in placements.values()]).to(env.device, torch.bool)
    number = torch.full((len(stacked),), landscape_id, dtype=torch.int64, device=env.device)
    found = env.assess(stacked, landscape_id=number, fires=fires, seed=seed)
    planes = dict(zip(env.plane_names, env.landscape[landscape_id].double().cpu(), strict=False))
    burnable = env.burnable()[landscape_id].cpu()
    wind = (10.0 * float(planes["wind_east"].mean()), 10.0 * float(planes["wind_north"].mean()))
    burned, error, probability = found.burned.tolist(), found.error.tolist(), found.probability.cpu()
    return [
        FireMap(
            name=name,
            breaks=stacked[row].cpu(),
            burnable=burnable,
            fuel=planes["fuel"],
            elevation=planes["elevation"],
            wind=wind,
            probability=probability[row],
            burned=burned[row],
            error=error[row],
            fires=found.fires,
        )
        for row, name in enumerate(placements)
    ]


def draw_fire_maps(maps: Sequence[FireMap], path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Draw placements side by side: above the breaks in the landscape, below how often each cell burned; save it.

    Breaks are blue, cells without fuel grey; lines are contours of the terrain, the arrow is the wind. Where one of the
    maps has no breaks, a third row shows by how much the others change the burn probability of each cell.

    Args:
        maps: of :func:`fire_maps`, of one landscape.
        path: picture to write; the suffix gives the format, for example ``.png``.
        title: heading; the number of fires by default.

    Returns:
        The path that was written.

    Raises:
        ValueError: for no map.
    """
    if not maps:
        raise ValueError("maps: expected at least one, received none. Remedy: a mapping of names to maps [H, W].")
    height, width = maps[0].breaks.shape
    side = 2.9
    before = next((part for part in maps if not part.breaks.any()), None)
    rows = 2 if before is None or len(maps) == 1 else 3
    figure = new_figure(side * len(maps) + 1.0, rows * side * min(1.6, height / width) + 0.9)
    panels = figure.subplots(rows, len(maps), squeeze=False)
    most = max(float(part.fuel.max()) for part in maps)
    grounds = [_draw_ground(axes, part, most) for axes, part in zip(panels[0], maps, strict=True)]
    worst = max(float(part.probability.max()) for part in maps)
    burns = [_draw_burned(axes, part, worst) for axes, part in zip(panels[1], maps, strict=True)]
    figure.colorbar(grounds[0], ax=list(panels[0]), label="ignition probability, flat and calm")
    figure.colorbar(burns[0], ax=list(panels[1]), label="burn probability")
    if before is not None and rows == 3:
        changes = [_draw_change(axes, part, before) for axes, part in zip(panels[2], maps, strict=True)]
        figure.colorbar(changes[0], ax=list(panels[2]), label="change by the breaks")
    figure.suptitle(title if title is not None else f"{maps[0].fires} fires in each landscape")
    return save_figure(figure, path)


def _draw_ground(axes: Any, part: FireMap, most: float) -> Any:
    """The landscape, its terrain and wind, and the breaks."""
    ground = part.fuel.clone().masked_fill(~part.burnable, torch.nan)
    image = axes.imshow(ground.numpy(), cmap="YlGn", vmin=0.0, vmax=max(most, 1e-6) * 1.25)
    axes.set_facecolor(BARE_COLOR)
    if float(part.elevation.max() - part.elevation.min()) > 0 and min(part.elevation.shape) > 1:
        axes.contour(part.elevation.numpy(), levels=6, colors="0.35", linewidths=0.6)
    _mark_breaks(axes, part, filled=True)
    if any(part.wind):
        east, north = part.wind
        speed = (east**2 + north**2) ** 0.5
        way = (0.12 * east / speed, 0.12 * north / speed)
        axes.annotate(
            "",
            xy=(0.15 + way[0], 0.85 + way[1]),
            xytext=(0.15 - way[0], 0.85 - way[1]),
            xycoords="axes fraction",
            arrowprops={"arrowstyle": "-|>", "linewidth": 1.8, "color": "black"},
        )
    axes.set_title(f"{part.name}: {int(part.breaks.sum())} breaks", fontsize="medium")
    axes.set(xticks=[], yticks=[])
    return image


def _draw_burned(axes: Any, part: FireMap, worst: float) -> Any:
    """How often each cell burned, and the frames of the breaks."""
    share = part.probability.clone().masked_fill(~part.burnable, torch.nan)
    image = axes.imshow(share.numpy(), cmap="inferno", vmin=0.0, vmax=max(worst, 1e-6))
    axes.set_facecolor(BARE_COLOR)
    _mark_breaks(axes, part, filled=False)
    axes.set_title(f"burned {part.burned:.3f} ± {part.error:.3f}", fontsize="medium")
    axes.set(xticks=[], yticks=[])
    return image


def _draw_change(axes: Any, part: FireMap, before: FireMap) -> Any:
    """By how much the breaks change how often each cell burns: blue is saved."""
    change = (part.probability - before.probability).masked_fill(~part.burnable, torch.nan)
    most = max(float(before.probability.max()), 1e-6)
    image = axes.imshow(change.numpy(), cmap="RdBu_r", vmin=-most, vmax=most)
    axes.set_facecolor(BARE_COLOR)
    _mark_breaks(axes, part, filled=False)
    axes.set_title(f"saved {before.burned - part.burned:.3f}", fontsize="medium")
    axes.set(xticks=[], yticks=[])
    return image


def _mark_breaks(axes: Any, part: FireMap, *, filled: bool) -> None:
    """A square on each break."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    squares = [Rectangle((column - 0.5, row - 0.5), 1.0, 1.0) for row, column in part.breaks.nonzero().tolist()]
    color = BREAK_COLOR if filled else "none"
    axes.add_collection(PatchCollection(squares, facecolor=color, edgecolor=BREAK_COLOR, linewidth=0.8))
