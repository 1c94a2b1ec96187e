"""The fire breaks that a run's settings name: landscapes, budget and fires."""

from typing import Any

import torch

from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape

__all__ = ["make_breaks"]


def _ground(config: Any) -> Landscape:
    if config.landscape == "uniform":
        return Landscape.uniform(config.base, config.size)
    make = Landscape.varied if config.landscape == "varied" else Landscape.fractal
    return make(config.landscape_seed, config.size, count=config.landscapes, base=config.base)


def make_breaks(config: Any, device: torch.device | str, **options: Any) -> FuelBreaks:
    """The env of settings that every kind of run has.

    Args:
        config: with ``num_envs``, ``landscape``, ``size``, ``base``, ``landscape_seed``, ``landscapes``, ``cells``,
            ``fires`` and ``neighbours``.
        device: of everything.
        **options: further arguments of :class:`~torchrl_perf.envs.fuel_breaks.FuelBreaks`, or others in place of these.

    Raises:
        ValueError: for a budget above the burnable cells.
    """
    arguments: dict[str, Any] = {
        "num_envs": config.num_envs,
        "landscape": _ground(config),
        "budget": config.cells,
        "fires": config.fires,
        "neighbours": config.neighbours,
        "device": device,
    }
    return FuelBreaks(**{**arguments, **options})
