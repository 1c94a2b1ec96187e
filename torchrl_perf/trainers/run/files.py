"""The folder of a run: its settings, machine card and status, and which run to go on with."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from torchrl_perf.run_layout import CHECKPOINTS, CONFIG, MACHINE, STATUS, RunState, read_json
from torchrl_perf.runtime.files import FolderLock, remove_partial_files, write_text
from torchrl_perf.runtime.machine import machine_card
from torchrl_perf.runtime.redact import redact
from torchrl_perf.runtime.timing import Stopwatch
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder, iteration_of, newest_common, ranks_of_run

STATUS_SECONDS = 1.0

logger = logging.getLogger("torchrl_perf")


class RunFolderError(OSError):
    """The folder of a run cannot be used: read-only, a full disk, or another process writes to it."""


def make_run_dir(config: RunConfig, env: str = "", label: str = "") -> Path:
    """A new folder ``<run_dir>/<algorithm>-<env>-<seed>[-k]`` with the resolved configuration in ``config.json``.

    Args:
        config: settings of the run.
        env: true name of its env; by default the config's.
        label: name of the env in that of the folder, such as its class; by default the same.

    Raises:
        RunFolderError: if it cannot be made or written to.
    """
    base = Path(config.run_dir) / run_name(config, label or env)
    path, count = base, 1
    while True:
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            # a dangling link takes the name, but has no run behind it
            if not path.is_dir() and not (path.is_symlink() and not path.exists()):
                raise RunFolderError(
                    f"run_dir: expected a folder that can be written to at {path}, received {_in_the_way(path)}. "
                    "Remedy: move it away, or another run_dir."
                ) from None
            count += 1
            path = base.with_name(f"{base.name}-{count}")
        except OSError as error:
            raise _unusable(path, error) from error
    try:
        write_config(path, config, env)
    except OSError as error:
        raise _unusable(path, error) from error
    return path


def run_name(config: RunConfig, env: str = "") -> str:
    """Name of the folder of the first run of an algorithm, env and seed."""
    return f"{config.algorithm}-{(env or config.env).replace('/', '-')}-{config.seed}"


def card(config: RunConfig, env: str = "") -> dict[str, Any]:
    """The entries that files and loggers store of a run: algorithm and settings, with the true name of its env."""
    return {**config.card(), "env": env or config.env}


def write_config(run_dir: Path, config: RunConfig, env: str = "") -> None:
    """Writes the settings of the run to ``config.json``, the name of the algorithm among them."""
    write_text(run_dir / CONFIG, json.dumps(card(config, env), indent=2) + "\n")


class RunFolder:
    """The folder of a run, locked by this process from construction to :meth:`release`.

    It gets settings and machine card, and the partial files of a killed process are removed. If the folder is deleted
    while the run goes on, it is made again in the same way, so that later checkpoints can be resumed from.

    Args:
        path: the folder; made if missing.
        config: settings of the run.
        env: true name of its env.

    Attributes:
        path: as given.
        checkpoints: the newest few, and the best.
        lost: whether the folder now belongs to another run, so that nothing may be written to it.

    Raises:
        RunFolderError: if another process has it, it is that of another algorithm or env, or it cannot be written to.
    """

    def __init__(self, path: Path, config: RunConfig, env: str) -> None:
        self.path, self._config, self._env = path, config, env
        self.checkpoints = CheckpointFolder(path / CHECKPOINTS, keep=config.keep_checkpoints)
        self.lost = False
        self._status = StatusFile(path)
        self._lock = _take(path, config, env)
        self._identity = self._look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Unlocks the folder; further calls do nothing."""
        self._lock.release()

    def write_status(self, state: RunState, step: int) -> None:
        """Writes the state of the run to ``status.json``; see :meth:`StatusFile.write`."""
        if not self.lost:
            self._status.write(state, step)

    def check(self) -> None:
        """Look whether the folder is the one that the run began with.

        Raises:
            RunFolderError: if another folder is in its place that belongs to another run.
        """
        now = self._look()
        if now == self._identity:
            return
        self._lock.release()
        what = "was deleted" if now is None else "was replaced by another"
        logger.warning(
            "the folder of the run %s %s while the run goes on; rows and checkpoints up to here are lost, later ones "
            "go to a new folder there. Remedy: end a run before its folder is moved.",
            *(self.path, what),
        )
        try:
            held = _take(self.path, self._config, self._env)
        except RunFolderError as error:
            if now is not None:
                self.lost = True
                raise
            logger.warning("%s", error)  # the disk may come back; the last save says if not
        else:
            self._lock.take_over(held)
        self._identity = self._look()

    def _look(self) -> tuple[int, int] | None:
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino


def _take(run_dir: Path, config: RunConfig, env: str) -> FolderLock:
    """Prepares a folder for this process: lock, settings, machine card, no partial files."""
    lock = FolderLock(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not lock.acquire():
            raise RunFolderError(
                f"run: expected a folder that no other process writes to, received {run_dir}, which process "
                f"{lock.holder() or 'of another machine'} has. Remedy: wait for it, end it, or start a new run."
            )
        _check_same_run(run_dir, card(config, env))
        for folder in (run_dir, run_dir / CHECKPOINTS):
            remove_partial_files(folder)
        write_config(run_dir, config, env)
        write_text(run_dir / MACHINE, json.dumps(redact(machine_card()), indent=2) + "\n")
    except RunFolderError:
        lock.release()
        raise
    except OSError as error:
        lock.release()
        raise _unusable(run_dir, error) from error
    return lock


def _check_same_run(run_dir: Path, wanted: dict[str, Any]) -> None:
    """Refuse to go on with a folder of another algorithm or env."""
    stored = read_json(run_dir / CONFIG)
    for name in ("algorithm", "env"):
        if stored.get(name, wanted[name]) != wanted[name]:
            raise RunFolderError(
                f"run: expected the folder of a run with {name} {wanted[name]}, received {run_dir}, which is one of "
                f"{stored[name]}. Nothing was changed. Remedy: the trainer of that run, or a new folder."
            )


class StatusFile:
    """``status.json``: process, state and env steps of the run, for monitors.

    Args:
        run_dir: folder of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STATUS
        self._watch = Stopwatch("cpu")
        self._state: RunState | None = None
        self._failed = False

    def write(self, state: RunState, step: int) -> None:
        """Writes the state, at most once a second while it stays the same; a failure is reported once, and no more."""
        self._watch.stop()
        if state == self._state and self._watch.host_seconds < STATUS_SECONDS:
            return
        try:
            values = {"pid": os.getpid(), "state": state, "step": step}
            write_text(self._path, json.dumps(values) + "\n", lasting=False)
        except OSError as error:
            if not self._failed:
                logger.warning("%s cannot be written (%s); the run goes on.", self._path, error)
            self._failed = True
        self._state = state
        self._watch.start()


def find_resumable(config: RunConfig, given: dict[str, Any]) -> tuple[Path | None, list[str]]:
    """The newest run of ``config``'s algorithm, env and seed that has steps left, by the age of its last checkpoint.

    Args:
        config: settings of the run that is asked for; ``run_dir`` says where to look.
        given: the settings that were asked for by name, which win over those that a run has stored.

    Returns:
        Its folder or None, and why each of the other runs was left out.
    """
    left_out, found = [], []
    for folder in _folders_of(config):
        reason = _why_not(folder, config, given)
        if reason:
            left_out.append(f"{folder}: {reason}")
        else:
            newest = CheckpointFolder(folder / CHECKPOINTS).files()[0]
            found.append((newest.stat().st_mtime_ns, folder))
    return max(found)[1] if found else None, left_out


def is_finished(run_dir: Path) -> bool:
    """Whether the run has come to its end, by its status."""
    return read_json(run_dir / STATUS).get("state") == "finished"


def _folders_of(config: RunConfig) -> Iterator[Path]:
    """Folders whose name is that of such a run, and others whose settings are, named after the class of the env."""
    name = run_name(config)
    for path in sorted(Path(config.run_dir).glob(f"{config.algorithm}-*")):
        number = path.name.removeprefix(name)
        is_named = path.name.startswith(name) and (not number or (number[1:].isdecimal() and number[0] == "-"))
        if path.is_dir() and (is_named or _is_of(path, config)):
            yield path


def _is_of(run_dir: Path, config: RunConfig) -> bool:
    """Whether the settings in a folder are of an algorithm, env and seed."""
    stored = read_json(run_dir / CONFIG)
    return all(
        stored.get(name) == value for name, value in config.card().items() if name in ("algorithm", "env", "seed")
    )


def _why_not(run_dir: Path, config: RunConfig, given: dict[str, Any]) -> str:
    """Why a run cannot be resumed, or an empty text."""
    stored = read_json(run_dir / CONFIG)
    if any(stored.get(name) != getattr(config, name) for name in ("env", "seed")):
        return "its config.json is missing or of another run"
    fixed = [name for name in config.fixed_on_resume if name in given and stored.get(name) != _plain(given[name])]
    if fixed:
        return f"it has another {', '.join(fixed)}"
    files = CheckpointFolder(run_dir / CHECKPOINTS).files()
    if not files:
        return "it has no checkpoint"
    if newest_common(run_dir, ranks_of_run(run_dir)) is None:
        return f"it has no checkpoint that all of its {ranks_of_run(run_dir)} ranks have written"
    total = given.get("total_steps", stored.get("total_steps", 0))
    taken = iteration_of(files[0]) * stored.get("num_envs", 0) * stored.get("num_steps", 0)
    # a run killed between its last checkpoint and its end is resumed, to end properly
    if is_finished(run_dir) and (taken >= total or total == stored.get("total_steps")):
        return "it is complete"
    return _why_locked(run_dir)


def _plain(value: Any) -> Any:
    """A setting as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _why_locked(run_dir: Path) -> str:
    lock = FolderLock(run_dir)
    try:
        if not lock.acquire():
            return "another process runs it"
    except OSError as error:
        return f"it cannot be written to: {error.strerror or error}"
    lock.release()
    return ""


def _in_the_way(path: Path) -> str:
    """What keeps a folder from being made at a path, in words."""
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            return f"a link to nothing at {place}"
        if place.exists() and not place.is_dir():
            return f"a file at {place}"
    return "something else there"


def _unusable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"run: expected a folder that can be written to, received {path}: {error.strerror or error}. Remedy: free "
        "space, the permission, or another run_dir."
    )
