"""The recurrent trunk of an actor and its critic: settings, modules, and streams in place of single rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn
from torchrl.data import TensorSpec
from torchrl.modules import set_recurrent_mode

from torchrl_perf.modules.memory.encoder import NarrowEncoder
from torchrl_perf.modules.memory.module import INIT_KEY, MemoryModule
from torchrl_perf.modules.memory.recurrent import LRU, DeviceGRU, DeviceLSTM, MinGRU
from torchrl_perf.modules.mlp import hidden_layers
from torchrl_perf.trainers.config_checks import Checks, idle_problems, is_count
from torchrl_perf.trainers.normalization import normalized
from torchrl_perf.trainers.spaces import Inputs, inputs_of, observation_inputs

__all__ = [
    "FEATURES",
    "INPUT",
    "MEMORY_SETTINGS",
    "STREAM_MEMORY_SETTINGS",
    "MemorySettings",
    "StreamMemorySettings",
    "Streams",
    "actor_inputs",
    "check_streams",
    "head_inputs",
    "make_trunk",
    "on_inputs",
    "refuse_idle",
    "refuse_memory",
    "remembers",
]

MEMORY_SETTINGS = ("memory", "memory_size")
"""Fields of :class:`MemorySettings`."""
STREAM_MEMORY_SETTINGS = (*MEMORY_SETTINGS, "burn_in")
"""Fields of :class:`StreamMemorySettings`."""
INPUT, FEATURES = "memory_input", "memory_features"
VALID = "valid"  # an env's flag of the rows that count
KINDS: dict[str, type[MemoryModule]] = {"gru": DeviceGRU, "lstm": DeviceLSTM, "mingru": MinGRU, "lru": LRU}


@dataclass(frozen=True)
class MemorySettings:
    """A memory of earlier observations, for tasks that one observation does not tell enough of."""

    memory: Literal["none", "gru", "lstm", "mingru", "lru"] = "none"
    """Recurrent layer below the other networks: a GRU (arXiv:1406.1078), an LSTM, or one that is linear in its state
    and so fast over long sequences, minGRU (arXiv:2410.01201) or a linear recurrent unit (arXiv:2303.06349)."""
    memory_size: int = 128
    """Hidden units of the memory."""

    def _room(self) -> dict[str, Any]:
        room = super()._room()  # pyright: ignore[reportAttributeAccessIssue]  of the config beside it
        known = isinstance(self.memory, str) and self.memory in KINDS
        return {**room, **self._room_of_memory()} if known else room

    def _room_of_memory(self) -> dict[str, Any]:
        """Values of other settings that go with a memory, where these are left out."""
        return {}

    def _check(self, checks: Checks) -> None:
        super()._check(checks)  # pyright: ignore[reportAttributeAccessIssue]  of the config beside it
        checks.each(("memory_size",), is_count, "a positive integer")


@dataclass(frozen=True)
class StreamMemorySettings(MemorySettings):
    """The memory of an actor and its critic, which learn from whole streams of some envs."""

    burn_in: int = 0
    """First steps of each stream from which the memory finds its state anew, and nothing else is learnt."""

    def _room_of_memory(self) -> dict[str, Any]:
        sizes = [getattr(self, name) for name in ("num_envs", "minibatches")]
        return {"minibatches": math.gcd(*sizes)} if all(isinstance(size, int) for size in sizes) else {}

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("burn_in",), lambda value: value >= 0, "0 or a positive integer")
        if not checks.sound("memory") or self.memory == "none":
            return
        config = cast("Any", self)
        for name, others in (("minibatches", ["num_envs"]), ("burn_in", ["num_steps"])):
            if checks.sound(name, *others) and (problem := stream_problems(config).get(name)):
                checks.add(name, problem)
        if checks.sound("shared_trunk") and config.shared_trunk:
            checks.add(
                "shared_trunk",
                f"shared_trunk: expected False with memory={self.memory!r}, which actor and critic share already, "
                "received True. Remedy: leave it out.",
            )


def stream_problems(config: Any) -> dict[str, str]:
    """What of a config does not fit minibatches of whole streams, by field."""
    problems = {}
    if config.num_envs % config.minibatches:
        problems["minibatches"] = (
            f"minibatches: expected a divisor of num_envs = {config.num_envs} with memory={config.memory!r}, whose "
            f"minibatches are whole streams, received {config.minibatches}. Remedy: minibatches="
            f"{math.gcd(config.num_envs, config.minibatches)}, or a number of envs that they divide."
        )
    if config.burn_in >= config.num_steps:
        problems["burn_in"] = (
            f"burn_in: expected fewer steps than num_steps = {config.num_steps}, or nothing is learnt, received "
            f"{config.burn_in}. Remedy: longer streams, or burn_in={config.num_steps // 4}."
        )
    return problems


def check_streams(config: Any) -> None:
    """Refuse settings that do not fit the streams of a memory that came from Python.

    Raises:
        ValueError: for minibatches that would split streams, a burn-in as long as they are, a trunk that actor and
            critic share twice.
    """
    for problem in stream_problems(config).values():
        raise ValueError(problem.replace("memory='none'", "a memory"))


def refuse_idle(config: Any, names: Sequence[str]) -> None:
    """Refuse settings of a memory that nothing reads.

    Args:
        config: of the run.
        names: the settings.

    Raises:
        ValueError: for one that differs from what it is if left out.
    """
    where, remedy = "without a memory that reads it", "memory='gru', for example"
    for problem in idle_problems(config, names, where, remedy).values():
        raise ValueError(problem)


def remembers(config: Any) -> bool:
    """Whether a config asks for a memory."""
    return getattr(config, "memory", "none") != "none"


def refuse_memory(config: Any, given: Mapping[str, Any], env: Any) -> None:
    """Refuse what no memory can be put below.

    Args:
        config: of a run that asks for a memory.
        given: networks from Python by name, or None for those that were not given.
        env: of the run.

    Raises:
        ValueError: for networks from Python, and an env whose rows do not all count.
    """
    expected, received = "", ""
    if parts := [name for name, one in given.items() if one is not None]:
        expected, received = "networks of the trainer's own", f"{' and '.join(parts)} from Python"
    elif env is not None and VALID in env.observation_spec.keys():
        expected, received = "an env whose rows all count", f"{type(env).__name__}, with {VALID!r}"
    if expected:
        raise ValueError(
            f"memory: expected with {config.memory!r} {expected}, received {received}. Remedy: memory='none'."
        )


def head_inputs(env: Any, config: Any) -> Inputs:
    """What the perceptrons of actor and critic read: the features of the memory, or else the observation."""
    return Inputs([FEATURES], config.memory_size) if remembers(config) else observation_inputs(env, config)


def actor_inputs(observation: TensorSpec, config: Any) -> Inputs:
    """The same of an actor that is made for the spec of its observation."""
    return Inputs([FEATURES], config.memory_size) if remembers(config) else inputs_of(observation, config)


def on_inputs(network: nn.Module, inputs: Inputs, config: Any, device: Any) -> nn.Module:
    """A network of ``[*, O]`` as one of its inputs, normalised where the settings ask for it; a memory does that below.

    Args:
        network: of one vector.
        inputs: what it reads.
        config: of the run.
        device: of the statistics.
    """
    if remembers(config):
        return network
    return inputs.network(normalized(network, inputs, config, device), precision=config.precision, device=device)


def make_trunk(env: Any, config: Any) -> list[TensorDictModuleBase]:
    """What actor and critic stand on: a layer that reads the observation, and the memory. Empty without one.

    Args:
        env: or anything with its specs and device.
        config: of the run.
    """
    if not remembers(config):
        return []
    inputs = observation_inputs(env, config)
    size, place = config.memory_size, {"precision": config.precision, "device": env.device}
    layers = hidden_layers([inputs.size, size], config.activation, layer_norm=config.layer_norm, device=env.device)
    nn.init.orthogonal_(cast("nn.Linear", layers[0]).weight, 2**0.5)
    nn.init.zeros_(cast("nn.Linear", layers[0]).bias)
    reads = normalized(NarrowEncoder(*layers, precision=config.precision), inputs, config, env.device)
    encoder = TensorDictModule(inputs.network(reads, **place), in_keys=inputs.keys, out_keys=[INPUT])
    make: Any = KINDS[config.memory]
    return [encoder, make(size, size, in_key=INPUT, out_key=FEATURES, device=env.device)]


class Streams:
    """Batches as streams ``[N]`` of T steps, each with the state that it starts from, and a trunk that reads them.

    Args:
        trunk: what :func:`make_trunk` gives.
        burn_in: K, first steps that bring the state up to date, without a gradient, and are not learnt from.

    Attributes:
        trunk: as one module, whose parameters are those of the encoder and the memory.
        state_keys: root entries that hold the states.
        written: entries that the trunk adds to a batch and no one reads later.
    """

    def __init__(self, trunk: Sequence[TensorDictModuleBase], burn_in: int = 0) -> None:
        self.trunk, self.burn_in = TensorDictSequential(*trunk), burn_in
        memory = cast("MemoryModule", trunk[-1])
        self.state_keys: list[NestedKey] = list(memory.state_keys)
        self.written: list[NestedKey] = [INPUT, FEATURES, *memory.out_keys[1:]]

    def rows(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> TensorDictBase:
        """The streams ``[N]`` of a batch ``[N, T]``: entries ``[N, T, *]`` and the first states ``[N, L, S]``.

        Args:
            batch: of a collector.
            keys: the entries that the loss reads.
        """
        wanted = [key for key in keys if key not in self.state_keys]
        streams = TensorDict({}, batch_size=batch.batch_size[:1], device=batch.device)
        for key in wanted:
            streams.set(key, batch.get(key))
        for key in self.state_keys:
            streams.set(key, batch.get(key)[:, 0])
        return streams

    def learnt(self, steps: int) -> slice:
        """The steps that are learnt from, of streams of so many; of one step alone, as of an estimate, that one."""
        return slice(min(self.burn_in, steps - 1), None)

    def read(self, streams: TensorDictBase) -> TensorDictBase:
        """A batch ``[B, T - K]`` with the features of the memory, of streams ``[B]``."""
        steps = streams.get(INIT_KEY).shape[1]
        states = {key: streams.get(key) for key in self.state_keys}
        learnt = self.learnt(steps)
        with set_recurrent_mode(True):  # a compiler drops the names of dimensions
            if learnt.start:
                with torch.no_grad():
                    before = self.trunk(self._steps(streams, states, slice(learnt.start)))
                states = {key: before.get(unravel_key(("next", key)))[:, -1] for key in self.state_keys}
            return self.trunk(self._steps(streams, states, learnt))

    def _steps(self, streams: TensorDictBase, states: dict[NestedKey, Tensor], part: slice) -> TensorDictBase:
        """Some steps of streams ``[B]`` as a batch, from states ``[B, *]``."""
        steps = streams.get(INIT_KEY)[:, part].shape[1]
        batch = TensorDict({}, batch_size=[streams.shape[0], steps], device=streams.device)
        for key in streams.keys(True, True):
            if key not in states:
                batch.set(key, streams.get(key)[:, part])
        for key, state in states.items():
            batch.set(key, state.unsqueeze(1).expand(-1, steps, *state.shape[1:]))
        return batch
