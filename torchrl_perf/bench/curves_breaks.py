"""What placements of all breaks at once are worth on landscapes that were not learnt from, beside rules and search."""

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.runtime import Stopwatch

__all__ = ["unseen_breaks"]

UNSEEN_SEED, UNSEEN, FIRES = 77, 50, 1_024
"""Names the landscapes; their number; fires in each. The seed is none that a preset learns from."""
SEARCH_ROUNDS = 150
REPEATS = 20


def unseen_breaks(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """Burned shares on unseen landscapes of the trainer's kind, each placement beside the column under the same fires.

    By placement: ``burned``, mean over the landscapes; ``saved``, how much less burned than with a column, with its
    ``error`` over the landscapes, ``t`` of the paired test, and ``better``, landscapes with less burned; ``gain``,
    ``saved`` as a share of what the search saves; ``seconds`` that placing in all landscapes took.
    """
    from torchrl_perf.systems.fuel_breaks.evaluation import burned_by

    config = trainer.config
    seed = UNSEEN_SEED if config.landscape_seed != UNSEEN_SEED else UNSEEN_SEED + 1
    task = tuple(getattr(config, field) for field in ("size", "budget", "landscape", "base", "neighbours"))
    env, rules = _rules(task, seed, str(trainer.device))
    trainer.place(env)  # once, so that nothing is loaded within the measured time
    with Stopwatch(trainer.device) as watch:
        for _ in range(REPEATS):
            found = trainer.place(env)
    burned = {"trained": burned_by(env, found, fires=FIRES)} | {who: shares for who, (shares, _) in rules.items()}
    seconds = {"trained": watch.seconds / REPEATS} | {who: spent for who, (_, spent) in rules.items()}
    return {who: _row(who, burned, seconds) for who in burned}


def _row(who: str, burned: dict[str, Tensor], seconds: dict[str, float]) -> dict[str, float]:
    """The figures of one placement."""
    from torchrl_perf.systems.fuel_breaks.evaluation import paired

    row = {"burned": float(burned[who].mean()), "landscapes": float(len(burned[who])), "seconds": seconds[who]}
    if who != "column":
        beside = paired(burned[who], burned["column"])
        best = paired(burned["search"], burned["column"])
        row |= {"saved": beside.saved, "error": beside.error, "t": beside.t, "better": float(beside.better)}
        row["gain"] = beside.saved / best.saved
    return row


@cache
def _rules(task: tuple[Any, ...], seed: int, device: str) -> tuple[Any, dict[str, tuple[Tensor, float]]]:
    """The unseen landscapes, and of each rule the burned shares ``[L]`` and the seconds that it took.

    They are the same for all seeds of a study, and the search takes longest of all.
    """
    from torchrl_perf.envs.fuel_breaks import betweenness_breaks, column_breaks, domirank_breaks, random_breaks
    from torchrl_perf.systems.fuel_breaks.evaluation import burned_by
    from torchrl_perf.systems.fuel_breaks.one_shot_config import FuelBreaksOneShotConfig
    from torchrl_perf.systems.fuel_breaks.one_shot_trainer import make_one_shot_env

    size, budget, landscape, base, neighbours = task
    varied = landscape != "uniform"
    config = dataclasses.replace(
        FuelBreaksOneShotConfig(),
        **{"num_envs": 1, "size": size, "budget": budget, "landscape": landscape, "base": base},
        **{"neighbours": neighbours, "landscapes": UNSEEN if varied else 1, "landscape_seed": seed if varied else 0},
    )
    env = make_one_shot_env(config, device, observation="compact")
    fuel, count = env.burnable(), env.budget
    generator = torch.Generator(fuel.device).manual_seed(seed)
    rules = {
        "none": lambda: torch.zeros_like(fuel),
        "random": lambda: random_breaks(fuel, count, generator=generator),
        "column": lambda: column_breaks(fuel, count),
        "domirank": lambda: domirank_breaks(fuel, count, neighbours=neighbours),
        "betweenness": lambda: betweenness_breaks(fuel, count, neighbours=neighbours),
        "betweenness, anew": lambda: betweenness_breaks(fuel, count, neighbours=neighbours, anew=True),
        "search": lambda: env.search(rounds=SEARCH_ROUNDS),
    }
    found = {}
    for who, rule in rules.items():
        with Stopwatch(device) as watch:
            breaks = rule()
        found[who] = burned_by(env, breaks, fires=FIRES), watch.seconds
    return env, found
