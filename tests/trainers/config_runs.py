"""Small runs of each algorithm, and what can be seen of one: rows, files, and what it asks of its parts."""

import csv
import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytest import MonkeyPatch

from torchrl_perf.metrics import wandb_sink
from torchrl_perf.metrics.sinks import CSVSink
from torchrl_perf.registry import ALGORITHMS
from torchrl_perf.runtime.memory import MemoryGuard, MemoryReading
from torchrl_perf.runtime.oom import MicroBatches, OutOfMemoryWarning
from torchrl_perf.trainers import OnPolicyTrainer, TrainingDivergedError, train

KINDS = {name: algorithm.load("config") for name, algorithm in ALGORITHMS.items()}
TRAINERS = {name: algorithm.load("trainer") for name, algorithm in ALGORITHMS.items()}
WHOLE_RUNS = ("ppo", "dqn", "sac")  # what a run does around the iterations is the same code for the others

SMALL_VALUES = {
    **{"num_envs": 4, "num_steps": 4, "total_steps": 160, "device": "cpu", "mode": "eager", "hidden_size": 32},
    **{"epochs": 2, "minibatches": 2, "learning_rate": 1e-2},
    **{"capacity": 64, "minibatch_size": 16, "updates_per_iteration": 2, "learning_starts": 16, "option_capacity": 16},
    **{"target_interval": 2, "eps_frames": 64, "noise_frames": 64},
    **{"num_quantiles": 8, "num_cosines": 8, "num_atoms": 11},
}
"""Settings of a small run by the name of the field; one that makes runs long, or that they do not reach, is here."""


def small(kind: type) -> dict[str, Any]:
    """Those that a config has."""
    known = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in SMALL_VALUES.items() if name in known}


SMALL: dict[str, dict[str, Any]] = {name: small(kind) for name, kind in KINDS.items()}


def on_policy(name: str) -> bool:
    """Whether an algorithm learns from fresh batches alone."""
    return issubclass(TRAINERS[name], OnPolicyTrainer)


def updates_of(trainer: Any) -> int:
    """Updates of one iteration."""
    config = trainer.config
    return config.epochs * config.minibatches if isinstance(trainer, OnPolicyTrainer) else config.updates_per_iteration


def modules_of(trainer: Any) -> dict[str, torch.nn.Module]:
    """Networks and losses that a checkpoint holds, by name."""
    return {name: part for name, part in trainer.parts().items() if isinstance(part, torch.nn.Module)}


def make(name: str, options: dict[str, Any], **parts: Any) -> Any:
    """A small trainer."""
    return TRAINERS[name](KINDS[name].without_task(**{**SMALL[name], "logger": "csv", **options}), **parts)


def left_behind(name: str, options: dict[str, Any], folder: Path, patch: MonkeyPatch) -> tuple[Any, ...]:
    """What a run leaves: its length, whether it was solved, its files, and the steps that have rows."""
    patch.chdir(folder)
    trainer = make(name, options)
    result = train(trainer, progress=False)
    trainer.close()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    table = result.run_dir / "progress.csv"
    rows = [line.split(",")[0] for line in table.read_text(encoding="utf-8").splitlines()] if table.exists() else []
    return result.steps, result.solved, files, rows


def place(name: str, options: dict[str, Any], folder: Path, patch: MonkeyPatch) -> str:
    """Where a trainer works, or why it does not."""
    try:
        trainer = make(name, options)
    except ValueError as error:
        return str(error)
    trainer.close()
    return str(trainer.device)


def compilations(name: str, options: dict[str, Any], folder: Path, patch: MonkeyPatch) -> list[Any]:
    """What the compiler is asked for by three iterations; it compiles nothing here."""
    asked: list[Any] = []

    def compile_nothing(fn: Any, **settings: Any) -> Any:
        asked.append(settings)
        return fn

    patch.setattr(torch, "compile", compile_nothing)
    trainer = make(name, options)
    for _ in range(3):
        trainer.step()
    trainer.close()
    return asked


def after_nan(name: str, options: dict[str, Any], folder: Path, patch: MonkeyPatch) -> str:
    """How a run ends in which one reward is NaN."""
    patch.chdir(folder)
    trainer = make(name, options)
    advance, steps = trainer.env._advance, iter(range(10**6))

    def advance_and_spoil(tensordict: Any) -> Any:
        entries, *others = advance(tensordict)
        if next(steps) == 14:
            entries["reward"][0] = torch.nan
        return (entries, *others)

    patch.setattr(trainer.env, "_advance", advance_and_spoil)
    try:
        return f"{train(trainer, progress=False).steps} steps"
    except TrainingDivergedError as error:
        return str(error).replace(str(folder), "")
    finally:
        trainer.close()


def cpu_envs(name: str, options: dict[str, Any], folder: Path, patch: MonkeyPatch) -> list[Any]:
    """The vector envs of a run on a Gymnasium env: kind, size and time limit of each."""
    trainer = make(name, {"env": "Pendulum-v1" if name == "sac" else "CartPole-v1", **options})
    groups = [group.envs for group in trainer.collector.groups]
    trainer.close()
    limits = [env.spec.max_episode_steps for group in groups for env in getattr(group, "envs", ())]
    return [(type(envs).__name__, envs.num_envs, limits) for envs in groups]


def last_row(column: str, name: str, options: dict[str, Any], folder: Path, patch: MonkeyPatch) -> str:
    """A column of the last row, of a run on a device that is full of cached memory."""
    patch.chdir(folder)
    full = MemoryReading(allocated=50, reserved=99, total=100)
    for argument, value in {"read": lambda: full, "empty": lambda: None, "check_interval": 1}.items():
        patch.setitem(MemoryGuard.__init__.__kwdefaults__, argument, value)
    trainer = make(name, options)
    result = train(trainer, progress=False)
    trainer.close()
    with (result.run_dir / "progress.csv").open(encoding="utf-8") as file:
        *_, last = csv.DictReader(file)
    return last[column]


def wandb_call(name: str, options: dict[str, Any], folder: Path, patch: MonkeyPatch) -> tuple[Any, ...]:
    """What a run hands to its W&B sink, in whose place one stands that writes nothing."""
    patch.chdir(folder)
    calls: list[Any] = []

    def note(run_dir: str, *arguments: Any, settings: Any, **others: Any) -> CSVSink:
        calls.append((arguments[0], settings))
        return CSVSink(run_dir, "", None)

    patch.setattr(wandb_sink, "WandbSink", note)
    trainer = make(name, {**options, "logger": "wandb"})
    train(trainer, progress=False)
    trainer.close()
    return tuple(calls)


def after_oom(name: str, options: dict[str, Any], folder: Path, patch: MonkeyPatch) -> str:
    """How an iteration ends in which an update fits only in two parts."""
    run = MicroBatches.run

    def run_in_little_memory(self: MicroBatches, attempt: Callable[[int], Any], rows: int, **others: Any) -> Any:
        def limited(parts: int) -> Any:
            if parts == 1:
                raise torch.OutOfMemoryError("out of memory (simulated)")
            return attempt(parts)

        return run(self, limited, rows, **others)

    patch.setattr(MicroBatches, "run", run_in_little_memory)
    trainer = make(name, options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OutOfMemoryWarning)
            for _ in range(3):
                trainer.step()
    except torch.OutOfMemoryError as error:
        return str(error)
    finally:
        trainer.close()
    return f"{trainer.micro.parts} parts"


Look = Callable[[str, dict[str, Any], Path, MonkeyPatch], Any]
LONG = {"total_steps": 1024, "num_steps": 16, "updates_per_iteration": 1, "capacity": 256, "log_interval": 1}

# the value tried, what both runs have beside it, and how the two are told apart
RUN_KEYS: dict[str, tuple[Any, dict[str, Any], Look]] = {
    "total_steps": (320, {}, left_behind),
    "log_interval": (5, {"log_interval": 2}, left_behind),
    "logger": ("none", {}, left_behind),
    "run_dir": ("elsewhere", {}, left_behind),
    "checkpoint_interval": (2, {"keep_checkpoints": 10}, left_behind),
    "keep_checkpoints": (2, {"checkpoint_interval": 1}, left_behind),
    "best_metric": ("", {"checkpoint_interval": 1, "log_interval": 1}, left_behind),
    "eval_interval": (4, {"eval_episodes": 2}, left_behind),
    "eval_episodes": (3, {"eval_interval": 10}, partial(last_row, "eval/return_deviation")),
    "stop_return": (-1e9, {"log_interval": 1}, left_behind),
    "device": ("cuda", {}, place),
    "mode": ("compile", {}, compilations),
    "compile_mode": ("max-autotune-no-cudagraphs", {"mode": "compile"}, compilations),
    "compile_after": (2, {"mode": "compile"}, compilations),
    "on_nan": ("skip", {}, after_nan),
    "split_on_oom": (False, {}, after_oom),
    "memory_rule": ("never", {}, partial(last_row, "memory/cleanups")),
    "env_args": (("max_episode_steps=7",), {}, cpu_envs),
    "env_groups": (2, {}, cpu_envs),
    "env_processes": (True, {}, cpu_envs),
    "wandb_project": ("other", {}, wandb_call),
    "wandb_entity": ("team", {}, wandb_call),
    "wandb_group": ("seeds", {}, wandb_call),
    "wandb_name": ("first", {}, wandb_call),
    "wandb_tags": ("a, b", {}, wandb_call),
    "wandb_notes": ("why", {}, wandb_call),
    "wandb_mode": ("disabled", {}, wandb_call),
    "wandb_code": (".", {}, wandb_call),
    "gc_interval": (3, {}, partial(last_row, "memory/gc_runs")),
}


def observe(name: str, field: str, folder: Path, monkeypatch: MonkeyPatch) -> tuple[Any, Any]:
    """What is seen of two runs that differ in one key."""
    value, shared, look = RUN_KEYS[field]
    if name == "sac" and field in ("stop_return", "best_metric"):
        shared = {**shared, **LONG}  # an episode has 200 steps here
    results = []
    for number, options in enumerate((shared, {**shared, field: value})):
        here = folder / str(number)
        here.mkdir()
        with monkeypatch.context() as patch:
            results.append(look(name, options, here, patch))
    return results[0], results[1]
