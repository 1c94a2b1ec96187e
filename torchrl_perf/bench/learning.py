"""Wall time until a trainer has learnt, without compilation and capture."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from torchrl_perf.runtime import Stopwatch, synchronize

MOST_POINTS = 100
Value = TypeVar("Value")


def time_to_return(trainer: Any, target: float, *, warmup: int, every: int) -> dict[str, Any]:
    """Trains until the last 100 finished episodes have a mean return of ``target``; closes the trainer.

    Args:
        trainer: a trainer that has taken no step.
        target: mean return.
        warmup: steps that compile and record; the state before them is restored.
        every: steps between two reads of the return, each of which waits for the device.

    Returns:
        What :func:`learn` does but for the curve, and ``start_s``, the seconds of the warm-up.
    """
    initial = trainer.state_dict()
    start_s = warm_up(trainer, warmup)
    trainer.load_state_dict(initial)
    row = learn(trainer, target, every=every)
    trainer.close()
    del row["curve"]
    return {**row, "start_s": start_s}


def warm_up(trainer: Any, steps: int) -> float:
    """Takes the steps that compile and record; returns their seconds."""
    start = Stopwatch("cpu").start()
    for _ in range(steps):
        trainer.step()
    synchronize(trainer.device)
    start.stop()
    return start.seconds


def learn(trainer: Any, target: float, *, every: int, limit: float = math.inf) -> dict[str, Any]:
    """Trains until the last 100 finished episodes have a mean return of ``target``.

    Args:
        trainer: a trainer that is warm, with the state of one that has taken no step.
        target: mean return.
        every: steps between two reads of the return, each of which waits for the device.
        limit: seconds after which it has not learnt.

    Returns:
        ``seconds`` (None if the run ended, or the limit came, before), ``steps`` of the envs, ``mean_return``, and
        ``curve``, pairs of steps and mean return.
    """
    config = trainer.config
    watch = Stopwatch("cpu").start()
    reached, curve = -math.inf, []
    for done in range(1, config.iterations + 1):
        trainer.step()
        if done % every and done < config.iterations:
            continue
        reached = float(trainer.episodes.mean_return)
        watch.stop()
        curve.append([done * config.batch_size, reached])
        if reached >= target or watch.seconds > limit:
            break
    seconds = watch.seconds if reached >= target else None
    return {"seconds": seconds, "steps": done * config.batch_size, "mean_return": reached, "curve": thinned(curve)}


def thinned(points: Sequence[Value]) -> list[Value]:
    """At most ``MOST_POINTS`` of the points at equal distances, the last one among them."""
    stride = max(1, math.ceil(len(points) / MOST_POINTS))
    return list(points)[::-1][::stride][::-1]
