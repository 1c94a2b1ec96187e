"""The bookkeeping of auto-reset: episodes, time limit, masked resets and TensorDicts of batched envs.

Dimension key: ``N`` envs, ``G`` members of a group (such as agents).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded
from torchrl.envs import EnvBase

from torchrl_perf.envs.arguments import check_count, check_float, check_seed, resolve_device
from torchrl_perf.envs.drawing import Line, bars, heights, lines
from torchrl_perf.envs.repeated_steps import is_repeated, joined
from torchrl_perf.functional.rows.copies import copy_all_
from torchrl_perf.runtime.draws import Draw
from torchrl_perf.runtime.upstream.tensordicts import unchecked

__all__ = ["AutoResetEnv", "Transition"]

State = dict[str, Tensor]
Entries = dict[NestedKey, Tensor]


class Transition(NamedTuple):
    """The result of one step.

    Attributes:
        next_state: each entry of the state after the step, ``[N, ...]``; an entry that does not change may be returned
            as it was passed.
        entries: what is written under "next" beside observations and done flags, such as rewards; new tensors.
        terminated: bool ``[N]``.
        truncated: bool ``[N]``, rows that the task cuts for a reason beside the time limit; None for none.
    """

    next_state: State
    entries: Entries
    terminated: Tensor
    truncated: Tensor | None = None


class AutoResetEnv(EnvBase):
    """``num_envs`` copies of one task that reset inside the step, without a host wait.

    Users derive from :class:`DeviceEnv` (one state tensor, one observation) or :class:`StructuredEnv` (named state
    tensors, several keys, groups), whose docstrings say what a step, a reset and a mask do. This class holds what both
    need and reaches the task by three hooks, :meth:`_fresh`, :meth:`_transition` and :meth:`_observation`.

    The state is a dict of tensors ``[N, ...]``, each a buffer that is written in place. The hooks get these buffers;
    the env never returns one.

    Args:
        num_envs: number of envs N, at least 1.
        device: where everything lives. Default: torch's default device.
        dtype: float type of the env.
        max_episode_steps: ``truncated`` is True from the step that brings the episode to this length.

    Raises:
        ValueError: ``num_envs`` or ``max_episode_steps`` below 1, an unknown device.
        TypeError: a ``dtype`` that is not a float type.
        RuntimeError: CUDA asked for where there is none.
    """

    resets_inside_step: bool = True
    """Mark for collectors: ``_step_and_maybe_reset`` needs no host and returns nothing by reference. False where a
    subclass has a ``_reset`` of its own, which TorchRL's own step calls for the rows that have ended."""
    resets_nonfinite: bool = False
    """Whether a row whose state has become NaN or infinite is truncated and re-drawn; set it before the first step."""

    tensor_parts: ClassVar[tuple[str, ...]] = ("_advance", "_renewed", "_root_entries")
    """Methods of tensors alone, which together do nearly all of a step and a masked reset: what a collector compiles
    of an env below transforms where the compiler does not trace the rest."""

    scene_half_width: ClassVar[float] = 1.0
    """Half the width of a picture of :meth:`render`, in units of :meth:`scene`."""

    elapsed: Tensor
    """Steps since the reset, int32 ``[N, 1]``."""

    has_own_step: bool
    """Whether a subclass overrides ``_step``, which is then called inside TorchRL's own ``step``."""

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.float32,
        max_episode_steps: int | None = None,
    ) -> None:
        """Check the arguments; specs and state follow in :meth:`_begin`."""
        name = type(self).__name__
        check_count(name, "num_envs", num_envs)
        if max_episode_steps is not None:
            check_count(name, "max_episode_steps", max_episode_steps)
        check_float(name, dtype)
        super().__init__(device=resolve_device(name, device), batch_size=(num_envs,))
        self.has_own_step = self._overrides("_step")
        self._has_own_reset = self._overrides("_reset") and not self._overrides("_step_and_maybe_reset")
        if self._has_own_reset:
            self.resets_inside_step = False  # its _reset is to be called for rows that end, too
        self.dtype = dtype
        self.num_envs = num_envs
        self.max_episode_steps = max_episode_steps
        self._buffer_of: dict[str, str] = {}
        self._group_shapes: dict[str, torch.Size] = {}
        self._info_keys: tuple[NestedKey, ...] = ()
        self._stepped: Entries | None = None

    @property
    def step_draws(self) -> Sequence[Draw]:
        """Random numbers that one step takes through :mod:`torchrl_perf.runtime.draws`, for a collector to draw ahead.

        None by default: whatever a task draws itself stays where it is.
        """
        return ()

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(AutoResetEnv, method)

    def _begin(self, seed: int | None, prefix: str) -> None:
        """Draw the first states and make their buffers, named ``prefix`` and their own name. The specs are set."""
        if seed is not None:
            self.set_seed(seed)
        for name, value in self._fresh(None).items():
            self._buffer_of[name] = prefix + name
            # a state that is an expanded constant would share its memory between rows
            self.register_buffer(prefix + name, value.contiguous().clone())
        self.register_buffer("elapsed", torch.zeros(self.num_envs, 1, dtype=torch.int32, device=self.device))

    # -- what a task is --------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _fresh(self, ended: Tensor | None) -> State:
        """Return initial states, entries ``[N, ...]``, of which those of the rows ``ended`` are used.

        Args:
            ended: bool ``[N, 1]``, rows that start over; an entry that is left out keeps its value in them. None at
                construction and a full reset, where all rows start over and no entry may be left out.
        """

    @abc.abstractmethod
    def _transition(self, state: State, tensordict: TensorDictBase) -> Transition:
        """Step ``state`` under the action in ``tensordict``; ``state`` must not be written to."""

    @abc.abstractmethod
    def _observation(self, state: State) -> Entries:
        """Return what is observed of ``state``, at the root and under "next"; pure."""

    def _group_flags(self, step: Transition, truncated: Tensor) -> Entries:
        """Return "terminated" and "truncated" of each group, ``[N, G, 1]``; "done" follows from them."""
        return {}

    # -- the step --------------------------------------------------------------------------------------------------

    def _state(self) -> State:
        return {name: getattr(self, buffer) for name, buffer in self._buffer_of.items()}

    def _write(self, state: State) -> None:
        copy_all_(list(self._state().values()), [state[name] for name in self._buffer_of])

    def _advance(self, tensordict: TensorDictBase) -> tuple[Entries, State, Tensor]:
        """Step every row, reset the finished ones, write the state and ``elapsed`` in place.

        Returns:
            The entries of "next", the state after the auto-reset (new tensors), and done [N, 1].
        """
        state, elapsed = self._state(), self.elapsed
        step = self._transition(state, tensordict)
        # An entry that did not change is still the buffer, which is about to be overwritten.
        next_state = {name: value.clone() if value is state[name] else value for name, value in step.next_state.items()}
        terminated = step.terminated.unsqueeze(-1)
        next_elapsed = elapsed + 1
        if self.max_episode_steps is None:
            truncated = torch.zeros_like(terminated)
            done = terminated.clone()
        else:
            # A row that terminates at its last step is truncated as well: gymnasium's TimeLimit says the same.
            truncated = next_elapsed >= self.max_episode_steps
            done = terminated | truncated
        if step.truncated is not None:
            cut = step.truncated.unsqueeze(-1)
            truncated, done = truncated | cut, done | cut
        if self.resets_nonfinite and (floats := [x for x in next_state.values() if x.is_floating_point()]):
            broken = _any_nonfinite(floats)
            truncated, done = truncated | broken, done | broken
        new_state = self._renewed(done, next_state)
        next_elapsed.masked_fill_(done, 0)
        partial = tensordict.get("_step", None)
        if partial is not None:
            partial = partial.view(self.num_envs, 1)
            new_state = {name: _select(partial, value, state[name]) for name, value in new_state.items()}
            next_elapsed = torch.where(partial, next_elapsed, elapsed)
        self._write(new_state)
        elapsed.copy_(next_elapsed)
        entries: Entries = {
            **self._observation(next_state),
            "is_init": torch.zeros_like(done),
            **step.entries,
            "done": done,
            "terminated": terminated,
            "truncated": truncated,
            **self._group_flags(step, truncated),
        }
        for name in self._group_shapes:
            if (name, "terminated") in entries:
                entries[name, "done"] = entries[name, "terminated"] | entries[name, "truncated"]
        return entries, new_state, done

    def _renewed(self, ended: Tensor, state: State) -> State:
        """Return ``state`` with the rows ``ended`` bool [N, 1] started over; all entries are new tensors."""
        # States are drawn whether or not a row ends: to look first would be a host read.
        fresh = self._fresh(ended)
        return {
            name: _select(ended, fresh[name], value) if name in fresh else value.clone()
            for name, value in state.items()
        }

    def _wrap(self, entries: Entries) -> TensorDict:
        # The entries were made here with the right shape and device; to validate them again doubles the cost of a step.
        return _nested(entries, {}, self.batch_size, self._group_shapes, self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        entries = self._advance(tensordict)[0]
        partial = tensordict.get("_step", None)
        if partial is not None:
            entries = self._held(entries, tensordict, partial.view(self.num_envs, 1))
        if torch.compiler.is_compiling() or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return self._wrap(entries)  # a collector that compiles or records keeps the ends itself
        if self._stepped is not None and is_repeated():
            # a row that ended has started over: a frame skip above gets the end, and no reward of the next episode
            entries = joined(self._stepped, entries, self.reward_keys)
        self._stepped = entries
        return self._wrap(dict(entries))

    def _held(self, entries: Entries, tensordict: TensorDictBase, stepped: Tensor) -> Entries:
        """Return ``entries``, in the rows outside ``stepped`` bool [N, 1] those of the root, and rewards of 0.

        TorchRL requires this of envs whose batch is locked: code that steps several times (``MultiAction``, a rollout
        until all rows have ended) finds the end of a row that it holds, although the row has started over.
        """
        zero = {*self.reward_keys, *self.done_keys}
        roots = {key: None if key in self.reward_keys else tensordict.get(key, None) for key in entries}
        held = {key: torch.zeros_like(new) if key in zero else new for key, new in entries.items()}
        held.update({key: root for key, root in roots.items() if root is not None})
        return {key: _select(stepped, new, held[key]) for key, new in entries.items()}

    def _root_entries(self, new_state: State, done: Tensor) -> Entries:
        """Return the root entries of t+1: reset observations where t ended, ``is_init`` = done, done flags False."""
        entries: Entries = {**self._observation(new_state), "is_init": done.clone()}
        return {**entries, **self._false_flags()}

    def _root_info(self, entries: Entries, done: Tensor) -> Entries:
        """Return the entries of the step that the next root repeats, zero in the rows that start over."""
        return {key: _select(done, torch.zeros_like(entries[key]), entries[key]) for key in self._info_keys}

    def _false_flags(self) -> Entries:
        """Return the done flags of a root, bool [N, 1] and [N, G, 1] of False; those of a level share no memory."""
        flags: Entries = {}
        for path, shape in (((), self.batch_size), *(((name,), shape) for name, shape in self._group_shapes.items())):
            parts = torch.zeros((3, *shape, 1), dtype=torch.bool, device=self.device).unbind(0)
            for flag, value in zip(("done", "terminated", "truncated"), parts, strict=True):
                flags[(*path, flag) if path else flag] = value
        return flags

    def _step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        if self._has_own_reset:
            return super()._step_and_maybe_reset(tensordict)
        # The reset has already happened, so the next root follows from what _advance returns. TorchRL's own asks the
        # host whether a row ended, and its bookkeeping costs as much as the step.
        if tensordict.device != self.device:
            tensordict = tensordict.to(self.device)
        if self.has_own_step or not _is_plain(tensordict):
            return self._step_and_reset_general(tensordict)
        self._assert_tensordict_shape(tensordict)
        entries, new_state, done = self._advance(tensordict)
        # What the policy wrote is carried on to the next root, as in step_mdp; a nested entry gets its own TensorDict.
        kept = {key: value for key, value in tensordict.items() if key not in ("reward", "_reset")}
        root_entries = {**self._root_entries(new_state, done), **self._root_info(entries, done)}
        root = _nested(root_entries, kept, self.batch_size, self._group_shapes, self.device)
        tensordict.set("next", self._wrap(entries))
        return tensordict, root

    def _step_and_reset_general(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step through TorchRL's own bookkeeping: preset "next" entries, partial steps, a ``_step`` of a subclass."""
        tensordict = self.step(tensordict)
        root = self._step_mdp(tensordict)
        done = tensordict.get(("next", "done"))
        following = tensordict.get("next")
        info = {key: following.get(key) for key in self._info_keys}
        state = {name: value.clone() for name, value in self._state().items()}
        for key, value in {**self._root_entries(state, done), **self._root_info(info, done)}.items():
            root.set(key, value)
        root.pop("_step", None)
        return tensordict, root

    def _reset_on_native_autoreset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        # Only a wrapper that carries the mark calls this; the env's own step does not.
        raise RuntimeError(
            f"Expected no '_torchrl_native_autoreset' around {type(self).__name__}, received it on the env that wraps "
            "it: TorchRL would replace final observations by NaN and leave reset observations untransformed. Remedy: "
            "remove it from the wrapper; masked resets leave the rows that reset themselves unchanged."
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if not torch.compiler.is_compiling():
            self._stepped = None
        if mask is None:
            new_state = self._fresh(None)
            self.elapsed.zero_()
        else:
            mask = mask.view(self.num_envs, 1)
            new_state = self._renewed(mask & (self.elapsed != 0), self._state())
            self.elapsed.masked_fill_(mask, 0)
        self._write(new_state)
        return self._root(new_state)

    def _root(self, state: State) -> TensorDict:
        """Return the root TensorDict of a state that a reset has just written."""
        entries = self._root_entries(state, self.elapsed == 0)
        for key in self._info_keys:
            entries[key] = self.observation_spec[key].zero()
        return self._wrap(entries)

    def fault_counts(self) -> dict[str, Tensor]:
        """Return counts of what has gone wrong since the env was made, 0-d on the device by name; none by default.

        A trainer writes them into its rows as ``env/<name>``, and says once what :meth:`faults` does.
        """
        return {}

    def faults(self) -> dict[str, str]:
        """Return a sentence with a remedy for each of :meth:`fault_counts` that is not 0; waits for the host."""
        return {}

    def scene(self, state: State) -> list[Line]:
        """Return the lines of a picture of ``state``, in units that :attr:`scene_half_width` says; none by default."""
        return []

    def picture(self, state: State, height: int, width: int) -> Tensor | None:
        """Return the pictures ``[N, H, W, 3]`` uint8 of ``state``, for tasks that are no lines; None by default."""
        return None

    def render(self, *, height: int = 96, width: int = 144) -> Tensor:
        """Draw the present state of all envs by :meth:`picture` or :meth:`scene`, else 64 observed numbers as bars.

        Args:
            height: H in pixels.
            width: W in pixels.

        Returns:
            uint8 ``[N, H, W, 3]`` on the env's device, as TorchRL's ``PixelRenderTransform`` takes it.
        """
        if (picture := self.picture(self._state(), height, width)) is not None:
            return picture
        scene = self.scene(self._state())
        if scene:
            return lines(scene, height, width, half_width=self.scene_half_width)
        shares = []
        observed = TensorDict(dict(self._observation(self._state())), batch_size=self.batch_size)
        for key, value in observed.items(True, True):
            spec = self.observation_spec[key]
            space = spec.space if isinstance(spec, Bounded) else None
            low, high = (None, None) if space is None else (space.low.flatten(1), space.high.flatten(1))
            shares.append(heights(value.reshape(self.num_envs, -1), low, high))
        return bars(torch.cat(shares, -1), height, width)

    def _set_seed(self, seed: int | None) -> None:
        """Seed the default generator of the env's device, which other code on that device shares."""
        if seed is None:
            return
        seed = check_seed(type(self).__name__, seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)


def _select(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """``torch.where`` by rows: ``mask`` [N, 1] chooses between tensors [N, ...]."""
    return torch.where(mask.view(-1, *(1,) * (other.ndim - 1)), one, other)


def _any_nonfinite(floats: list[Tensor]) -> Tensor:
    """Bool [N, 1]: whether a number of the row is NaN or infinite in one of the tensors ``[N, ...]``."""
    # An entry may be [N], which has no second dim to flatten from.
    broken = [~value.isfinite().unsqueeze(-1).flatten(1).all(-1, keepdim=True) for value in floats]
    return torch.cat(broken, -1).any(-1, keepdim=True)


def _nested(
    entries: Entries,
    kept: dict[str, Tensor | TensorDictBase],
    batch_size: torch.Size,
    group_shapes: dict[str, torch.Size],
    device: torch.device | None,
) -> TensorDict:
    """Return a new TensorDict of ``kept``, nested ones too, overwritten by ``entries`` of at most two levels."""
    flat: dict[str, Any] = {key: value if isinstance(value, Tensor) else value.copy() for key, value in kept.items()}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in entries.items():
        if isinstance(key, str):
            flat[key] = value
        else:
            group, name = cast("tuple[str, str]", key)
            groups.setdefault(group, {})[name] = value
    for name, members in groups.items():
        old = flat.get(name)
        before = {} if old is None else {key: value for key, value in old.items() if key != "reward"}
        flat[name] = unchecked({**before, **members}, batch_size=group_shapes[name], device=device)
    return unchecked(flat, batch_size=batch_size, device=device)


def _is_plain(tensordict: TensorDictBase) -> bool:
    """Whether the short path may build the next root: tensors and TensorDicts only, no "next" or "_step" preset."""
    if type(tensordict) is not TensorDict or tensordict.is_locked:
        return False
    entries = tensordict.items()
    return all(isinstance(value, Tensor | TensorDict) and key not in ("next", "_step") for key, value in entries)
