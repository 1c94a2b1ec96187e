"""The envs of a finished run, made again: as they were, or with other settings or arguments."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium
from torch import nn
from torchrl.envs import EnvBase

from torchrl_perf.collectors import HostCollector
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.trainers.evaluation import CHUNK, MakeCollector, collector_of, host_collector_of
from torchrl_perf.trainers.policies import SavedRun
from torchrl_perf.trainers.run.saved_specs import plain_specs

__all__ = ["collector_for", "env_for", "gymnasium_id"]


def collector_for(
    run: SavedRun,
    rows: int,
    *,
    seed: int,
    changes: Mapping[str, Any] | None = None,
    steps: int = CHUNK,
    **rendering: Any,
) -> MakeCollector:
    """Makes a collector of the envs of a run, for an :class:`~torchrl_perf.trainers.evaluation.Evaluation`.

    Args:
        run: gives the env.
        rows: number of envs.
        seed: of envs on the host.
        changes: as for :func:`env_for`.
        steps: T of its batches.
        **rendering: further arguments of ``gymnasium.make``, for its envs alone.

    Raises:
        ValueError: for an env that came from Python and is none of Gymnasium's, and unknown names of changes.
    """
    name = gymnasium_id(run)
    if name is None:
        env = env_for(run, rows, seed=seed, changes=changes)
        return collector_of(env, "auto" if run.device.type == "cuda" else "eager", steps=steps)
    arguments = {**_kept_arguments(run), **dict(changes or {}), **rendering}
    make = host_collector_of(name, rows, seed=seed, device=run.device, steps=steps, **arguments)

    def checked(policy: nn.Module) -> HostCollector:
        try:
            collector = make(policy)
        except TypeError as error:
            raise ValueError(
                f"variant: expected arguments of {name}, received {dict(changes or {})} ({error}). Remedy: names that "
                "its page in Gymnasium's documentation lists."
            ) from None
        if (received := plain_specs(collector.specs)) != run.plain_specs:
            collector.shutdown()
            raise ValueError(
                f"{run.path}: expected the observations and actions of {name} to be those of the run, "
                f"{run.plain_specs}, received {received}: the run had wrappers around it. Remedy: from Python, "
                "evaluate_episodes or Evaluation(host_collector(envs, ...), ...) with the same ones."
            )
        return collector

    return checked


def env_for(run: SavedRun, rows: int, *, seed: int, changes: Mapping[str, Any] | None = None) -> EnvBase:
    """The env of a run in tensors, with ``rows`` rows.

    Args:
        run: gives settings, and with them the env.
        rows: number of envs.
        seed: of what the env draws when it is made; the rest of the program's random numbers are left alone.
        changes: settings of the run by name, and arguments of the env's class, in place of its own.

    Raises:
        ValueError: for an env that came from Python, and unknown names of changes.
    """
    if run.given:
        raise ValueError(
            f"{run.path}: expected a run whose env follows from its settings or is one of Gymnasium's, received one of "
            f"the env {run.env}, which came from Python. Remedy: from Python, "
            f"evaluate_episodes(load_policy({str(run.path)!r}), {run.env}(...))."
        )
    changes, config = dict(changes or {}), run.config
    settings = {name: changes.pop(name) for name in list(changes) if name in _world_settings(config)}
    if settings:
        config = type(config).from_dict({**config.to_dict(), **settings})
    try:
        with seeded(seed, run.device):
            return run.blueprint.env(config.for_rows(rows), run.device, **changes)
    except TypeError as error:
        if not changes:
            raise
        known = ", ".join(sorted(_world_settings(config))) or "none"
        raise ValueError(
            f"variant: expected settings of the run's world ({known}) or arguments of {run.env}, received "
            f"{', '.join(changes)} ({error}). Remedy: one of these names, such as max_episode_steps=1000."
        ) from None


def gymnasium_id(run: SavedRun) -> str | None:
    """The id of the Gymnasium env that a run was made on; None for other envs."""
    # the folder of a run carries ALE/Pong-v5 as ALE-Pong-v5
    known = {spec.replace("/", "-"): spec for spec in gymnasium.registry}
    return known.get(run.env)


def _kept_arguments(run: SavedRun) -> dict[str, Any]:
    """What a Gymnasium env was made with, as far as it is plain."""
    prefix, end = "make(", ")"
    return {
        name.removeprefix(prefix).removesuffix(end): value
        for name, value in run.arguments.items()
        if name.startswith(prefix)
        and isinstance(value, bool | int | float | str)
        and name not in ("make(num_envs)", "make(vectorization_mode)")
    }


def _world_settings(config: Any) -> set[str]:
    """Settings that a system's own classes declare, those of its world among them; none of the other algorithms."""
    own = [base for base in type(config).__mro__ if base.__module__.startswith("torchrl_perf.systems.")]
    declared = {name for base in own for name in inspect.get_annotations(base)}
    return declared & {field.name for field in dataclasses.fields(config)}
