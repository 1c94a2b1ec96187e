"""The meaning of ``--resume``: a run's folder, one of its checkpoints, or the newest run that has steps left."""

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_perf.cli.stored_settings import read_settings
from torchrl_perf.envs.registry import is_known
from torchrl_perf.parallel import Ranks
from torchrl_perf.run_layout import CHECKPOINTS, CONFIG, read_json
from torchrl_perf.streams import say
from torchrl_perf.trainers.config import TASKS, RunConfig
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder, read_checkpoint
from torchrl_perf.trainers.run.files import find_resumable, is_finished
from torchrl_perf.trainers.run.made_of import check_made_of
from torchrl_perf.trainers.run.other_ranks import RESHARDED, load_of_other_ranks
from torchrl_perf.trainers.run.rank_folder import common_checkpoint, ranks_of_run

__all__ = ["AUTO", "Start", "automatic_start", "given_settings", "load_start", "named_start", "refuse_own_env"]

AUTO = "auto"


@dataclass(frozen=True)
class Start:
    """Where a run starts from."""

    run_dir: Path | None = None
    """Folder of the run to go on with; None for a new run."""
    checkpoint: Path | None = None
    """The checkpoint to load; None for the newest that can be read."""


def named_start(path: Path) -> Start:
    """The start that a path names.

    Args:
        path: folder of a run, or a file in its folder ``checkpoints``.

    Raises:
        FileNotFoundError: if there is nothing there.
        ValueError: for a folder that is not that of a run, and a file outside of one.
    """
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise ValueError(
                f"--resume: expected the folder of a run, with its {CONFIG}, received {path}. Remedy: a folder that "
                f"is named at the end of a run, or {AUTO}."
            )
        return Start(path)
    if not path.exists():
        raise FileNotFoundError(
            f"--resume: expected {AUTO}, the folder of a run or one of its checkpoints, received {path}, where "
            "nothing is. Remedy: name a folder that exists, or leave --resume out."
        )
    run_dir = path.absolute().parent.parent
    if path.absolute().parent.name != CHECKPOINTS or not (run_dir / CONFIG).is_file():
        raise ValueError(
            f"--resume: expected a checkpoint in the folder {CHECKPOINTS} of a run, beside its {CONFIG}, received "
            f"{path}. Remedy: put it there, or pass the folder of the run."
        )
    return Start(run_dir, path)


def automatic_start(config: RunConfig, given: Sequence[str]) -> tuple[Start, dict[str, Any]]:
    """The newest run of the algorithm, env and seed that has steps left, or a new one; says which on standard error.

    Args:
        config: settings that are asked for.
        given: names of those that were asked for by an option or a file; the others are those of the run.

    Returns:
        The start, and the settings to run with.
    """
    wanted = {name: getattr(config, name) for name in given}
    found, left_out = find_resumable(config, wanted)
    for reason in left_out:
        say(f"resume: not {reason}")
    if found is None:
        say(f"resume: no run with steps left below {config.run_dir}; a new one starts")
        return Start(), config.to_dict()
    return Start(found), {**config.to_dict(), **read_settings(found / CONFIG, type(config)), **wanted}


def given_settings(kind: type[RunConfig], argv: Sequence[str], stored: Sequence[str]) -> list[str]:
    """Names of the settings of a config that a command line or a file sets.

    Args:
        kind: the config.
        argv: options.
        stored: names that a file sets.
    """
    names = {token.partition("=")[0].removeprefix("--").replace("-", "_") for token in argv if token.startswith("--")}
    names |= {name.removeprefix("no_") for name in names} | set(stored)
    return [field.name for field in dataclasses.fields(kind) if field.name in names]


def refuse_own_env(kind: type[RunConfig], start: Start) -> None:
    """Refuse a run whose env has no name that it can be made by: only the script that made it can make it again.

    Raises:
        ValueError: with how to go on from Python.
    """
    assert start.run_dir is not None
    stored = read_json(start.run_dir / CONFIG)
    name, hint = stored.get("env"), typing.get_type_hints(kind)["env"]
    known = TASKS if hint is str else typing.get_args(hint)
    if not isinstance(name, str) or name in known or stored.get("algorithm", kind.algorithm) != kind.algorithm:
        return
    if hint is str and is_known(name):
        return
    newest = start.checkpoint or next(iter(CheckpointFolder(start.run_dir / CHECKPOINTS).files()), None)
    trainer = kind.__name__.removesuffix("Config") + "Trainer"
    raise ValueError(
        f"--resume {start.run_dir}: expected a run of one of the package's tasks, {', '.join(known)}, or of an env "
        f"that has a name, received one of the env {name}, which the command line cannot make. Nothing was changed. "
        f"Remedy: {way_from_python(trainer, name, start.run_dir, newest)}"
    )


def way_from_python(trainer: type | str, env: str, run_dir: Path, checkpoint: Path | None) -> str:
    """How to resume, from Python, a run that was given an env or networks."""
    name = trainer if isinstance(trainer, str) else trainer.__name__
    return (
        f"From Python: trainer = {name}(config, env={env}(...)), with the networks that the run was given; "
        f"trainer.load({str(checkpoint or run_dir / CHECKPOINTS)!r}); train(trainer, {str(run_dir)!r})."
    )


def load_start(trainer: Any, start: Start) -> None:
    """Loads the checkpoint that a run starts from into its trainer; says which on standard error.

    Raises:
        FileNotFoundError: for a run without checkpoint.
        ValueError: for checkpoints that cannot be read or do not fit, and for a run that is complete.
    """
    if start.run_dir is None:
        return
    config = trainer.config.whole
    ranks: Ranks = getattr(trainer, "ranks", None) or Ranks.alone()
    if ranks_of_run(start.run_dir) != ranks.size and config.algorithm in RESHARDED:
        name = "" if start.checkpoint is None else start.checkpoint.name
        path = load_of_other_ranks(trainer, ranks, start.run_dir, name=name)
        _tell(
            trainer,
            ranks,
            start.run_dir,
            path,
            f"with {ranks.size} {'ranks' if ranks.several else 'rank'}; the envs begin anew, ",
        )
        return
    if ranks.several:
        name = "" if start.checkpoint is None else start.checkpoint.name
        of = start.run_dir, trainer.device
        path, state = common_checkpoint(ranks, *of, made_by=config.algorithm, name=name)
    elif start.checkpoint is not None:
        path, state = start.checkpoint, read_checkpoint(start.checkpoint, trainer.device, made_by=config.algorithm)
    else:
        folder = CheckpointFolder(start.run_dir / CHECKPOINTS, keep=config.keep_checkpoints)
        path, state = folder.load_newest(trainer.device, made_by=config.algorithm)
    try:
        trainer.load_state_dict(state)
    except ValueError as error:
        if not check_made_of(trainer.train_state.made_of, state.get("made_of", {})):
            raise
        env = state["made_of"].get("env", {})
        words = way_from_python(type(trainer), env.get("name", config.env), start.run_dir, path)
        raise ValueError(f"--resume {start.run_dir}: {error} Remedy: {words}") from None
    _tell(trainer, ranks, start.run_dir, path)


def _tell(trainer: Any, ranks: Ranks, run_dir: Path, path: Path, words: str = "") -> None:
    """Says on standard error where a run goes on.

    Raises:
        ValueError: for a run that is complete.
    """
    config = trainer.config.whole
    taken = trainer.iterations_done * config.batch_size
    if trainer.iterations_done >= config.iterations and is_finished(run_dir):
        raise ValueError(
            f"{run_dir}: expected a run with steps left, received one that has taken {taken} of "
            f"{config.total_steps}. Remedy: a larger --total-steps."
        )
    if ranks.first:
        say(f"resume: {run_dir} goes on from {path.name}, {words}{taken} of {config.total_steps} steps")
