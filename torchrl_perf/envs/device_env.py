"""Batched environments in tensors: the auto-reset base.

Dimension key: ``N`` envs, ``S`` state, ``R`` reset noise, ``O`` observation, ``D`` action.
"""

from __future__ import annotations

import abc
from typing import ClassVar, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

__all__ = ["DeviceEnv"]


class DeviceEnv(EnvBase):
    """``num_envs`` copies of one task as one TorchRL env whose step and reset never wait for the host.

    A task is three pure, elementwise functions, :meth:`initial_state`, :meth:`dynamics` and :meth:`observe`, and the
    class attributes below. The base adds what every task needs: state in static tensors, the time limit, the reset of
    finished rows inside the step, specs and TensorDicts. A row's result does not depend on the number of envs.

    **Auto-reset.** A row that ends at step t is re-drawn inside that step. ``("next", "observation")`` holds the true
    final observation; :meth:`step_and_maybe_reset` returns the reset observation at the next root, where ``done``,
    ``terminated`` and ``truncated`` are False and ``is_init`` is True for exactly the rows that ended.

    **Masked reset is idempotent.** :meth:`reset` without a ``"_reset"`` mask re-draws every row. With one, a row in the
    mask is re-drawn only if ``elapsed != 0``: a row that was reset just now, by the step or by an earlier reset, is
    at a fresh initial state and keeps it. Rows outside the mask are untouched bit for bit. A loop that resets
    finished rows itself (``Collector``, ``rollout``, a ``TransformedEnv`` whose ``StepCounter`` truncates earlier than
    the env) therefore sees the same episodes as one that relies on the auto-reset.

    **TransformedEnv** works as it comes, through TorchRL's masked resets. Its loop asks the host whether a row ended;
    one that does not calls ``env.step``, then ``env._reset`` with ``"_reset" = done``, and merges with ``torch.where``.
    ``_torchrl_native_autoreset``, TorchRL's own mark of envs that reset themselves, is absent on purpose:
    ``TransformedEnv`` copies it, and then writes NaN over the final observations, gives them out as reset observations,
    and leaves ``is_init`` False where an episode terminated. Set on a wrapper by hand, it is refused.

    **A state that is not finite** would stay so for ever; with ``resets_nonfinite`` it ends its episode by truncation.

    **Random numbers** come from the default generator of the env's device: one ``torch.rand([N, R])`` per step and per
    reset, whether or not a row ends, so that the step has a static shape and can be captured in a CUDA graph.

    **State**: ``state`` [N, S] and ``elapsed`` [N, 1] int32 (steps since the reset) are buffers. ``state_dict()`` holds
    them and nothing else; the generator's state is the caller's to save. A ``TransformedEnv`` saves only its
    transforms: save ``env.base_env.state_dict()`` too.

    Reads ``"action"``: int64 [N] for discrete tasks, float [N, D] otherwise. Discrete values outside the range are
    undefined behaviour (a check would wait for the device); continuous ones are clipped as in Gymnasium.
    Writes ``"observation"`` [N, O] and, each bool [N, 1], ``"is_init"``, ``"done"``, ``"terminated"``, ``"truncated"``
    at the root and under ``"next"``, and ``("next", "reward")`` [N, 1]. No returned tensor is an internal buffer, and
    none is changed by later steps. Under a partial-step mask ``"_step"`` rows outside it keep their state; what the
    step returns for them has no meaning.

    Args:
        num_envs (int): number of envs N, at least 1.
        device (torch.device or str, optional): where everything lives. Default: torch's default device.
        dtype (torch.dtype): float type of state, observation, reward and continuous action.
        max_episode_steps (int, optional): ``truncated`` is True from the step that brings the episode to this length;
            None means no limit. Default: the class's ``default_episode_steps``, in the classic-control tasks the limit
            of ``gymnasium.make``.
        seed (int, optional): passed to ``set_seed``.

    Raises:
        ValueError: ``num_envs`` or ``max_episode_steps`` below 1, an unknown device.
        TypeError: a ``dtype`` that is not a float type.
        RuntimeError: CUDA asked for where there is none.
    """

    num_state: ClassVar[int]
    """S, the number of state variables of one env."""
    num_reset_noise: ClassVar[int]
    """R, the number of uniform random numbers that one reset uses."""
    default_episode_steps: ClassVar[int | None] = None
    """Time limit of an episode where the constructor is given none; None is no limit."""
    observation_low: ClassVar[tuple[float, ...]]
    """Lower bound of each of the O observation entries; -inf where there is none."""
    observation_high: ClassVar[tuple[float, ...]]
    """Upper bound of each of the O observation entries; inf where there is none."""
    num_actions: ClassVar[int | None] = None
    """Number of discrete actions, or None for a continuous task."""
    action_low: ClassVar[tuple[float, ...]] = ()
    """Lower bound of each of the D continuous action entries."""
    action_high: ClassVar[tuple[float, ...]] = ()
    """Upper bound of each of the D continuous action entries."""

    resets_nonfinite: bool = False
    """Whether a row whose state has become NaN or infinite is truncated and re-drawn; set it before the first step."""

    state: Tensor
    elapsed: Tensor

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.float32,
        max_episode_steps: int | Literal["default"] | None = "default",
        seed: int | None = None,
    ) -> None:
        """Allocate the state, draw the first initial states and build the specs; arguments as in the class."""
        name = type(self).__name__
        _check_count(name, "num_envs", num_envs)
        if max_episode_steps == "default":
            max_episode_steps = self.default_episode_steps
        if max_episode_steps is not None:
            _check_count(name, "max_episode_steps", max_episode_steps)
        _check_float(name, dtype)
        super().__init__(device=_resolve_device(name, device), batch_size=(num_envs,))
        self.dtype = dtype
        self.num_envs = num_envs
        self.max_episode_steps = max_episode_steps
        self._make_specs()
        if seed is not None:
            self.set_seed(seed)
        self.register_buffer("state", self.initial_state(self._reset_noise()).contiguous())
        self.register_buffer("elapsed", torch.zeros(num_envs, 1, dtype=torch.int32, device=self.device))

    @abc.abstractmethod
    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, R] in [0, 1) to initial states [N, S]; pure and elementwise over N."""

    @abc.abstractmethod
    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Advance ``state`` [N, S] by one step under ``action``; pure, elementwise over N, without host reads.

        Args:
            state (Tensor): [N, S]; must not be written to.
            action (Tensor): int64 [N], or float [N, D] not yet clipped.

        Returns:
            next_state [N, S], reward [N] float, terminated [N] bool, all new tensors.
        """

    @abc.abstractmethod
    def observe(self, state: Tensor) -> Tensor:
        """Map ``state`` [N, S] to observations [N, O]; pure. May return ``state`` itself."""

    def make_action_spec(self) -> TensorSpec:
        """Return the spec of the action of all envs, [N] or [N, D]; built from the class attributes."""
        if self.num_actions is not None:
            return Categorical(self.num_actions, shape=self.batch_size, dtype=torch.int64, device=self.device)
        return self._box(self.action_low, self.action_high)

    def _box(self, low: tuple[float, ...], high: tuple[float, ...]) -> Bounded:
        """Return the Bounded spec [N, len(low)]; infinite bounds stay infinite, as in TorchRL's GymEnv."""
        shape = torch.Size((self.num_envs, len(low)))
        bounds = [torch.tensor(bound, dtype=self.dtype, device=self.device).expand(shape) for bound in (low, high)]
        return Bounded(bounds[0], bounds[1], shape=shape, dtype=self.dtype, device=self.device)

    def _make_specs(self) -> None:
        """Set the specs of the env, all with leading [N]."""
        batch, device = self.batch_size, self.device
        column = torch.Size((self.num_envs, 1))

        def flag() -> Categorical:
            return Categorical(2, shape=column, dtype=torch.bool, device=device)

        box = self._box(self.observation_low, self.observation_high)
        self.observation_spec = Composite(observation=box, is_init=flag(), shape=batch, device=device)
        self.action_spec = self.make_action_spec()
        self.reward_spec = Unbounded(shape=column, dtype=self.dtype, device=device)
        self.full_done_spec = Composite(done=flag(), terminated=flag(), truncated=flag(), shape=batch, device=device)
        self._action_shape = self.action_spec.shape
        self._false_shape = torch.Size((3, *column))

    def _reset_noise(self) -> Tensor:
        """Return uniform noise [N, R] in [0, 1) from the default generator of the env's device."""
        return torch.rand(self.num_envs, self.num_reset_noise, dtype=self.dtype, device=self.device)

    def _check_action(self, tensordict: TensorDictBase) -> Tensor:
        """Return the action; raise where its shape or dtype does not match the spec (both known to the host)."""
        action = tensordict.get("action", None)
        if action is None:
            keys = sorted(map(str, tensordict.keys()))
            raise KeyError(
                f"{type(self).__name__} expected the key 'action', found {keys}; run a policy that writes it."
            )
        discrete = self.num_actions is not None
        if action.shape != self._action_shape or action.is_floating_point() == discrete or action.dtype == torch.bool:
            wanted = "integer indices" if discrete else "floats"
            raise ValueError(
                f"{type(self).__name__} expected action {tuple(self._action_shape)} of {wanted}, got "
                f"{tuple(action.shape)} {action.dtype} on {action.device}; "
                + ("pass the index of the action, not one-hot." if discrete else "pass one float per action entry.")
            )
        return action if discrete or action.dtype == self.dtype else action.to(self.dtype)

    def _advance(self, tensordict: TensorDictBase) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Step every row, reset the finished ones, write ``state`` and ``elapsed`` in place.

        Returns:
            The entries of "next", the state after the auto-reset [N, S] (a new tensor), and done [N, 1].
        """
        action = self._check_action(tensordict)
        state, elapsed = self.state, self.elapsed
        next_state, reward, terminated = self.dynamics(state, action)
        terminated = terminated.unsqueeze(-1)
        next_elapsed = elapsed + 1
        if self.max_episode_steps is None:
            truncated = torch.zeros_like(terminated)
            done = terminated.clone()
        else:
            # A row that terminates at its last step is truncated as well: gymnasium's TimeLimit says the same.
            truncated = next_elapsed >= self.max_episode_steps
            done = terminated | truncated
        if self.resets_nonfinite:
            broken = ~next_state.isfinite().all(-1, keepdim=True)
            truncated, done = truncated | broken, done | broken
        # The noise is drawn whether or not a row ends: to look first would be a host read.
        new_state = torch.where(done, self.initial_state(self._reset_noise()), next_state)
        next_elapsed.masked_fill_(done, 0)
        partial = tensordict.get("_step", None)
        if partial is not None:
            partial = partial.view(self.num_envs, 1)
            new_state = torch.where(partial, new_state, state)
            next_elapsed = torch.where(partial, next_elapsed, elapsed)
        state.copy_(new_state)
        elapsed.copy_(next_elapsed)
        entries = {
            "observation": self.observe(next_state),
            "is_init": torch.zeros_like(done),
            "reward": reward.unsqueeze(-1),
            "done": done,
            "terminated": terminated,
            "truncated": truncated,
        }
        return entries, new_state, done

    def _wrap(self, entries: dict[str, Tensor]) -> TensorDict:
        # The entries were made here with the right shape and device; to validate them again doubles the cost of a step.
        return TensorDict._new_unsafe(entries, batch_size=self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        return self._wrap(self._advance(tensordict)[0])

    def _root_entries(self, new_state: Tensor, done: Tensor) -> dict[str, Tensor]:
        """Return the root entries of t+1: reset observations where t ended, ``is_init`` = done, done flags False."""
        not_done, terminated, truncated = self._false_flags()
        return {
            "observation": self.observe(new_state),
            "is_init": done.clone(),
            "done": not_done,
            "terminated": terminated,
            "truncated": truncated,
        }

    def _false_flags(self) -> tuple[Tensor, ...]:
        """Return three new bool tensors [N, 1] of False, disjoint parts of one allocation."""
        return torch.zeros(self._false_shape, dtype=torch.bool, device=self.device).unbind(0)

    def _step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        # The reset has already happened, so the next root follows from what _advance returns. TorchRL's own asks the
        # host whether a row ended, and its bookkeeping costs as much as the step.
        if tensordict.device != self.device:
            tensordict = tensordict.to(self.device)
        if not _is_plain(tensordict):
            return self._step_and_reset_general(tensordict)
        self._assert_tensordict_shape(tensordict)
        entries, new_state, done = self._advance(tensordict)
        # What the policy wrote travels on to the next root, as in step_mdp; a nested entry gets its own shell.
        root = {key: value if isinstance(value, Tensor) else value.copy() for key, value in tensordict.items()}
        root.update(self._root_entries(new_state, done))
        root.pop("reward", None)
        root.pop("_reset", None)
        tensordict.set("next", self._wrap(entries))
        return tensordict, self._wrap(root)

    def _step_and_reset_general(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step through TorchRL's own bookkeeping: preset "next" entries, partial steps, other TensorDict classes."""
        tensordict = self.step(tensordict)
        root = self._step_mdp(tensordict)
        done = tensordict.get(("next", "done"))
        root.update(self._root_entries(self.state.clone(), done))
        root.pop("_step", None)
        return tensordict, root

    def _reset_on_native_autoreset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        # Only a wrapper that carries the mark calls this; DeviceEnv's own step does not.
        raise RuntimeError(
            f"Expected no '_torchrl_native_autoreset' around {type(self).__name__}, found it on the env that wraps it: "
            "TorchRL would replace final observations by NaN and leave reset observations untransformed. Remove it "
            "from the wrapper; masked resets leave the rows that reset themselves unchanged."
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDict:
        initial = self.initial_state(self._reset_noise())
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            new_state = initial
            self.elapsed.zero_()
        else:
            mask = mask.view(self.num_envs, 1)
            new_state = torch.where(mask & (self.elapsed != 0), initial, self.state)
            self.elapsed.masked_fill_(mask, 0)
        self.state.copy_(new_state)
        return self._wrap(self._root_entries(new_state, self.elapsed == 0))

    def _set_seed(self, seed: int | None) -> None:
        """Seed the default generator of the env's device, which other code on that device shares."""
        if seed is None:
            return
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)


def _is_plain(tensordict: TensorDictBase) -> bool:
    """Whether the short path may build the next root: tensors and TensorDicts only, no "next" or "_step" preset."""
    if type(tensordict) is not TensorDict or tensordict.is_locked:
        return False
    entries = tensordict.items()
    return all(isinstance(value, Tensor | TensorDict) and key not in ("next", "_step") for key, value in entries)


def _check_count(name: str, argument: str, value: int) -> None:
    """Raise unless ``value`` is an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} expected {argument} >= 1 (int), got {value!r}; pass a positive int.")


def _check_float(name: str, dtype: torch.dtype) -> None:
    """Raise unless ``dtype`` is float32 or float64."""
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} expected dtype torch.float32 or torch.float64, got {dtype}; pass one of the two.")


def _resolve_device(name: str, device: torch.device | str | int | None) -> torch.device:
    """Return the device, or raise where it does not exist on this machine."""
    try:
        resolved = torch.get_default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{name} expected a torch device, got {device!r}; pass 'cpu' or 'cuda'.") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} expected a CPU or CUDA device, got {resolved}; pass 'cpu' or 'cuda'.")
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (resolved.index or 0) >= count:
            raise RuntimeError(f"{name} expected one of {count} CUDA devices, got {resolved}; pass device='cpu'.")
    return resolved
