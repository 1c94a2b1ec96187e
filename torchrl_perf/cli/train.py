"""``torchrl-perf train <algorithm>``: one command line for all algorithms."""

import argparse
import dataclasses
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch

from torchrl_perf.cli.asked import asked_for, launch
from torchrl_perf.cli.backend import named_by_backend
from torchrl_perf.cli.kept_schedules import kept_schedules
from torchrl_perf.cli.options import joined, refuse_bad_options
from torchrl_perf.cli.ranks import asks_for_one, fitted_to_ranks, joined_ranks, print_batch
from torchrl_perf.cli.resume import (
    AUTO,
    Start,
    automatic_start,
    given_settings,
    load_start,
    named_start,
    refuse_own_env,
)
from torchrl_perf.cli.stored_settings import read_settings
from torchrl_perf.launch import note_that_it_was_told
from torchrl_perf.parallel import RankLostError, Ranks, RankStoppedError, leave
from torchrl_perf.parallel.join import RankError, ending
from torchrl_perf.parallel.ranks import HANG_SECONDS
from torchrl_perf.parallel.watch import RankWatch, first_to_tell, watched
from torchrl_perf.registry import ALGORITHMS, MARINE, MARINE_AGENTS, SYSTEMS, Entry, entry_of
from torchrl_perf.run_layout import CONFIG, read_json
from torchrl_perf.runtime.signals import StopRequest
from torchrl_perf.streams import say
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.config_checks import ConfigError
from torchrl_perf.trainers.run.metric_names import known_metrics, unknown_metric
from torchrl_perf.trainers.run.other_ranks import problem_of_other_ranks
from torchrl_perf.trainers.run.rank_folder import ranks_of_run
from torchrl_perf.trainers.run.run import RunFolderError, RunResult, TrainingDivergedError, train

__all__ = ["ALGORITHMS", "SYSTEMS", "main"]

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
    resume: str | None = None
    """Folder of a run to go on with, or one of its checkpoints; auto takes the newest run of this env and seed that has
    steps left, or starts a new one. Settings are those of the run, but for the options given here."""
    keep_schedules: bool = False
    """With --resume: what is annealed goes on as in the stored run, whatever --total-steps is now."""
    backend: Literal["warp", "gym"] | None = None
    """What steps a task of MuJoCo, such as --env HalfCheetah: warp, MuJoCo Warp on the device, or gym, Gymnasium's env
    (HalfCheetah-v5) on the CPU. Without it the name decides."""
    progress: bool = True
    """Show a line of progress on standard error."""
    ranks: int | None = None
    """Processes that learn together, each with its part of num_envs, minibatch_size and capacity; started here where
    torchrun has not. --device cpu for processes on the CPU."""
    gpus: int | None = None
    """The same with a GPU for each."""
    per_rank: bool = False
    """Take num_envs, minibatch_size and capacity for those of each rank, and not of the whole run."""
    by_host: bool = False
    """Sum gradients within each host first, then between hosts; for hosts with as many ranks each, at least two."""
    rank_timeout: float = HANG_SECONDS
    """Seconds for which a rank may keep the others waiting; then it counts as lost. More than an evaluation takes."""


def unchecked(kind: type[RunConfig]) -> type[RunConfig]:
    """``kind`` before its checks, so that bad settings and unknown options are reported differently."""
    return dataclass(frozen=True)(type(f"Unchecked{kind.__name__}", (kind,), {"__post_init__": lambda self: None}))


def main(name: str, argv: list[str]) -> int:
    """Train; see ``torchrl-perf train <name> --help``.

    Args:
        name: one of ``ALGORITHMS`` or ``SYSTEMS``, or ``marine``.
        argv: the arguments behind it.

    Returns:
        Exit code: 0; 1 with a message for settings that cannot be run, a run that diverged and a last state that could
        not be saved; 128 + the number of the signal that stopped the run.

    Raises:
        Exception: whatever else ends the loop, such as the error of an env, with a note on how to go on.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        # Small networks gain nothing from a second core, and waiting for a thread on a busy core makes a run 5 times
        # slower.
        torch.set_num_threads(1)
    try:
        argv = named_by_backend(argv)
        asked_for(argv)  # refuses what cannot be; several ranks have been started before this module is imported
        ranks = joined_ranks(argv)
    except RankStoppedError as error:
        return error.exit_code
    except ValueError as error:
        return _failed(error)
    try:
        return _train_on(ranks, name, argv)
    except RankStoppedError as error:
        return error.exit_code
    finally:
        leave()


def _train_on(ranks: Ranks, name: str, argv: list[str]) -> int:
    """The run, as one of its ranks; every error that is expected is said by one of them."""
    try:
        with watched(ranks, lambda: 0) as watch:
            return _watched_run(ranks, watch, name, argv)
    except RankError as error:
        return _failed(error)
    except RankLostError as error:
        say(f"torchrl-perf: {error}")
        note_that_it_was_told()
        return 1


def _watched_run(ranks: Ranks, watch: RankWatch | None, name: str, argv: list[str]) -> int:
    """The same, while ranks watch each other."""
    stop = StopRequest()  # torchrun asks the others to stop when one is lost: they are to say so first
    try:
        with stop if ranks.several else nullcontext():
            settings, start, progress = ranks.of_first(lambda: _settings(name, argv, ranks))
            config = algorithm_of(name, argv).load("config")(**settings)
            if not ranks.several and not asks_for_one(argv) and (before := _ranks_before(start)) > 1:
                return launch(name, argv, before)
            print_batch(config, ranks)
            trainer = make_trainer(config, start)
    except (ValueError, OSError, ImportError) as error:
        return _failed(error, watch)
    if watch is not None and stop.requested:
        trainer.close()
        told = f"stopped by signal {stop.signum} before the first iteration; nothing was saved"
        watch.explain(KeyboardInterrupt(told), None, stopped=True)  # raises where another rank is why
        if first_to_tell():
            say(f"torchrl-perf: {told}")
            note_that_it_was_told()
        return stop.exit_code
    try:
        result = train(trainer, start.run_dir, progress=progress)
    except (TrainingDivergedError, RunFolderError, ImportError) as error:
        return _failed(error, watch)
    finally:
        with ending():
            trainer.close()
    return _ended(result, name) if ranks.first else result.exit_code


def _settings(name: str, argv: list[str], ranks: Ranks) -> tuple[dict[str, Any], Start, bool]:
    """Settings of the whole run as plain values, where it starts from, and whether it shows its progress."""
    arguments, start = parse(name, argv)
    config = algorithm_of(name, argv).load("config")(**dataclasses.asdict(arguments.settings))
    if arguments.keep_schedules:
        config = kept_schedules(config, start)
    if start.run_dir is not None and (ranks.several or asks_for_one(argv)):
        problem = problem_of_other_ranks(config, start.run_dir, _ranks_before(start), ranks.size)
        if problem:
            raise ConfigError([problem])
    return fitted_to_ranks(config, arguments, ranks.size).to_dict(), start, arguments.progress


def _ranks_before(start: Start) -> int:
    """The ranks of the run that is gone on with; 1 for a new one."""
    return 1 if start.run_dir is None else ranks_of_run(start.run_dir)


def _ended(result: RunResult, name: str) -> int:
    """Says how a run ended; its exit code."""
    if result.problem:
        say(f"torchrl-perf: {result.problem}")
    elif result.exit_code:
        signal = result.exit_code - 128
        command = f"torchrl-perf train {name} --resume {result.run_dir}"
        say(f"stopped by signal {signal}; go on with: {command}")
    say(str(result), sys.stdout)
    return result.exit_code


def algorithm_of(name: str, argv: list[str]) -> Entry:
    """The parts that a command line asks for; those of ``marine`` are its agent's.

    The agent is that of ``--agent``, or of the run or file that settings are read from, or the first there is.

    Args:
        name: as for :func:`main`.
        argv: the arguments behind it.

    Raises:
        ValueError: for an agent that does not exist.
    """
    if name != MARINE:
        return entry_of(name)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--agent", "--config", "--resume"):
        first.add_argument(option)
    early = first.parse_known_args(argv)[0]
    stored = {}
    if early.resume not in (None, AUTO):
        stored = read_json(Path(early.resume) / CONFIG) or read_json(Path(early.resume).parent.parent / CONFIG)
    elif early.config:
        stored = read_json(Path(early.config))
    # a run keeps its agent: another one is refused later, with the other settings that cannot change
    agent = stored.get("agent") if early.resume else None
    agent = str(agent or early.agent or stored.get("agent") or next(iter(MARINE_AGENTS)))
    if agent not in MARINE_AGENTS:
        raise ValueError(
            f"agent: expected one of {', '.join(MARINE_AGENTS)}, received {agent!r}. Remedy: one of these."
        )
    return entry_of(f"{MARINE}-{agent}")


def parse(name: str, argv: list[str]) -> tuple[Arguments[RunConfig], Start]:
    """Settings and options of a command line; stops the process for ``--help`` and for unknown options.

    Args:
        name: as for :func:`main`.
        argv: the arguments behind it.

    Returns:
        The settings and options, and the run to go on with.

    Raises:
        FileNotFoundError: for a file that does not exist.
        ValueError: for a file that does not hold settings, or --config together with the --resume of a certain run.
    """
    import tyro

    algorithm = algorithm_of(name, argv)
    kind = algorithm.load("config")
    program = f"torchrl-perf train {name}"
    refuse_bad_options(program, kind, argv)
    first = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    for option in ("--env", "--config", "--resume"):
        first.add_argument(option)
    early = first.parse_known_args(argv)[0]
    start = named_start(Path(early.resume)) if early.resume not in (None, AUTO) else Start()
    if early.config and start.run_dir:
        raise ValueError(
            "expected --config or --resume, received both. Remedy: leave --config out; a resumed run has settings of "
            "its own."
        )
    if start.run_dir:
        refuse_own_env(kind, start)
    path = start.run_dir / CONFIG if start.run_dir else Path(early.config) if early.config else None
    stored: dict[str, Any] = {} if path is None else read_settings(path, kind)
    # An unknown preset is left to the checks, whose message lists the known ones.
    preset = kind.task_settings(str(early.env or stored.get("env") or ""))
    unchecked_kind = unchecked(kind)
    default = Arguments(settings=unchecked_kind(**{**preset, **stored}))
    arguments = tyro.cli(
        Arguments[unchecked_kind],
        prog=program,
        args=joined(kind, argv),
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    given = given_settings(kind, argv, list(stored))
    changes = arguments.settings.giving_way(given)
    arguments = dataclasses.replace(arguments, settings=dataclasses.replace(arguments.settings, **changes))
    if start.run_dir:
        _check_resumable(default.settings, arguments.settings)
    elif early.resume == AUTO:
        wanted = kind(**dataclasses.asdict(arguments.settings))  # checked before a folder is looked for by its name
        start, settings = automatic_start(wanted, given)
        arguments = dataclasses.replace(arguments, settings=unchecked_kind(**settings))
    return arguments, start


def make_trainer(config: RunConfig, start: Start | None = None) -> Any:
    """A new trainer, or one that has loaded the checkpoint of the run that it starts from.

    Raises:
        FileNotFoundError: for a run without checkpoint.
        ValueError: for settings that do not fit each other or the machine, checkpoints that cannot be read, or a run
            that is complete.
    """
    kind = entry_of(config.algorithm).load("trainer")
    try:
        trainer = kind(config)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{kind.__name__}: expected settings that fit into memory, received too large ones: it ran out while they "
            f"were made ({first}). Remedy: fewer num_envs, a smaller network or another device."
        ) from None
    try:
        if problem := unknown_metric(config.best_by, known_metrics(trainer)):
            raise ConfigError([problem])
        load_start(trainer, start or Start())
    except Exception:
        trainer.close()
        raise
    return trainer


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "t allocate memory" in str(error)


def _check_resumable(stored: RunConfig, wanted: RunConfig) -> None:
    fixed = stored.fixed_on_resume
    changed = [name for name in fixed if getattr(stored, name) != getattr(wanted, name)]
    if changed:
        raise ValueError(
            f"--resume: expected the checkpoint's own {', '.join(fixed)}, received another "
            f"{', '.join(changed)}. Remedy: leave them out, or start a new run with --config."
        )


def _failed(error: Exception, watch: RankWatch | None = None) -> int:
    """Says what is wrong, where no other rank has said so."""
    if watch is not None:
        watch.fail()
    if first_to_tell():
        say(f"torchrl-perf: {error}")
        note_that_it_was_told()
    return 1
