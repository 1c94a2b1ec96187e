"""The landscapes that a run's settings name."""

from typing import Any

from torchrl_perf.envs.fuel_breaks import Landscape

__all__ = ["make_ground"]


def make_ground(config: Any) -> Landscape:
    """Landscapes of a run: one that is the same everywhere, or generated ones.

    Args:
        config: with ``landscape``, ``size``, ``base``, ``landscape_seed`` and ``landscapes``.
    """
    if config.landscape == "uniform":
        return Landscape.uniform(config.base, config.size)
    make = Landscape.varied if config.landscape == "varied" else Landscape.fractal
    return make(config.landscape_seed, config.size, count=config.landscapes, base=config.base)
