"""Names of the metrics in a trainer's rows, so that an unknown one is refused before a run."""

from collections.abc import Iterable
from typing import Any

from torchrl_perf.near_names import nearest_word

__all__ = ["known_metrics", "unknown_metric"]

EPISODES = ("episode/mean_return", "episode/mean_length", "episode/count")
EVERY = (*EPISODES, "train/first_bad_iteration", "train/micro_batches", "train/updates_applied")
EVALUATION = ("eval/mean_return", "eval/return_deviation", "eval/mean_length")
LOOP = ("time/steps_per_second", "time/experiences_per_second", "time/total_seconds")
FAMILIES = ("nonfinite/", "time/", "memory/", "gpu/", "component/", "option/usage_", "train/kl_", "env/")
"""Beginnings of names that depend on the run: its parts, its device, its env's entries."""


def known_metrics(trainer: Any) -> list[str]:
    """Names that the rows of a trainer may have, those of :data:`FAMILIES` left out; those it has so far come first.

    A trainer says those of its own in ``metric_names``.
    """
    names = [*getattr(trainer.metrics, "names", ()), *EVERY, *LOOP]
    names += [f"train/{name}" for name in getattr(trainer, "statistics", ())]
    names += getattr(trainer, "metric_names", ())
    config = getattr(trainer, "config", None)
    names += [config.evaluated_by, *EVALUATION] if getattr(config, "eval_interval", 0) else []
    names += [f"episode/{outcome}" for outcome in getattr(trainer.env, "outcomes", ())[1:]]
    return list(dict.fromkeys(names))


def unknown_metric(name: str, known: Iterable[str]) -> str:
    """What is wrong with the name of a metric, or an empty text.

    Args:
        name: of a metric; a leading "-" and an empty text are passed.
        known: names that there are, beside :data:`FAMILIES`.
    """
    plain, known = name.removeprefix("-"), list(known)
    if not plain or plain in known or plain.startswith(FAMILIES):
        return ""
    near = nearest_word(plain, known)
    sign = "-" if name.startswith("-") else ""
    remedy = f"best_metric={sign + near!r}, the nearest" if near else f"best_metric={sign + EPISODES[0]!r}"
    return (
        f"best_metric: expected one of the run's metrics, {', '.join(sorted(known))} (with a leading '-' for the "
        f"lowest), received {name!r}. Remedy: {remedy}; '' keeps no best checkpoint."
    )
