"""Batched environments in tensors: the base of tasks with one state tensor and one observation.

Dimension key: ``N`` envs, ``S`` state, ``R`` reset noise, ``O`` observation, ``D`` action.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar, Literal, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, TensorSpec, Unbounded

from torchrl_perf.envs.arguments import read_action
from torchrl_perf.envs.auto_reset import AutoResetEnv, Entries, State, Transition
from torchrl_perf.runtime.draws import Draw, uniform

__all__ = ["DeviceEnv"]


class DeviceEnv(AutoResetEnv):
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

    **TransformedEnv** works unchanged, through TorchRL's masked resets. Its loop asks the host whether a row ended; a
    loop without that wait calls ``env.step``, then ``env._reset`` with ``"_reset" = done``, and merges by
    ``torch.where``.
    ``_torchrl_native_autoreset``, TorchRL's own mark of envs that reset themselves, is absent on purpose:
    ``TransformedEnv`` copies it, and then overwrites the final observations with NaN, returns them as reset
    observations, and leaves ``is_init`` False where an episode terminated. Set on a wrapper by hand, it is refused.

    **A state that is not finite** would stay so for ever; with ``resets_nonfinite`` it ends its episode by truncation.

    **Random numbers** come from the default generator of the env's device: one ``torch.rand([N, R])`` per step and per
    reset, whether or not a row ends, so that the step has a static shape and can be captured in a CUDA graph. A
    collector may draw those of many steps at once (:attr:`step_draws`).

    **State**: ``state`` [N, S] and ``elapsed`` [N, 1] int32 (steps since the reset) are buffers. ``state_dict()`` holds
    them and nothing else; the generator's state is the caller's to save. A ``TransformedEnv`` saves only its
    transforms: save ``env.base_env.state_dict()`` too.

    Reads ``"action"``: int64 [N] for discrete tasks, float [N, D] otherwise. Discrete values outside the range are
    undefined behaviour (a check would wait for the device); continuous ones are clipped as in Gymnasium.
    Writes ``"observation"`` [N, O] and, each bool [N, 1], ``"is_init"``, ``"done"``, ``"terminated"``, ``"truncated"``
    at the root and under ``"next"``, and ``("next", "reward")`` [N, 1]. No returned tensor is an internal buffer, and
    none is changed by later steps. Under a partial-step mask ``"_step"`` rows outside it keep their state; "next"
    repeats their root, with a reward of 0.

    Args:
        num_envs: number of envs N, at least 1.
        device: where everything lives. Default: torch's default device.
        dtype: float type of state, observation, reward and continuous action.
        max_episode_steps: ``truncated`` is True from the step that brings the episode to this length;
            None means no limit. Default: the class's ``default_episode_steps``, in the classic-control tasks the limit
            of ``gymnasium.make``.
        seed: passed to ``set_seed``.

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

    state: Tensor

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
        steps = self.default_episode_steps if max_episode_steps == "default" else max_episode_steps
        super().__init__(num_envs, device=device, dtype=dtype, max_episode_steps=steps)
        self._make_specs()
        self._begin(seed, prefix="")

    @abc.abstractmethod
    def initial_state(self, uniform: Tensor) -> Tensor:
        """Map ``uniform`` [N, R] in [0, 1) to initial states [N, S]; pure and elementwise over N."""

    @abc.abstractmethod
    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Advance ``state`` [N, S] by one step under ``action``; pure, elementwise over N, without host reads.

        Args:
            state: [N, S]; must not be written to.
            action: int64 [N], or float [N, D] not yet clipped.

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

    def _reset_noise(self) -> Tensor:
        """Return uniform noise [N, R] in [0, 1) from the default generator of the env's device."""
        shape = self.num_envs, self.num_reset_noise
        return uniform(shape, dtype=self.dtype, device=cast("torch.device", self.device))

    @property
    def step_draws(self) -> Sequence[Draw]:
        """The noise of the reset inside the step, where the task leaves its making to this class."""
        own = any(getattr(type(self), name) is not getattr(DeviceEnv, name) for name in ("_fresh", "_reset_noise"))
        shape = torch.Size((self.num_envs, self.num_reset_noise))
        return () if own or not shape.numel() else (Draw("uniform", shape, self.dtype),)

    def _check_action(self, tensordict: TensorDictBase) -> Tensor:
        """Return the action; raise where its shape or dtype does not match the spec (both known to the host)."""
        name, discrete = type(self).__name__, self.num_actions is not None
        return read_action(name, tensordict, "action", self._action_shape, discrete=discrete, dtype=self.dtype)

    def _fresh(self, ended: Tensor | None) -> State:
        return {"state": self.initial_state(self._reset_noise())}

    def _transition(self, state: State, tensordict: TensorDictBase) -> Transition:
        next_state, reward, terminated = self.dynamics(state["state"], self._check_action(tensordict))
        return Transition({"state": next_state}, {"reward": reward.unsqueeze(-1)}, terminated)

    def _observation(self, state: State) -> Entries:
        return {"observation": self.observe(state["state"])}
