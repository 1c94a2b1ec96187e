"""From an elevation raster of your own to proposed fuel breaks, with how often each cell burns before and after.

Run it with ``python examples/own_landscape.py``; ``--help`` lists the settings. Without ``--elevation`` the raster is
that of the Jacksboro fault in Tennessee, which comes with matplotlib. It takes about a minute on a CPU core. Expected
last lines, give or take:

    none 0.095   random 0.077   column 0.061   search 0.051
    picture: own_landscape.png

Where you have vegetation, density and wind as rasters, pass them to ``Landscape.from_arrays`` in the place of what this
example makes of the height. A model of spreading fire is no forecast: what it leaves out is in docs/systems.md.

Read it from top to bottom: Config, elevation_of, landscape_of, main.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape, column_breaks, random_breaks
from torchrl_perf.systems.fuel_breaks import draw_fire_maps, fire_maps


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    elevation: str = ""
    """A .npy file of metres [H, W], row 0 the northern edge; "" for the raster of matplotlib."""
    size: int = 32
    """Rows and columns that are cut out of its middle."""
    cell_size: float = 90.0
    """Side of a cell, metres."""
    wind: tuple[float, float] = (4.0, 2.0)
    """Its velocity towards east and north, m/s."""
    base: float = 0.35
    """Probability that fire passes from a cell to the next on flat ground without wind."""
    breaks: int = 32
    """Cells to clear."""
    rounds: int = 150
    """Rounds of the search."""
    fires: int = 1024
    """Fires by which each placement is judged in the end."""
    picture: Path = Path("own_landscape.png")
    """Where the maps go."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where fires burn."""


def elevation_of(config: Config) -> np.ndarray:
    """Metres ``[size, size]``."""
    if config.elevation:
        heights = np.load(config.elevation)
    else:
        from matplotlib.cbook import get_sample_data

        heights = get_sample_data("jacksboro_fault_dem.npz")["elevation"]
    rows, columns = ((side - config.size) // 2 for side in heights.shape)
    return heights[rows : rows + config.size, columns : columns + config.size].astype(float)


def landscape_of(elevation: np.ndarray, config: Config) -> Landscape:
    """Fields in the lowest third, pines in the highest, thicket between; bare ground along the lowest hundredth."""
    low, third, high = np.quantile(elevation, (0.01, 1 / 3, 2 / 3))
    vegetation = np.select([elevation < third, elevation < high], [-0.3, 0.0], 0.4)
    return Landscape.from_arrays(
        elevation,
        vegetation,
        wind=config.wind,
        burnable=elevation > low,
        base=config.base,
        cell_size=config.cell_size,
    )


def main(config: Config) -> dict[str, float]:
    """Searches, judges and draws; returns the burned shares by placement."""
    env = FuelBreaks(
        1, landscape=landscape_of(elevation_of(config), config), budget=config.breaks, device=config.device
    )
    ground = env.burnable()
    placements = {
        "none": torch.zeros_like(ground),
        "random": random_breaks(ground, env.budget),
        "column": column_breaks(ground, env.budget),
        "search": env.search(rounds=config.rounds),
    }
    maps = fire_maps(env, placements, fires=config.fires)
    print("   ".join(f"{part.name} {part.burned:.3f}" for part in maps))
    print(f"picture: {draw_fire_maps(maps, config.picture)}")
    return {part.name: part.burned for part in maps}


if __name__ == "__main__":
    main(tyro.cli(Config))
