"""A memory below networks that learn from a replay buffer: slices of streams, each with the state it starts from."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode

from torchrl_perf.modules.memory.module import INIT_KEY, MemoryModule
from torchrl_perf.trainers.config_checks import Checks, is_count
from torchrl_perf.trainers.memory import FEATURES, INPUT, MEMORY_SETTINGS, MemorySettings, remembers

__all__ = [
    "CRITIC_FEATURES",
    "SLICE_MEMORY_SETTINGS",
    "OwnFeatures",
    "SliceMemory",
    "SliceMemorySettings",
    "slice_memory_of",
]

SLICE_MEMORY_SETTINGS = (*MEMORY_SETTINGS, "slice_length", "burn_in")
"""Fields of :class:`SliceMemorySettings`."""
ASKED: dict[str, tuple[Any, str]] = {
    "n_step": (1, "which learns from each step of a slice"),
    "beta_final": (None, "whose slices have one exponent throughout"),
}
"""What slices with a memory ask of other settings, and why."""
CRITIC_FEATURES = "memory_critic_features"
ROWS = "memory_rows"
BEGINS = "memory_begins"  # a sampler marks the first row of each slice in "is_init", where an episode may go on
GREATEST = 0.9  # share of the greatest error of a slice in its priority, that of R2D2


@dataclass(frozen=True)
class SliceMemorySettings(MemorySettings):
    """The memory of networks that learn from slices of a replay buffer.

    With a memory ``n_step`` and ``beta_final`` are 1 and None where they are left out, and ``learning_starts`` is what
    fills a slice, if the preset has less.
    """

    slice_length: int = 32
    """Steps of a slice, with a memory: an update learns from minibatch_size / slice_length slices of streams."""
    burn_in: int = 8
    """First steps of a slice from which the memory finds its state, and nothing else is learnt."""

    def _room_of_memory(self) -> dict[str, Any]:
        config, room = cast("Any", self), {name: wanted for name, (wanted, _) in ASKED.items()}
        sizes = (config.learning_starts, config.slice_length, config.num_envs)
        if all(isinstance(size, int) for size in sizes):
            starts, length, num_envs = sizes
            room["learning_starts"] = max(starts, length * num_envs)
        return room

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("slice_length",), is_count, "a positive integer")
        checks.each(("burn_in",), lambda value: value >= 0, "0 or a positive integer")
        if checks.sound("memory") and self.memory != "none":
            self._check_slices(checks, cast("Any", self))
        else:
            checks.idle(SLICE_MEMORY_SETTINGS[1:], "memory", lambda memory: memory == "none")

    def _check_slices(self, checks: Checks, config: Any) -> None:
        length, memory = self.slice_length, f"memory={self.memory!r}"
        if checks.sound("slice_length", "burn_in") and self.burn_in >= length:
            checks.add(
                "burn_in",
                f"burn_in: expected fewer steps than slice_length = {length}, or nothing is learnt, received "
                f"{self.burn_in}. Remedy: longer slices, or burn_in={length // 4}.",
            )
        if checks.sound("slice_length", "minibatch_size") and config.minibatch_size % length:
            checks.add(
                "minibatch_size",
                f"minibatch_size: expected a multiple of slice_length = {length} with {memory}, received "
                f"{config.minibatch_size}. Remedy: minibatch_size={-(-config.minibatch_size // length) * length}.",
            )
        for name, (wanted, why) in ASKED.items():
            if checks.sound(name) and (value := getattr(config, name)) != wanted:
                checks.add(
                    name, f"{name}: expected {wanted} with {memory}, {why}, received {value}. Remedy: {name}={wanted}."
                )
        if checks.sound("slice_length", *config.sizes):
            steps = config.rows_at_first_update // config.num_streams
            if steps < length:
                checks.add(
                    "slice_length",
                    f"slice_length: expected at most {steps}, the steps of each env in the buffer at the first update, "
                    f"received {length}. Remedy: learning_starts={length * config.num_envs}, within the capacity.",
                )


class OwnFeatures(nn.Module):
    """Passes features on; of an entry that holds those of two memories, the half of the network that it is part of.

    The networks of a loss read one entry of the next states, and each has to get there what its own memory makes of
    them: the first half is that of the learning memory, the second that of its delayed copy.

    Args:
        size: H, of the features of one memory.

    Attributes:
        delayed: whether the network is a delayed copy.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.delayed = size, False

    def forward(self, features: Tensor) -> Tensor:
        """``[*, H]`` of features ``[*, H]`` or ``[*, 2 H]``."""
        if features.shape[-1] == self.size:
            return features
        return features[..., self.size :] if self.delayed else features[..., : self.size]

    def extra_repr(self) -> str:
        """Size, and which half is read."""
        return f"{self.size}, delayed={self.delayed}"


class SliceMemory:
    """Slices ``[S]`` of L steps as rows whose features the memory makes, as R2D2 does.

    Kapturowski et al., "Recurrent experience replay in distributed reinforcement learning", ICLR 2019
    (https://openreview.net/forum?id=r1lyTjAqYX). A slice starts from the state that the policy had there when it acted,
    which is stored. The first ``burn_in`` steps bring the states of the memory and of its delayed copy up to date,
    without a gradient. From the others is learnt.

    The next state of a step is read by one step of a memory from the state after it, before any reset: the last
    observation of an episode belongs to its own history, and no value reaches over its end.

    Dimension key: ``S`` slices, ``L`` steps of one, ``K`` of them burnt in, ``H`` features.

    Args:
        trunk: what :func:`~torchrl_perf.trainers.memory.make_trunk` gives.
        length: L.
        burn_in: K.
        both: whether the learning memory reads next states too, as double Q-learning asks for.

    Attributes:
        online: the memory that learns, and the encoder below it.
        delayed: its copy, for targets.
        written: entries that the policy writes and no one stores.
    """

    def __init__(self, trunk: Sequence[TensorDictModuleBase], length: int, burn_in: int, *, both: bool = True) -> None:
        self.online = TensorDictSequential(*trunk)
        self.delayed = copy.deepcopy(self.online).requires_grad_(False)
        self.length, self.burn_in, self._both = length, burn_in, both
        memory = cast("MemoryModule", trunk[-1])
        self.state_keys: list[NestedKey] = list(memory.state_keys)
        self.written: tuple[NestedKey, ...] = (INPUT, FEATURES, *memory.out_keys[1:])
        self._inputs: list[NestedKey] = list(trunk[0].in_keys)

    def delay(self, network: nn.Module) -> None:
        """Lets a delayed copy of a network read what the delayed memory makes of next states."""
        for part in network.modules():
            if isinstance(part, OwnFeatures):
                part.delayed = True

    def stored(self, batch: TensorDictBase) -> TensorDictBase:
        """What a buffer stores of a batch ``[N, T]``: the flag of first steps by a name that samplers leave alone."""
        begins = batch.get(INIT_KEY)
        return batch.exclude(INIT_KEY, ("next", INIT_KEY)).set(BEGINS, begins)

    def shaped(self, sample: TensorDictBase) -> TensorDictBase:
        """Slices ``[S]`` with entries ``[S, L, *]``, of rows ``[S * L]`` slice after slice."""
        slices = sample.unflatten(0, (len(sample) // self.length, self.length))
        slices.batch_size = slices.batch_size[:1]
        if (weight := slices.get("priority_weight", None)) is not None:
            slices.set("priority_weight", weight[:, 0])  # one for all rows of a slice
        return slices

    def probed(self, rows: TensorDictBase) -> TensorDictBase:
        """Slices ``[b]`` of one step, of rows ``[b]`` of a batch."""
        slices = self.stored(rows).unsqueeze(-1)
        slices.batch_size = slices.batch_size[:1]
        return slices

    def read(self, slices: TensorDictBase) -> TensorDictBase:
        """Rows ``[S * (L - K)]`` with features, whose gradient reaches the memory, of slices ``[S]``.

        Written under "next" are the features of both memories, ``[*, 2 H]``, for :class:`OwnFeatures`.
        """
        rows = self._rows(slices)
        features, states = self._sequence(self.online, slices)
        rows.set(FEATURES, features)
        rows.set(("next", FEATURES), torch.cat(self._next_features(slices, states), -1))
        return rows.flatten(0, 1)

    @torch.no_grad()
    def prepared(self, slices: TensorDictBase) -> TensorDictBase:
        """Slices ``[S]`` with the rows ``[S, L - K]`` that an actor and its critics read, all without a gradient.

        The actor reads the features of the memory; so do the critics by a name of their own, and of next states what
        the delayed memory makes. The actor reads next states by the same, or with ``both`` by the learning memory.
        """
        rows = self._rows(slices)
        features, states = self._sequence(self.online, slices)
        own, later = self._next_features(slices, states)
        rows.set(FEATURES, features).set(CRITIC_FEATURES, features)
        rows.set(("next", FEATURES), own).set(("next", CRITIC_FEATURES), later)
        return slices.copy().set(ROWS, rows)

    def rows(self, prepared: TensorDictBase) -> TensorDictBase:
        """The rows ``[S, L - K]`` of :meth:`prepared` slices."""
        return cast("TensorDictBase", prepared.get(ROWS))

    def learnt(self, prepared: TensorDictBase) -> TensorDictBase:
        """The same with features of the critics whose gradient reaches the memory."""
        features, _ = self._sequence(self.online, prepared)
        return self.rows(prepared).copy().set(CRITIC_FEATURES, features)

    def priority(self, errors: Tensor) -> Tensor:
        """``[S]`` priorities of slices, of absolute errors of the rows that :meth:`read` gave."""
        errors = errors.reshape(-1, self.length - self.burn_in)
        return GREATEST * errors.amax(1) + (1 - GREATEST) * errors.mean(1)

    def _burnt(self, slices: TensorDictBase) -> int:
        """Steps that are burnt in: K, and fewer where a memory estimate is made of slices of one step."""
        return min(self.burn_in, slices.get(BEGINS).shape[1] - 1)

    def _rows(self, slices: TensorDictBase) -> TensorDictBase:
        """What is learnt from, ``[S, L - K]``, apart from features: no observations and states, which they hold."""
        (count, steps), burn = slices.get(BEGINS).shape[:2], self._burnt(slices)
        rows = TensorDict({}, batch_size=[count, steps - burn], device=slices.device)
        left_out = {*self._inputs, *self.state_keys, BEGINS}
        left_out |= {unravel_key(("next", key)) for key in left_out}
        for key in slices.keys(True, True):
            if key in left_out:
                continue
            value = slices.get(key)
            if key == "priority_weight":
                value = value.unsqueeze(-1).expand(count, steps)
            rows.set(key, value[:, burn:])
        return rows

    def _next_features(self, slices: TensorDictBase, states: dict[NestedKey, Tensor]) -> tuple[Tensor, Tensor]:
        """Features ``[S, L - K, H]`` of the next states, of both memories; twice the delayed one's where that will do.

        Args:
            slices: ``[S]``.
            states: of the learning memory after each step.
        """
        with torch.no_grad():
            _, of_delayed = self._sequence(self.delayed, slices)
            later = self._following(self.delayed, slices, of_delayed)
            return (self._following(self.online, slices, states) if self._both else later), later

    def _sequence(self, trunk: TensorDictSequential, slices: TensorDictBase) -> tuple[Tensor, dict[NestedKey, Tensor]]:
        """Features ``[S, L - K, H]`` after the burnt steps, and the states after each of these, without a gradient."""
        burn = self._burnt(slices)
        states = {key: slices.get(key)[:, 0] for key in self.state_keys}
        if burn:
            with torch.no_grad(), set_recurrent_mode(True):
                before = trunk(self._steps(slices, states, slice(None, burn)))
            states = {key: before.get(unravel_key(("next", key)))[:, -1] for key in self.state_keys}
        with set_recurrent_mode(True):  # a compiler drops the names of dimensions
            known = trunk(self._steps(slices, states, slice(burn, None)))
        after = {key: known.get(unravel_key(("next", key))).detach() for key in self.state_keys}
        return known.get(FEATURES), after

    def _steps(self, slices: TensorDictBase, states: dict[NestedKey, Tensor], part: slice) -> TensorDictBase:
        """A sequence ``[S, T]`` for the memory, from states ``[S, *]``."""
        begins = slices.get(BEGINS)[:, part]
        found = TensorDict({}, batch_size=begins.shape[:2], device=slices.device)
        found.set(INIT_KEY, begins)
        for key in self._inputs:
            found.set(key, slices.get(key)[:, part])
        for key, state in states.items():
            found.set(key, state.unsqueeze(1).expand(-1, begins.shape[1], *state.shape[1:]))
        return found

    def _following(
        self, trunk: TensorDictSequential, slices: TensorDictBase, states: dict[NestedKey, Tensor]
    ) -> Tensor:
        """Features ``[S, L - K, H]`` of the next observations, each one step from the state after its own step."""
        burn = self._burnt(slices)
        begins = slices.get(BEGINS)[:, burn:]
        found = TensorDict({}, batch_size=begins.shape[:2], device=slices.device)
        found.set(INIT_KEY, torch.zeros_like(begins))  # it is of the same episode, whatever begins after it
        for key in self._inputs:
            found.set(key, slices.get(unravel_key(("next", key)))[:, burn:])
        for key, state in states.items():
            found.set(key, state)
        with set_recurrent_mode(False):
            return trunk(found).get(FEATURES)


def slice_memory_of(policy: nn.Module, config: Any, *, both: bool) -> SliceMemory | None:
    """How slices are read with the memory below a policy; None where the settings ask for none.

    Args:
        policy: a sequence of encoder, memory and what acts.
        config: of the run.
        both: as for :class:`SliceMemory`.
    """
    if not remembers(config):
        return None
    return SliceMemory(list(cast("Any", policy))[:-1], config.slice_length, config.burn_in, both=both)
