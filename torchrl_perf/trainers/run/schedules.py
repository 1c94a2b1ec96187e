"""Schedules of a run, and what a resumed run with other settings does with them: report, keep or apply the change."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_perf.functional.losses.elbo import beta_at
from torchrl_perf.run_layout import CONFIG, read_json
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.config_checks import ConfigError
from torchrl_perf.trainers.optim.settings import adam_options

__all__ = [
    "Change",
    "apply_changes",
    "describe_changes",
    "go_on",
    "schedule_changes",
    "scheduled_values",
    "stored_config",
    "with_schedules_of",
]

logger = logging.getLogger("torchrl_perf")

LENGTH = ("total_steps", "schedule_steps")
"""Fields that say how long the run is, and what is annealed over it."""


_ADAM = ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay")

_STEP_SIZES = (
    "learning_rate",
    *("actor_learning_rate", "critic_learning_rate", "temperature_learning_rate", "option_learning_rate"),
)
_ANNEALED = (*_STEP_SIZES, "entropy_coeff", "beta")


class _Schedule(NamedTuple):
    fields: tuple[str, ...]
    """Fields of a config, the first of which has to be there."""
    value: Callable[[Any, int], float]
    """The value after so many iterations."""


class Change(NamedTuple):
    """A schedule that is changed by new settings."""

    name: str
    """Of the schedule: ``learning_rate``, ``epsilon``, ..."""
    before: float
    """Its value at the present step, by the stored settings."""
    after: float
    """The same, by the new ones."""
    end_before: float
    """Its value at the end of the new run, by the stored settings."""
    end_after: float
    """The same, by the new ones."""
    fields: tuple[str, ...]
    """The settings that cause the change."""


def scheduled_values(config: RunConfig, iteration: int) -> dict[str, float]:
    """Every value that the settings of a run put on a schedule, constant ones included, after so many iterations.

    Args:
        config: settings of a run.
        iteration: iterations done.

    Returns:
        By name: ``learning_rate``, ``entropy_coeff``, ``epsilon``, ``noise``, ``beta`` of prioritised replay, ...
    """
    return {name: schedule.value(config, iteration) for name, schedule in _schedules(config)}


def schedule_changes(before: RunConfig, after: RunConfig, iteration: int) -> list[Change]:
    """The schedules that continue differently with the new settings.

    Args:
        before: settings that the run was stored with.
        after: those that it goes on with.
        iteration: iterations done.
    """
    end = max(after.iterations, iteration)
    # the ends and some places between: two lines that meet here and there differ elsewhere
    places = sorted({iteration, end, *(iteration + (end - iteration) * k // 8 for k in range(8))})
    found = []
    for name, schedule in _schedules(after):
        values = [[schedule.value(config, place) for place in places] for config in (before, after)]
        if values[0] == values[1]:
            continue
        fields = _changed(before, after, (*schedule.fields, *LENGTH))
        found.append(Change(name, values[0][0], values[1][0], values[0][-1], values[1][-1], fields))
    return found


def describe_changes(before: RunConfig, after: RunConfig, iteration: int) -> str:
    """The changes in words, with the values before and after and what keeps them; empty where there are none.

    Args:
        before: settings that the run was stored with.
        after: those that it goes on with.
        iteration: iterations done.
    """
    changes = schedule_changes(before, after, iteration)
    if not changes:
        return ""
    parts = []
    for change in changes:
        part = f"{change.name} is {change.after:.6g}, by the stored settings {change.before:.6g}"
        if change.before == change.after:
            part = f"{change.name} is {change.after:.6g} as before, and at the end {change.end_after:.6g}"
            part += f", by the stored settings {change.end_before:.6g}"
        parts.append(part)
    fields = dict.fromkeys(field for change in changes for field in change.fields)
    settings = ", ".join(f"{name} {getattr(before, name)} -> {getattr(after, name)}" for name in fields)
    length = before.schedule_steps or before.total_steps
    remedy = f"--keep-schedules, in Python schedule_steps={length}" if "total_steps" in fields else ""
    others = ", ".join(name for name in fields if name not in LENGTH)
    remedy += (" and " if remedy and others else "") + (f"leave out {others}" if others else "")
    return (
        f"the schedules change at step {iteration * after.batch_size} ({settings}): {'; '.join(parts)}. To go on as "
        f"before: {remedy or f'schedule_steps={length}'}."
    )


def with_schedules_of(before: RunConfig, after: RunConfig) -> RunConfig:
    """``after`` with the schedules of the run that was stored as ``before``, whatever its total number of steps.

    What is annealed over a run reaches its end where that of the stored run does, and stays there.

    Args:
        before: settings that a run was stored with.
        after: settings that it goes on with.

    Raises:
        ValueError: if other settings of a schedule are asked for than those that shall be kept.
    """
    own = {field for _, schedule in _schedules(after) for field in schedule.fields} | {"schedule_steps"}
    changed = [name for name in _changed(before, after, tuple(sorted(own))) if name != "schedule_steps"]
    length = before.schedule_steps or before.total_steps
    if changed or after.schedule_steps not in (before.schedule_steps, length):
        listed = ", ".join(f"{name}={getattr(after, name)}" for name in changed or ["schedule_steps"])
        raise ValueError(
            f"--keep-schedules: expected no other setting of a schedule, received {listed}. Remedy: one of the two."
        )
    return dataclasses.replace(after, schedule_steps=length) if after.anneals_over_run else after


def apply_changes(trainer: Any, before: RunConfig) -> None:
    """Overwrites what a checkpoint has restored with the settings that a resumed run has changed.

    A checkpoint holds the constants of most schedules: step sizes that are not annealed, the ends of epsilon and noise,
    the exponents of prioritised replay. Without a change of settings nothing is touched.

    Args:
        trainer: has loaded a checkpoint.
        before: settings that the run was stored with.

    Raises:
        ValueError: for a setting that does not exist in a part that the user has passed to the trainer.
    """
    config = trainer.config.whole
    changed = set(_changed(before, config, tuple(field.name for field in dataclasses.fields(config))))
    done = trainer.iterations_done
    for fields, write in _WRITES:
        if not changed & set(fields) or not hasattr(config, fields[0]):
            continue
        values = [scheduled_values(kind, done) for kind in (before, config)]
        if values[0] == values[1] and not schedule_changes(before, config, done):
            continue
        with torch.no_grad():
            write(trainer, trainer.config)


def go_on(trainer: Any, run_dir: Path) -> None:
    """Reports how the schedules of a resumed run change with its settings, and applies the changes.

    Args:
        trainer: has loaded a checkpoint of the run; nothing is done for a new one.
        run_dir: folder of the run, whose settings are those that it was stored with.

    Raises:
        ValueError: as :func:`apply_changes`.
    """
    before = stored_config(run_dir, type(trainer.config))
    if before is None or not trainer.iterations_done:
        return
    apply_changes(trainer, before)
    config = trainer.config.whole
    if text := describe_changes(before, config, trainer.iterations_done):
        logger.warning("resume: %s", text)
    if config.schedule_iterations < config.iterations:
        last = scheduled_values(config, config.schedule_iterations)
        ends = ", ".join(f"{name} {value:.6g}" for name, value in last.items() if name in _ANNEALED)
        logger.warning(
            "resume: what is annealed over the run ends at step %d of %d and stays there: %s.",
            *(config.schedule_iterations * config.batch_size, config.iterations * config.batch_size, ends),
        )


def stored_config(run_dir: Path, kind: type[RunConfig]) -> RunConfig | None:
    """The settings that a run was stored with; None where its folder holds none that can be read.

    Args:
        run_dir: folder of the run.
        kind: class of the settings.
    """
    values = read_json(run_dir / CONFIG)
    try:
        return (
            kind.from_dict({name: value for name, value in values.items() if name != "algorithm"}) if values else None
        )
    except ConfigError:  # of another version of the package, or edited
        return None


# -- the schedules of all trainers -------------------------------------------------------------------------------------


def _schedules(config: RunConfig) -> Iterator[tuple[str, _Schedule]]:
    for name, schedule in _SCHEDULES.items():
        if hasattr(config, schedule.fields[0]) and (name != "beta" or getattr(config, "sampler", "") == "prioritized"):
            yield name, schedule


def _changed(before: RunConfig, after: RunConfig, fields: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in fields if getattr(before, name, None) != getattr(after, name, None))


def _linear(step: float, start: float, end: float, steps: float) -> float:
    share = 1.0 if step >= steps else step / steps
    return start * (1.0 - share) + end * share


def _step_size(field: str) -> _Schedule:
    """One of Adam's, constant or annealed over the run."""

    def value(config: Any, iteration: int) -> float:
        if not getattr(config, "anneal_learning_rate", False):
            return getattr(config, field)
        return _linear(iteration, getattr(config, field), 0.0, config.schedule_iterations)

    return _Schedule((field, "anneal_learning_rate"), value)


def _entropy_coeff(config: Any, iteration: int) -> float:
    if config.entropy_coeff_final is None:
        return config.entropy_coeff
    frames = config.entropy_frames
    length = config.schedule_iterations if frames is None else frames / config.batch_size
    return _linear(iteration, config.entropy_coeff, config.entropy_coeff_final, length)


def _frames(start: str, end: str, frames: str) -> _Schedule:
    """A line over a number of env steps."""

    def value(config: Any, iteration: int) -> float:
        ends = getattr(config, start), getattr(config, end)
        return _linear(iteration * config.batch_size, *ends, getattr(config, frames))

    return _Schedule((start, end, frames), value)


def _beta(config: Any, iteration: int) -> float:
    if config.beta_final is None:
        return config.beta
    return _linear(iteration, config.beta, config.beta_final, config.schedule_iterations)


def _option_temperature(config: Any, iteration: int) -> float:
    last = getattr(config, "option_temperature_final", None)
    if last is None:
        return config.option_temperature
    share = min(iteration * config.batch_size / config.option_temperature_frames, 1.0)
    return config.option_temperature * (last / config.option_temperature) ** share


def _kl_weight(config: Any, iteration: int) -> float:
    ramp = {"beta": config.beta, "warmup": config.beta_warmup, "anneal": config.beta_anneal}
    return float(beta_at(torch.tensor(float(iteration * config.updates)), config.beta_schedule, **ramp))


def _random_share(config: Any, iteration: int) -> float:
    return 1.0 if iteration * config.batch_size < config.random_steps else config.random_share


def _until(frames: str) -> _Schedule:
    """1 for a number of env steps, then 0."""
    return _Schedule((frames,), lambda config, done: float(done * config.batch_size < getattr(config, frames)))


def _constant(field: str) -> _Schedule:
    return _Schedule((field,), lambda config, _: getattr(config, field))


_SCHEDULES = {
    **{name: _step_size(name) for name in _STEP_SIZES},
    "entropy_coeff": _Schedule(("entropy_coeff", "entropy_coeff_final", "entropy_frames"), _entropy_coeff),
    "epsilon": _frames("eps_start", "eps_end", "eps_frames"),
    "noise": _frames("noise_start", "noise_end", "noise_frames"),
    "beta": _Schedule(("beta_final", "beta"), _beta),
    "option_temperature": _Schedule(
        ("option_temperature", "option_temperature_final", "option_temperature_frames"), _option_temperature
    ),
    "kl_weight": _Schedule(("beta_schedule", "beta", "beta_warmup", "beta_anneal", "updates"), _kl_weight),
    "random_share": _Schedule(("random_steps", "random_share"), _random_share),
    "stage_one": _until("stage_one_frames"),
    **{name: _constant(name) for name in _ADAM},
}


# -- what a checkpoint restores, and how another setting is written over it --------------------------------------------


def _write_learning_rate(trainer: Any, config: Any) -> None:
    if not getattr(config, "anneal_learning_rate", False):
        trainer.optimizer.learning_rate.fill_(config.learning_rate)


def _write_adam(trainer: Any, config: Any) -> None:
    settings = adam_options(config)
    for name in ("optimizer", "critic_optimizer", "actor_optimizer"):
        groups = getattr(trainer, name).param_groups if hasattr(trainer, name) else ()
        # the temperature, for one, keeps a weight decay of 0
        own = trainer.actor_groups() if name == "actor_optimizer" and groups else [{}] * len(groups)
        for held, group in zip(groups, own, strict=True):
            held.update({setting: group.get(setting, value) for setting, value in settings.items()})


def _write_entropy_coeff(trainer: Any, config: Any) -> None:
    if config.entropy_coeff_final is None:
        trainer.loss.entropy_coeff.fill_(config.entropy_coeff)


def _write_actor_critic(trainer: Any, config: Any) -> None:
    trainer.critic_optimizer.learning_rates[0].fill_(config.critic_learning_rate)
    for held, group in zip(trainer.actor_optimizer.learning_rates, trainer.actor_groups(), strict=True):
        held.fill_(group["lr"])


def _writes_ramp(part: str, fields: tuple[str, str, str], buffers: tuple[str, str, str]) -> Any:
    """Writes start, end and length of a module that computes its schedule from a counter."""

    def write(trainer: Any, config: Any) -> None:
        module = getattr(trainer, part, None)
        if not all(isinstance(getattr(module, name, None), Tensor) for name in buffers):
            raise ValueError(
                f"{', '.join(fields)}: expected the stored ones for a {part} of your own, "
                f"{type(module).__name__}, received others. Remedy: leave them out, or set its own schedule."
            )
        for name, field in zip(buffers, fields, strict=True):
            value = getattr(config, field, None)
            if value is None and name.endswith("_end"):
                value = getattr(config, fields[0])
            getattr(module, name).fill_(0 if value is None else value)
        module.step(0)

    return write


def _write_beta(trainer: Any, config: Any) -> None:
    if config.sampler != "prioritized":
        return
    sampler = trainer.buffer.sampler
    last = config.beta if config.beta_final is None else config.beta_final
    steps = None if config.beta_final is None else config.schedule_iterations
    sampler.load_state_dict({**sampler.state_dict(), "beta": [config.beta, last], "anneal_steps": steps})


_RAMPS = {
    "policy": (("eps_start", "eps_end", "eps_frames"), ("eps_start", "eps_end", "decay_frames")),
    "controller": (
        ("option_temperature", "option_temperature_final", "option_temperature_frames"),
        ("temperature_start", "temperature_end", "temperature_steps"),
    ),
}
_NOISE = ("noise_start", "noise_end", "noise_frames"), ("sigma_start", "sigma_end", "decay_frames")

_WRITES: list[tuple[tuple[str, ...], Callable[[Any, Any], None]]] = [
    (("learning_rate", "anneal_learning_rate"), _write_learning_rate),
    (_ADAM, _write_adam),
    (("entropy_coeff", "entropy_coeff_final"), _write_entropy_coeff),
    ((*_STEP_SIZES[1:], "anneal_learning_rate"), _write_actor_critic),
    (("beta_final", "beta", *LENGTH), _write_beta),
    *((fields, _writes_ramp(part, fields, buffers)) for part, (fields, buffers) in _RAMPS.items()),
    (_NOISE[0], _writes_ramp("policy", *_NOISE)),
]
