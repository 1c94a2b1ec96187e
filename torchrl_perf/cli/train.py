"""``torchrl-perf train <algorithm>``: one command line for all algorithms."""

import argparse
import dataclasses
import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from torchrl_perf.cli.stored_settings import read_settings
from torchrl_perf.metrics.loggers import LOGGER_NAMES
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.run import TrainingDivergedError, train

__all__ = ["ALGORITHMS", "main"]


class Algorithm(NamedTuple):
    """Where the parts of an algorithm are, each as ``module:name`` below ``torchrl_perf.trainers``."""

    config: str
    """Dataclass of settings."""
    presets: str
    """Settings for each task, by env name."""
    trainer: str
    """Made of a config; what :func:`~torchrl_perf.trainers.run.train` runs."""

    def load(self, part: str) -> Any:
        """The object behind one of the names."""
        module, _, name = getattr(self, part).partition(":")
        return getattr(importlib.import_module(f"torchrl_perf.trainers.{module}"), name)


ALGORITHMS = {
    "ppo": Algorithm("config:PPOConfig", "config:PRESETS", "ppo:PPOTrainer"),
    "dqn": Algorithm("dqn_config:DQNConfig", "dqn_config:DQN_PRESETS", "dqn:DQNTrainer"),
    "sac": Algorithm("sac_config:SACConfig", "sac_config:SAC_PRESETS", "sac:SACTrainer"),
}

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Arguments(Generic[Settings]):
    """Train an agent with every step of the loop on one device.

    Settings start from the preset of --env, are replaced by those in --config, and then by options. The resolved
    settings are stored as config.json in the run's folder. The last line printed is the result.
    """

    settings: Settings
    config: Path | None = None
    """JSON or YAML file with settings, such as the config.json of an earlier run."""
    resume: Path | None = None
    """Folder of a run to go on with: its config.json and its checkpoint.pt."""
    progress: bool = True
    """Show a line of progress on standard error."""


def unchecked(kind: type[RunConfig]) -> type[RunConfig]:
    """``kind`` before its checks, so that settings that do not fit are told from options that do not exist."""
    return dataclass(frozen=True)(type(f"Unchecked{kind.__name__}", (kind,), {"__post_init__": lambda self: None}))


def main(name: str, argv: list[str]) -> int:
    """Train; see ``torchrl-perf train <name> --help``.

    Args:
        name: one of ``ALGORITHMS``.
        argv: the arguments behind it.

    Returns:
        Exit code: 0; 1 with a message for settings that cannot be run and for a run that diverged; 128 + the number of
        the signal that stopped the run.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        # Such networks gain nothing from a second core, and threads that wait for a busy one slow a run 5 times.
        torch.set_num_threads(1)
    try:
        arguments = parse(name, argv)
        config = ALGORITHMS[name].load("config")(**dataclasses.asdict(arguments.settings))
        trainer = make_trainer(config, arguments.resume)
    except (ValueError, FileNotFoundError, ImportError) as error:
        return _failed(error)
    try:
        result = train(trainer, arguments.resume, progress=arguments.progress)
    except TrainingDivergedError as error:
        return _failed(error)
    finally:
        trainer.close()
    if result.exit_code:
        signal = result.exit_code - 128
        command = f"torchrl-perf train {name} --resume {result.run_dir}"
        print(f"stopped by signal {signal}; go on with: {command}", file=sys.stderr)
    print(result)
    return result.exit_code


def parse(name: str, argv: list[str]) -> Arguments[RunConfig]:
    """Settings and options of a command line; stops the process for ``--help`` and for unknown options.

    Args:
        name: one of ``ALGORITHMS``.
        argv: the arguments behind it.

    Raises:
        FileNotFoundError: for a file that does not exist.
        ValueError: for a file that does not hold settings, or --config together with --resume.
    """
    import tyro

    kind, presets = ALGORITHMS[name].load("config"), ALGORITHMS[name].load("presets")
    program = f"torchrl-perf train {name}"
    first = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    for option in ("--env", "--config", "--resume"):
        first.add_argument(option)
    early = first.parse_known_args(argv)[0]
    if early.config and early.resume:
        raise ValueError("Expected --config or --resume, received both. A resumed run has settings of its own.")
    path = Path(early.resume) / "config.json" if early.resume else Path(early.config) if early.config else None
    stored: dict[str, Any] = {} if path is None else read_settings(path, kind)
    usual = next(iter(presets.values()))
    # A name that is no preset is left to the checks, whose message lists those there are.
    preset = presets.get(early.env or stored.get("env", usual.env), usual)
    unchecked_kind = unchecked(kind)
    default = Arguments(settings=unchecked_kind(**{**preset.to_dict(), **stored}))
    arguments = tyro.cli(
        Arguments[unchecked_kind],
        prog=program,
        args=argv,
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    if early.resume:
        _check_resumable(default.settings, arguments.settings)
    return arguments


def make_trainer(config: RunConfig, run_dir: Path | None = None) -> Any:
    """A new trainer, or one that has loaded the checkpoint of the run in ``run_dir``.

    Raises:
        FileNotFoundError: for a run without checkpoint.
        ValueError: for settings that do not fit each other or the machine, or a run that is complete.
    """
    _check_loggers(config.logger)
    trainer = ALGORITHMS[config.algorithm].load("trainer")(config)
    if run_dir is None:
        return trainer
    trainer.load(run_dir / "checkpoint.pt")
    if trainer.iterations_done >= config.iterations:
        taken = trainer.iterations_done * config.batch_size
        raise ValueError(
            f"{run_dir}: expected a run with steps left, received one that has taken {taken} of {config.total_steps}. "
            "Remedy: a larger --total-steps."
        )
    (run_dir / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    return trainer


def _check_loggers(names: str) -> None:
    """The loggers refuse unknown names themselves, but only once the run has a folder."""
    unknown = {name.strip() for name in names.split(",")} - set(LOGGER_NAMES)
    if unknown:
        raise ValueError(
            f"--logger: expected some of {', '.join(LOGGER_NAMES)}, received {', '.join(sorted(unknown))}."
        )


def _check_resumable(stored: RunConfig, wanted: RunConfig) -> None:
    fixed = stored.fixed_by_checkpoint
    changed = [name for name in fixed if getattr(stored, name) != getattr(wanted, name)]
    if changed:
        raise ValueError(
            f"--resume: expected the checkpoint's own {', '.join(fixed)}, received another "
            f"{', '.join(changed)}. Remedy: leave them out, or start a new run with --config."
        )


def _failed(error: Exception) -> int:
    print(f"torchrl-perf: {error}", file=sys.stderr)
    return 1
