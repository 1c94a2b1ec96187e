"""The envs of a finished run, made again: as they were, or with other settings or arguments."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from torchrl_perf.envs.registry import takes_render_mode
from torchrl_perf.runtime.seeds import seeded
from torchrl_perf.trainers.evaluation import Episodes, Evaluation
from torchrl_perf.trainers.mujoco_c import names_in_c, task_in_c
from torchrl_perf.trainers.policies import LoadedPolicy, SavedRun
from torchrl_perf.trainers.run.saved_specs import plain_specs
from torchrl_perf.trainers.sources import Source, gymnasium_source, source_of
from torchrl_perf.trainers.tasks import fitting_rows

__all__ = ["evaluate_run", "gymnasium_id", "source_for"]

BOUNDS = ("low", "high")


def source_for(
    run: SavedRun, rows: int, *, seed: int, changes: Mapping[str, Any] | None = None, drawn: bool = False
) -> Source:
    """The envs of a run, for an :class:`~torchrl_perf.trainers.evaluation.Evaluation`.

    A policy that learnt on MuJoCo Warp is judged in MuJoCo's own C code, Gymnasium's env of the task; only with changes
    that Gymnasium does not know is it MuJoCo Warp's.

    Args:
        run: gives settings, and with them the envs.
        rows: number of envs; rounded up where a row is an agent of several.
        seed: of what an env in tensors draws when it is made; the rest of the program's random numbers are left alone.
        changes: settings of a system's run by name, and arguments of the env, in place of its own.
        drawn: whether Gymnasium's envs are asked for pictures.

    Raises:
        ValueError: for an env that came from Python and is none of Gymnasium's, unknown names of changes, and an env
            that no longer has the observations and actions of the run.
        ImportError: for an env whose package is absent.
    """
    changes = dict(changes or {})
    if (name := task_in_c(run.robot)) and changes.keys() <= names_in_c(run.robot):
        arguments = {**run.arguments.get("settings", {}), **changes}
        pictures = {"render_mode": "rgb_array"} if drawn else {}
        return gymnasium_source(name, rows, run.device, **arguments, **pictures)
    source = _given(run, rows, changes, drawn) if run.given else _named(run, rows, seed, changes, drawn)
    with source.closed_on_error():
        _check_specs(run, source)
    return source


def evaluate_run(
    run: SavedRun,
    policy: LoadedPolicy,
    rows: int,
    *,
    seed: int,
    changes: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
) -> Episodes:
    """Whole episodes of a finished run's policy, without exploration, in envs like its own.

    Args:
        run: gives settings, and with them the envs.
        policy: of the run, on its device.
        rows: number of envs, each for one episode; rounded up where a row is an agent of several.
        seed: of the envs.
        changes: as for :func:`source_for`.
        max_steps: greatest length of an episode; by default the envs' limit, or 1,000 where they have none.

    Raises:
        ValueError: as for :func:`source_for`.
        ImportError: for an env whose package is absent.
    """
    source = source_for(run, rows, seed=seed, changes=changes)
    evaluation = Evaluation(source, policy, seed=seed, max_steps=max_steps, acceleration=policy.acceleration)
    try:
        return evaluation.run()
    finally:
        evaluation.close()


def _named(run: SavedRun, rows: int, seed: int, changes: dict[str, Any], drawn: bool) -> Source:
    """Envs that the settings of a run make."""
    config = run.config
    settings = {name: changes.pop(name) for name in list(changes) if name in _world_settings(config)}
    if settings:
        config = type(config).from_dict({**config.to_dict(), **settings})
    asked = drawn and not config.env_class and takes_render_mode(config.env)
    rows, pictures = fitting_rows(config, rows), {"render_mode": "rgb_array"} if asked else {}
    try:
        with seeded(seed, run.device):
            made = run.blueprint.env(config.for_rows(rows), run.device, **changes, **pictures)
            return source_of(made, rows, run.device)
    except (TypeError, ValueError) as error:
        if not changes:
            raise
        raise ValueError(_refused(run, changes, error)) from error


def _given(run: SavedRun, rows: int, changes: dict[str, Any], drawn: bool) -> Source:
    """Envs like those that a run was given, where Gymnasium can make them."""
    name = gymnasium_id(run)
    if name is None:
        raise ValueError(
            f"{run.path}: expected a run whose env follows from its settings or is one of Gymnasium's, received one of "
            f"the env {run.env}, which came from Python. Remedy: from Python, "
            f"evaluate_episodes(load_policy({str(run.path)!r}), {run.env}(...))."
        )
    pictures = {"render_mode": "rgb_array"} if drawn else {}
    try:
        return gymnasium_source(name, rows, run.device, **{**_kept_arguments(run), **changes, **pictures})
    except TypeError as error:
        raise ValueError(_refused(run, changes, error)) from error


def _refused(run: SavedRun, changes: Mapping[str, Any], error: Exception) -> str:
    """What is wrong with the arguments of a variant."""
    world = ", ".join(sorted(_world_settings(run.config)))
    settings = f"settings of the run's world ({world}) or " if world else ""
    pairs = ", ".join(f"{name}={value}" for name, value in changes.items())
    found = str(error).removeprefix("env_args: ")
    return (
        f"variant: expected {settings}arguments of {run.env}, received {pairs} ({found.rstrip('.')}). "
        "Remedy: one of these names, such as max_episode_steps=1000."
    )


def _check_specs(run: SavedRun, source: Source) -> None:
    """Refuse envs whose observations or actions are not those that the policy was made for."""
    found, wanted = (_entries(specs, bounds=run.given) for specs in (plain_specs(source.specs), run.plain_specs))
    # an env may have more: the state of a filter, say
    differing = [key for key in wanted if found.get(key) != wanted[key]]
    if differing:
        pairs = ", ".join(f"{key} {wanted[key]}" for key in differing)
        other = ", ".join(f"{key} {found.get(key, 'absent')}" for key in differing)
        why = "the run had wrappers around it" if run.given else "it is another variant, or has been changed since"
        remedy = "from Python, evaluate_episodes(policy, envs) with the same ones" if run.given else "the run's own"
        raise ValueError(
            f"{run.path}: expected {run.env} to have the observations and actions of the run, {pairs}, received "
            f"{other}: {why}. Remedy: {remedy}."
        )


def _entries(specs: Mapping[str, Any], *, bounds: bool) -> dict[str, str]:
    """Plain specs in words, by key; without the bounds, which may be a variant's, if these do not count."""
    found = {}
    for entry in (each for part in specs.values() for each in part):
        rest = [f"{name}={value}" for name, value in entry.items() if name in ("sizes", *(BOUNDS if bounds else ()))]
        words = " ".join([entry["kind"], str(entry["shape"]), entry["dtype"].removeprefix("torch."), *rest])
        found[".".join(entry["key"])] = words
    return found


def gymnasium_id(run: SavedRun) -> str | None:
    """The id of the Gymnasium env that a run was made on; None for other envs."""
    import gymnasium

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
