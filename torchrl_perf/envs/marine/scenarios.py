"""Whether the layouts of a curriculum have room, and given worlds for evaluation.

Dimension key: ``E`` worlds, ``R`` robots, ``O`` obstacles, ``C`` vortex cores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_perf.envs.marine.curriculum import Curriculum, Stage
from torchrl_perf.envs.marine.layouts import Contents, Layout, draw_layout
from torchrl_perf.envs.marine.vehicle import VEHICLE_RADIUS

__all__ = ["check_room", "fit_layout", "scenario_set"]

_TRIALS = 32
_LEAST_SHARE = 0.5


def scenario_set(
    seed: int, count: int, *, robots: int = 5, obstacles: int = 4, cores: int = 0, distance: float = 40.0
) -> Layout:
    """Layouts that depend on the arguments alone, for evaluation: the same for every device.

    Args:
        seed: of a separate generator; the default one is left alone.
        count: E, number of layouts.
        robots: of each.
        obstacles: of each.
        cores: of each, vortices.
        distance: least distance from start to goal, metres.

    Returns:
        A layout as :func:`draw_layout` makes it, on the CPU, float32, for :meth:`MarineNavigation.load_layout`.
    """
    return _trial(seed, count, Stage(robots, obstacles, cores, distance))[0]


def check_room(curriculum: Curriculum, candidates: int) -> None:
    """Raise ValueError if most worlds of a stage cannot hold its contents at the distances asked for."""
    for number, stage in enumerate(curriculum.stages):
        if stage in curriculum.stages[:number]:
            continue
        miss = _trial(0, _TRIALS, stage, candidates)[1]
        share = float((miss <= 0).double().mean())
        if share < _LEAST_SHARE:
            raise ValueError(
                f"MarineNavigation expected worlds of 55 m that hold stage {number} ({stage}), received {share:.0%} of "
                f"{_TRIALS} trials that leave every robot a free start and goal. Remedy: take fewer robots or "
                "obstacles, a shorter distance, or more candidates."
            )


def fit_layout(layout: Layout, sizes: tuple[int, int, int, int]) -> Layout:
    """Return a layout with masked robots, obstacles and vortices added up to ``sizes`` E, R, O, C.

    Raises:
        KeyError, ValueError: see :meth:`MarineNavigation.load_layout`.
    """
    worlds, robots, obstacles, cores = sizes
    want = {"position": robots, "goal": robots, "heading": robots, "active": robots, "obstacles": obstacles}
    want = {**want, "cores": cores, "num_obstacles": None, "num_cores": None}
    missing = sorted(set(want) - set(layout))
    if missing:
        raise KeyError(
            f"load_layout expected the entries {sorted(want)}, received {sorted(layout)}. Remedy: add {missing}."
        )
    fitted: Layout = {}
    for name, most in want.items():
        value = layout[name]
        if value.shape[0] != worlds or (most is not None and value.shape[1] > most):
            raise ValueError(
                f"load_layout expected {name!r} [{worlds}{'' if most is None else f', up to {most}'}, ...], received "
                f"{list(value.shape)}. Remedy: make one layout for each env, and an env with room for what it holds."
            )
        fitted[name] = value if most is None else _padded(value, most)
    gap = (fitted["position"].unsqueeze(2) - fitted["obstacles"][..., :2].unsqueeze(1)).square().sum(-1).sqrt()
    there = torch.arange(obstacles, device=gap.device) < fitted["num_obstacles"].unsqueeze(-1)
    inside = gap <= fitted["obstacles"][..., 2].unsqueeze(1) + VEHICLE_RADIUS
    if bool((inside & there.unsqueeze(1) & fitted["active"].unsqueeze(-1)).any()):
        raise ValueError(
            "load_layout expected starts free of obstacles, received one inside. Remedy: move it or the obstacle."
        )
    return fitted


def _padded(value: Tensor, size: int) -> Tensor:
    """``[E, n, *]`` filled up with zeros to ``[E, size, *]``."""
    return torch.cat((value, value.new_zeros(value.shape[0], size - value.shape[1], *value.shape[2:])), 1)


def _trial(seed: int, worlds: int, stage: Stage, *candidates: int) -> tuple[Layout, Tensor]:
    """Layouts drawn from a separate generator, and the shortfall of each."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cpu")

    numbers = (torch.tensor(n, device="cpu") for n in (stage.robots, stage.obstacles, stage.cores, stage.distance))
    sizes = (worlds, stage.robots, stage.obstacles, stage.cores)
    with torch.device("cpu"):
        return draw_layout(uniform, Contents(*numbers), sizes, *candidates)
