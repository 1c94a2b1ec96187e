"""Placement of fuel breaks against simulated wildfires."""

from torchrl_perf.envs.fuel_breaks.assess import Assessment, assess
from torchrl_perf.envs.fuel_breaks.betweenness import betweenness
from torchrl_perf.envs.fuel_breaks.domirank import domirank, fuel_graph
from torchrl_perf.envs.fuel_breaks.env import FireOptions, FuelBreaks
from torchrl_perf.envs.fuel_breaks.landscape import DENSITY, PLANES, VEGETATION, Landscape
from torchrl_perf.envs.fuel_breaks.placements import (
    betweenness_breaks,
    column_breaks,
    cross_breaks,
    domirank_breaks,
    first_cells,
    random_breaks,
)
from torchrl_perf.envs.fuel_breaks.search import swap_search

__all__ = [
    "DENSITY",
    "PLANES",
    "VEGETATION",
    "Assessment",
    "FireOptions",
    "FuelBreaks",
    "Landscape",
    "assess",
    "betweenness",
    "betweenness_breaks",
    "column_breaks",
    "cross_breaks",
    "domirank",
    "domirank_breaks",
    "first_cells",
    "fuel_graph",
    "random_breaks",
    "swap_search",
]
