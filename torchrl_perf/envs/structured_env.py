"""Batched environments in tensors: the base of tasks with several state tensors, several keys and groups of agents.

Dimension key: ``N`` envs, ``G`` members of a group.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, TensorSpec, Unbounded

from torchrl_perf.envs.arguments import read_action
from torchrl_perf.envs.auto_reset import AutoResetEnv, Entries, State, Transition
from torchrl_perf.runtime.seeds import seeded

__all__ = ["EnvSpecs", "StructuredEnv", "Transition"]

FLAGS = ("done", "terminated", "truncated")


@dataclass(frozen=True)
class EnvSpecs:
    """The keys of a task, each with a spec of shape ``[N, ...]``; a key is a string, or a group's name and a string.

    Attributes:
        observation: what ``observe`` returns, at the root and under "next".
        action: what a policy writes; the first part of a nested key need not be a group.
        reward: entries of a transition under "next" alone.
        info: entries of a transition that TorchRL keeps with the observations: the root of a step repeats those of the
            step before, and has zeros after a reset.
        groups: number of members G of each group with done flags of its own, ``(group, "done")`` ``[N, G, 1]``.
    """

    observation: dict[NestedKey, TensorSpec]
    action: dict[NestedKey, TensorSpec]
    reward: dict[NestedKey, TensorSpec]
    info: dict[NestedKey, TensorSpec] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)


class StructuredEnv(AutoResetEnv):
    """``num_envs`` copies of a task of many parts as one TorchRL env whose step and reset never wait for the host.

    The counterpart of :class:`DeviceEnv` for tasks whose state is several named tensors of any dtypes, which observe
    several keys, have groups of agents, or draw random numbers in the step. A task writes four methods:

    * :meth:`make_specs` names the keys.
    * :meth:`draw_state` returns fresh initial states of all rows; it draws its own random numbers.
    * :meth:`advance` steps all rows; it may draw random numbers and write to further buffers of the task, in place.
    * :meth:`observe` maps a state to observations. It is **pure**: noise of an observation belongs to the state, drawn
      in the two methods above, so that a row that did not move gives the same observation again.

    All have static shapes, no loop whose length depends on values, and never wait for the host. The last line of
    the task's constructor is ``self.begin(seed)``, which makes specs and state.

    **Auto-reset.** A row that ends at step t is re-drawn inside that step: "next" holds the true final observation, and
    the next root (:meth:`step_and_maybe_reset`) the reset observation, where all done flags are False and ``is_init``
    is True for exactly the rows that ended.

    **Time limit.** ``truncated`` is True from the step that brings an episode to ``max_episode_steps``.

    **Masked reset is idempotent.** :meth:`reset` without a ``"_reset"`` mask re-draws every row. With one, a row in the
    mask is re-drawn only if ``elapsed != 0``; one that has just been reset keeps its state. Other rows are untouched
    bit for bit. So TorchRL's own loops and ``TransformedEnv`` see the same episodes as those that rely on the
    auto-reset; ``_torchrl_native_autoreset`` on a wrapper is refused, see :class:`DeviceEnv`.

    **State that outlives an episode.** An entry that :meth:`redraw_state` leaves out is not re-drawn: it keeps its
    value where an episode ends and at a masked reset. Construction and a reset of all rows take every entry from
    :meth:`draw_state`; for an entry that should survive even that, ``draw_state`` returns a copy of its buffer. Such an
    entry that is not finite stays so until then, and with ``resets_nonfinite`` it ends each episode after one step.

    **Groups.** A group has done flags for each member, from :meth:`group_flags`; at the root they are False (below a
    ``TransformedEnv`` TorchRL carries them over). Whether a member is active, the task says with a key of its choice.
    The env itself ends by its own flags only.

    **State**: entry ``x`` of the state is the buffer ``state_x``, beside ``elapsed`` [N, 1] int32. ``state_dict()``
    holds them and the task's further buffers; the caller saves the generator's state. A float entry that is not
    finite ends the row's episode by truncation where ``resets_nonfinite`` is set.

    No returned tensor is an internal buffer, and none is changed by later steps. Under a partial-step mask ``"_step"``
    rows outside it keep their state; "next" repeats their root, with rewards of 0.

    Args:
        num_envs: number of envs N, at least 1.
        device: where everything lives. Default: torch's default device.
        dtype: float type of states, observations, rewards and continuous actions.
        max_episode_steps: time limit; None means none.

    Raises:
        ValueError: ``num_envs`` or ``max_episode_steps`` below 1, an unknown device; from :meth:`begin`, an entry that
            :meth:`redraw_state` returns and :meth:`draw_state` does not.
        TypeError: a ``dtype`` that is not a float type.
        RuntimeError: CUDA asked for where there is none.
    """

    @abc.abstractmethod
    def make_specs(self) -> EnvSpecs:
        """Return the task's keys; :meth:`box`, :meth:`unbounded` and :meth:`choice` make specs ``[N, ...]``."""

    @abc.abstractmethod
    def draw_state(self) -> dict[str, Tensor]:
        """Return fresh initial states of all rows, each entry ``[N, ...]``: new tensors, of new random numbers."""

    @abc.abstractmethod
    def advance(self, state: dict[str, Tensor], action: Tensor | dict[NestedKey, Tensor]) -> Transition:
        """Step all rows.

        Args:
            state: entries ``[N, ...]``, the env's own buffers: read only.
            action: of the shape of its spec; floats are not yet clipped. A dict where the specs have several.

        Returns:
            Next states, the entries of ``reward`` and ``info``, and ``terminated`` bool ``[N]``. Observations and done
            flags are not among them.
        """

    @abc.abstractmethod
    def observe(self, state: dict[str, Tensor]) -> dict[NestedKey, Tensor]:
        """Return the entries of ``observation``; pure. Entries may be, or be views of, those of ``state``."""

    def redraw_state(self, ended: Tensor) -> dict[str, Tensor]:
        """Return entries ``[N, ...]`` of which those of the rows ``ended`` (bool ``[N, 1]``) are used as fresh states.

        Called at each step, after :meth:`advance`, and at each masked reset. By default all rows are drawn by
        :meth:`draw_state`; a task whose states are expensive may draw fewer and share them out. An entry that is left
        out is not re-drawn and outlives the episode. If a task overrides this method, it is also called once at
        construction, with no row ended, to learn the names; the generators are then set back.
        """
        return self.draw_state()

    def group_flags(self, step: Transition, truncated: Tensor) -> dict[NestedKey, Tensor]:
        """Return ``(group, "terminated")`` and ``(group, "truncated")``, bool ``[N, G, 1]``, of every group.

        Args:
            step: what :meth:`advance` returned.
            truncated: bool ``[N, 1]``, the env's.

        Returns:
            New tensors; ``(group, "done")`` is either of the two.
        """
        return {}

    # -- specs -----------------------------------------------------------------------------------------------------

    def unbounded(self, *shape: int, dtype: torch.dtype | None = None) -> Unbounded:
        """Return a spec ``[N, *shape]`` of any numbers, of the env's dtype by default."""
        full = torch.Size((self.num_envs, *shape))
        return Unbounded(shape=full, dtype=dtype or self.dtype, device=self.device)

    def box(self, low: Tensor | float, high: Tensor | float, *shape: int) -> Bounded:
        """Return a spec ``[N, *shape]`` of floats between bounds that broadcast to it."""
        full = torch.Size((self.num_envs, *shape))
        bounds = [torch.as_tensor(x, dtype=self.dtype, device=self.device).expand(full) for x in (low, high)]
        return Bounded(bounds[0], bounds[1], shape=full, dtype=self.dtype, device=self.device)

    def choice(self, n: int, *shape: int, dtype: torch.dtype = torch.int64) -> Categorical:
        """Return a spec ``[N, *shape]`` of indices below ``n``; of flags for ``dtype=torch.bool`` and 2."""
        return Categorical(n, shape=torch.Size((self.num_envs, *shape)), dtype=dtype, device=self.device)

    def begin(self, seed: int | None = None) -> None:
        """Make the specs, seed the generator and draw the first states; the last line of a task's constructor."""
        specs = self.make_specs()
        self._group_shapes = {name: torch.Size((self.num_envs, size)) for name, size in specs.groups.items()}
        self._info_keys = tuple(specs.info)
        flag = self.choice(2, 1, dtype=torch.bool)
        self.observation_spec = self._composite({**specs.observation, **specs.info, "is_init": flag})
        self.action_spec = self._composite(specs.action)
        self.reward_spec = self._composite(specs.reward)
        done: dict[NestedKey, TensorSpec] = {name: flag.clone() for name in FLAGS}
        for group, size in specs.groups.items():
            done.update({(group, name): self.choice(2, size, 1, dtype=torch.bool) for name in FLAGS})
        self.full_done_spec = self._composite(done)
        self._actions = {
            key: (spec.shape, not spec.dtype.is_floating_point, spec.dtype) for key, spec in specs.action.items()
        }
        self._begin(seed, prefix="state_")
        self._check_redraw()

    def _check_redraw(self) -> None:
        """Raise ValueError where :meth:`redraw_state` returns an entry that the state does not have."""
        if type(self).redraw_state is StructuredEnv.redraw_state:
            return
        nobody = torch.zeros(self.num_envs, 1, dtype=torch.bool, device=self.device)
        with seeded(None, self.device):
            unknown = sorted(self.redraw_state(nobody).keys() - self._buffer_of.keys())
        if unknown:
            raise ValueError(
                f"{type(self).__name__}.redraw_state: expected entries among {sorted(self._buffer_of)}, received "
                f"{unknown} too. Remedy: the names that draw_state gives them; leave out what outlives an episode."
            )

    def _composite(self, specs: dict[NestedKey, TensorSpec]) -> Composite:
        """Return the Composite of the specs, groups with their own shape."""
        root = Composite(shape=self.batch_size, device=self.device)
        for key in specs:
            group = str(key[0]) if isinstance(key, tuple) else None
            if group is not None and group not in root.keys():
                root[group] = Composite(shape=self._group_shapes.get(group, self.batch_size), device=self.device)
        for key, spec in specs.items():
            root[key] = spec
        return root

    # -- the hooks of the base ---------------------------------------------------------------------------------------

    def read_action(self, tensordict: TensorDictBase) -> Tensor | dict[NestedKey, Tensor]:
        """Return the action, or all of them by key; raises if a shape or kind of number does not match its spec."""
        name = type(self).__name__
        actions: dict[NestedKey, Tensor] = {
            key: read_action(name, tensordict, key, shape, discrete=discrete, dtype=dtype)
            for key, (shape, discrete, dtype) in self._actions.items()
        }
        return actions if len(actions) > 1 else next(iter(actions.values()))

    def _fresh(self, ended: Tensor | None) -> State:
        return self.draw_state() if ended is None else self.redraw_state(ended)

    def _transition(self, state: State, tensordict: TensorDictBase) -> Transition:
        return self.advance(state, self.read_action(tensordict))

    def _observation(self, state: State) -> Entries:
        return self.observe(state)

    def _group_flags(self, step: Transition, truncated: Tensor) -> Entries:
        return self.group_flags(step, truncated)
