"""Everything that changes while a run trains, as one object: saved, refused and restored as a whole."""

import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from torchrl_perf import __version__
from torchrl_perf.replay import DeviceReplayBuffer
from torchrl_perf.runtime.files import CheckpointError, load_checkpoint, save_checkpoint
from torchrl_perf.trainers.run.made_of import check_made_of, same_specs

__all__ = [
    "Attributes",
    "Checkpointed",
    "Stateful",
    "TrainState",
    "check_modules",
    "load_random_state",
    "random_state",
]

FORMAT = "torchrl_perf.TrainState"
VERSION = 1
ENTRIES = ("parts", "counters", "random", "notes")


@runtime_checkable
class Stateful(Protocol):
    """A part of a checkpoint: a module, an optimiser, a schedule, a replay buffer, a collector."""

    def state_dict(self) -> Mapping[str, Any]:
        """What changes during training, as tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restores it, in place."""
        ...


class Attributes(MutableMapping[str, Any]):
    """Numbers and tensors that are attributes of an object, as ``counters`` of a :class:`TrainState`.

    Args:
        owner: the object.
        names: its attributes; a leading underscore is left out of the keys.
    """

    def __init__(self, owner: object, names: Collection[str]) -> None:
        self._owner = owner
        self._names = {name.lstrip("_"): name for name in names}

    def __getitem__(self, key: str) -> Any:
        return getattr(self._owner, self._names[key])

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._owner, self._names[key], value)

    def __delitem__(self, key: str) -> None:
        del self._names[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class TrainState:
    """Everything that a run needs to continue bit for bit on the same kind of device, in one file.

    The trainers have one; your own loop makes it from its parts::

        state = TrainState(network=net, optimizer=adam, replay=buffer, env=collector, counters={"iteration": 0})
        ...
        state.counters["iteration"] += 1
        state.save("run/checkpoint.pt")  # whole or not at all
        ...
        state.load("run/checkpoint.pt")  # in place: captured graphs stay valid

    The random states of torch (CPU and ``device``), Python and NumPy are part of it. A checkpoint names its format, its
    version and what made it, and is loaded without executing code.

    Args:
        counters: numbers and tensors by name; numbers are set, tensors written in place.
        device: CUDA device whose random state counts; by default the current one, once CUDA is in use.
        made_by: name of the algorithm; a checkpoint of another one is refused.
        made_of: env and networks, as :func:`~torchrl_perf.trainers.run.made_of.describe` gives them; a checkpoint of
            others is refused.
        settings: of the run, as plain values. A file has them beside the state, so that it tells how its networks are
            made; they are no part of the state, and another run may load it with others.
        parts: whatever has ``state_dict`` and ``load_state_dict``, by name. Their states have to consist of tensors and
            plain values.

    Attributes:
        counters: as given.
        notes: plain values of the loop around it, such as the last row that was logged; saved and restored with it.

    Raises:
        ValueError: for a part without these methods, or a reserved name.
    """

    def __init__(
        self,
        *,
        counters: MutableMapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        made_by: str = "",
        made_of: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **parts: Stateful,
    ) -> None:
        for name, part in parts.items():
            if not isinstance(part, Stateful):
                raise ValueError(
                    f"TrainState: expected {name} to have state_dict and load_state_dict, received "
                    f"{type(part).__name__}. Remedy: pass numbers and tensors as counters={{{name!r}: ...}}."
                )
        if taken := sorted(set(parts) & set(ENTRIES)):
            raise ValueError(
                f"TrainState: expected parts of other names than {', '.join(ENTRIES)}, received {taken}. Remedy: "
                "other names."
            )
        self._parts: dict[str, Stateful] = dict(parts)
        self.counters: MutableMapping[str, Any] = {} if counters is None else counters
        self.notes: dict[str, Any] = {}
        self.made_by, self.made_of, self.settings = made_by, dict(made_of or {}), dict(settings or {})
        self._device = None if device is None else torch.device(device)

    def state_dict(self, *, skip: Collection[str] = ()) -> dict[str, Any]:
        """A copy of everything, on the devices where it is: tensors and plain values.

        Args:
            skip: names of parts to leave out, or ``"counters"``, ``"random"``, ``"notes"``.

        Returns:
            ``format``, ``version``, ``made_by``, ``made_of``, ``parts`` by name, ``counters``, ``random``, ``notes``.
        """
        return self._gather(Tensor.clone, skip)

    def snapshot(self, *, skip: Collection[str] = ()) -> dict[str, Any]:
        """The same on the host with the settings, to be written while training goes on; waits for the copies only."""
        return {**self._gather(_to_host, skip), "settings": dict(self.settings)}

    def load_state_dict(self, state: Mapping[str, Any], *, skip: Collection[str] = ()) -> None:
        """Restores :meth:`state_dict` in place, so that captured graphs stay valid; what is refused changes nothing.

        Args:
            state: as it was returned or loaded.
            skip: names to leave as they are, as for :meth:`state_dict`.

        Raises:
            CheckpointError: a ValueError, for what is no such state, another version, or another algorithm's.
            ValueError: for other parts, networks of other shapes, a buffer of another layout.
        """
        difference = self._check(state, skip)
        saved = state.get("parts", {})
        parts = {name: part for name, part in self._parts.items() if name not in skip}
        # a buffer comes last: it checks its state itself, and is too large to be copied for a restore
        order = sorted(parts, key=lambda name: isinstance(parts[name], DeviceReplayBuffer))
        small = {name: parts[name] for name in order if not isinstance(parts[name], DeviceReplayBuffer)}
        order = list(small) if difference else order  # load only these, to report what does not fit, and restore them
        before = {name: _copied(part, Tensor.clone) for name, part in small.items()}
        try:
            for name in order:
                _load(name, parts[name], saved[name], difference)
            if difference:
                raise CheckpointError(f"checkpoint: {difference}")
        except Exception:
            for name, part in small.items():
                part.load_state_dict(before[name])
            raise
        if "counters" not in skip:
            self._load_counters(state["counters"])
        if "notes" not in skip:
            self.notes = dict(state["notes"])
        if "random" not in skip:
            load_random_state(state["random"], self._random_device())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a checkpoint, whole or not at all.

        Raises:
            OSError: for a full disk, a folder that is read-only; an earlier file of that name is as it was.
            CheckpointError: for a part whose state is not made of tensors and plain values.
        """
        return save_checkpoint(self.snapshot(), path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads a checkpoint and restores it.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: a CheckpointError for a file that is cut off, foreign, of another version or holds code;
                otherwise as :meth:`load_state_dict`.
        """
        self.load_state_dict(load_checkpoint(path, self._device or "cpu"))

    def _gather(self, copy: Callable[[Tensor], Tensor], skip: Collection[str]) -> dict[str, Any]:
        entries: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "made_by": {"algorithm": self.made_by, "torchrl_perf": __version__, "torch": str(torch.__version__)},
            "made_of": dict(self.made_of),
            "parts": {name: _copied(part, copy) for name, part in self._parts.items() if name not in skip},
            "counters": tree_map_only(Tensor, lambda value: copy(value.detach()), dict(self.counters)),
            "random": random_state(self._random_device()),
            "notes": dict(self.notes),
        }
        return {name: entry for name, entry in entries.items() if name not in skip}

    def _check(self, state: Mapping[str, Any], skip: Collection[str]) -> str:
        """Refuse a state that cannot be restored, before anything changes; returns how env or networks differ."""
        check_format(state, self.made_by)
        saved = state.get("made_of", {})
        difference = check_made_of(self.made_of, saved)
        if difference and not same_specs(self.made_of, saved):
            raise CheckpointError(f"checkpoint: {difference}")
        absent = {name for name in ENTRIES if name not in skip} - set(state)
        expected, received = set(self._parts) - set(skip), set(state.get("parts", {}))
        counters = set(self.counters) ^ set(state.get("counters", {})) if "counters" not in skip else set()
        if absent or expected - received or received - set(self._parts) or counters:
            raise ValueError(
                f"checkpoint: expected parts {sorted(expected)} and counters {sorted(self.counters)}, received "
                f"{sorted(received)} and {sorted(state.get('counters', {}))}. Nothing was changed. Remedy: make the "
                "trainer or the TrainState of the same parts as the one that was saved."
            )
        if "counters" not in skip:
            check_shapes("counters", _shapes(self.counters), _shapes(state["counters"]))
        check_modules({name: part for name, part in self._parts.items() if name not in skip}, state.get("parts", {}))
        return difference

    def _load_counters(self, saved: Mapping[str, Any]) -> None:
        for name in list(self.counters):
            current = self.counters[name]
            if isinstance(current, Tensor):
                with torch.no_grad():
                    current.copy_(saved[name])
            else:
                self.counters[name] = saved[name]

    def _random_device(self) -> torch.device:
        if self._device is not None:
            return self._device
        return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


class Checkpointed:
    """Methods that a run needs of a trainer beside its loop, for a trainer with a :class:`TrainState`.

    Attributes:
        train_state: everything that changes between two iterations.
        evaluation_env: an env ``[E]`` for the evaluations during a run, or a vector env of Gymnasium. The settings give
            one where they gave the env itself, and so does the id of Gymnasium's envs without wrappers; set it before
            :func:`~torchrl_perf.trainers.run.run.train` for others that came from Python.
    """

    train_state: TrainState
    evaluation_env: Any = None

    def summarise(self, row: dict[str, float]) -> dict[str, float]:
        """A row of metrics before it is logged; unchanged here, a trainer may add summaries.

        Args:
            row: name to value, as :meth:`~torchrl_perf.metrics.DeviceMetrics.finish_flush` reads it.
        """
        return row

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that changes between iterations; see :meth:`TrainState.state_dict`."""
        return self.train_state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores :meth:`state_dict` in place; see :meth:`TrainState.load_state_dict`.

        Raises:
            ValueError: for other networks, or a buffer of another layout or sampler; nothing is changed then.
        """
        self.train_state.load_state_dict(state)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a checkpoint, whole or not at all; see :meth:`TrainState.save`."""
        return self.train_state.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads a checkpoint; see :meth:`TrainState.load`."""
        self.train_state.load(path)


def random_state(device: torch.device) -> dict[str, Any]:
    """State of the generators of torch (CPU and ``device``), Python and NumPy (its global one), as plain values."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": {"version": version, "internal": torch.tensor(internal), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.tensor(np.asarray(keys, dtype=np.int64)),
            "rest": [int(position), int(has_gauss), float(cached)],
        },
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restores :func:`random_state`."""
    torch.set_rng_state(state["cpu"].cpu())
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    np.random.set_state((numpy["name"], numpy["keys"].cpu().numpy().astype(np.uint32), *numpy["rest"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def check_format(state: Any, made_by: str = "") -> None:
    """Check that a loaded object is the state of a :class:`TrainState` of this version, and of this algorithm.

    Args:
        state: what a checkpoint file holds.
        made_by: name of the algorithm; any where it is empty.

    Raises:
        CheckpointError: otherwise.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        received = sorted(map(str, state))[:8] if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            f"checkpoint: expected one that torchrl_perf has saved, received {received}. Remedy: the file of a run, in "
            "its folder checkpoints; weights of other origin go through load_state_dict of the network."
        )
    made = state.get("made_by", {})
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint: expected format version {VERSION}, received {state.get('version')}, written by torchrl_perf "
            f"{made.get('torchrl_perf')}. Remedy: go on with that version of the package."
        )
    if made_by and made.get("algorithm") != made_by:
        raise CheckpointError(
            f"checkpoint: expected one of {made_by}, received one of {made.get('algorithm') or 'another loop'}. "
            "Remedy: the trainer that has saved it."
        )


def check_modules(parts: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that a checkpoint holds the tensors of the modules among ``parts``, in their shapes.

    Args:
        parts: what a trainer saves, by name; optimisers and the like are not looked at.
        saved: their states.

    Raises:
        ValueError: naming what differs.
    """
    for name, part in parts.items():
        if not isinstance(part, nn.Module):
            continue
        check_shapes(name, _shapes(part.state_dict()), _shapes(saved.get(name, {})))


def check_shapes(name: str, expected: Mapping[str, list[int]], received: Mapping[str, list[int]]) -> None:
    """Check that the tensors of a part have the names and shapes that a checkpoint has for it.

    Raises:
        ValueError: naming what differs.
    """
    differing = sorted(key for key in {*expected, *received} if expected.get(key) != received.get(key))
    if differing:
        listed = ", ".join(f"{key}: {expected.get(key)}, received {received.get(key)}" for key in differing[:4])
        raise ValueError(
            f"checkpoint: expected in {name} {listed}{', ...' if differing[4:] else ''}. Nothing was changed. Remedy: "
            "make the trainer with the settings, such as hidden_size, that the checkpoint was saved with."
        )


def _load(name: str, part: Stateful, state: Any, difference: str = "") -> None:
    """Load one part; an error of its class is raised again as one about the checkpoint.

    Args:
        name: of the part.
        part: what is loaded into.
        state: what it is loaded with.
        difference: how env or networks differ, for the message.
    """
    try:
        part.load_state_dict(state)
    except (ValueError, RuntimeError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"checkpoint: expected in {name} what a {type(part).__name__} can load, received something else: "
            f"{reason.rstrip('.')}. Nothing was changed. Remedy: the parts and settings that it was saved with."
            + (f" They are others: {difference}" if difference else "")
        ) from error


def _shapes(state: Mapping[str, Any]) -> dict[str, list[int]]:
    return {key: list(value.shape) for key, value in state.items() if isinstance(value, Tensor)}


def _copied(part: Stateful, copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    state = dict(part.state_dict())
    if isinstance(part, DeviceReplayBuffer) and copy is Tensor.clone:
        return state  # copies already, and the largest part
    return tree_map_only(Tensor, lambda value: copy(value.detach()), state)


def _to_host(value: Tensor) -> Tensor:
    return value.to("cpu", copy=True)
