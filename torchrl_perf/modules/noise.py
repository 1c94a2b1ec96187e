"""Noise added to the actions of a deterministic policy: Gaussian, or with a memory (Ornstein-Uhlenbeck)."""

import math
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import TensorSpec

from torchrl_perf.functional.exploration import bounded_gaussian, ou_step
from torchrl_perf.functional.masked import of_rows
from torchrl_perf.functional.schedules import linear
from torchrl_perf.functional.wide import wide_dtype
from torchrl_perf.modules.bounds import action_bounds
from torchrl_perf.modules.wide_buffers import WideBuffers


class _ActionNoise(TensorDictModuleBase):
    """A policy, and noise on its action while exploring; see :class:`GaussianNoise`."""

    sigma: Tensor
    frames: Tensor
    sigma_start: Tensor
    sigma_end: Tensor
    decay_frames: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self,
        policy: TensorDictModuleBase,
        *,
        spec: TensorSpec | None,
        sigma_start: float,
        sigma_end: float | None,
        decay_frames: int,
        action_key: NestedKey,
        valid_key: NestedKey | None,
    ) -> None:
        super().__init__()
        spec = getattr(policy, "spec", None) if spec is None else spec
        if not isinstance(spec, TensorSpec) or not spec.dtype.is_floating_point:
            received = "none" if spec is None else f"{type(spec).__name__} of {spec.dtype}"
            raise ValueError(
                f"spec: expected that of continuous actions, received {received}. Remedy: spec=env.action_spec; "
                "EpsilonGreedy for discrete actions."
            )
        if action_key not in policy.out_keys:
            raise ValueError(
                f"action_key: expected a key that the policy writes, {policy.out_keys}, got {action_key!r}."
            )
        sigma_end = sigma_start if sigma_end is None else sigma_end
        for name, value in (("sigma_start", sigma_start), ("sigma_end", sigma_end)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}: expected a finite number of at least 0, received {value}.")
        self.policy, self.spec, self.action_key = policy, spec, action_key
        # an agent that does not exist keeps its neutral action: its policy knows which those are
        self.valid_key = getattr(policy, "valid_key", None) if valid_key is None else valid_key
        self.out_keys = list(policy.out_keys)  # pyright: ignore
        low, high = action_bounds(spec, finite=False)
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        for name, value in (("sigma", sigma_start), ("sigma_start", sigma_start), ("sigma_end", sigma_end)):
            self.register_buffer(name, torch.tensor(float(value), device=low.device))
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64, device=low.device))
        self.register_buffer("decay_frames", torch.tensor(decay_frames, dtype=torch.int64, device=low.device))

    def _reads(self, *more: NestedKey | None) -> list[NestedKey]:
        """The policy's keys, and others that are given and not among them."""
        keys = list(self.policy.in_keys)
        return keys + [key for key in more if key is not None and key not in keys]

    def step(self, frames: int | Tensor = 1) -> None:
        """Advances the schedule of sigma, and the policy's own, by a number of frames for the cost of one."""
        self.frames += frames
        self.sigma.copy_(linear(self.frames, self.sigma_start, self.sigma_end, self.decay_frames))
        advance = getattr(self.policy, "step", None)
        if advance is not None:
            advance(frames)

    def _draw(self, action: Tensor, tensordict: TensorDictBase) -> Tensor:
        """Noise of scale 1, shaped as the action, in float32 at least."""
        raise NotImplementedError

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the policy's action, with noise where TorchRL's exploration type is RANDOM."""
        tensordict = self.policy(tensordict)
        if interaction_type() is not InteractionType.RANDOM:
            return tensordict
        action = cast("Tensor", tensordict.get(self.action_key))
        noisy = bounded_gaussian(action, self._draw(action, tensordict), self.sigma, self.low, self.high)
        noisy = noisy.to(torch.promote_types(action.dtype, self.low.dtype))
        if self.valid_key is not None:
            noisy = torch.where(_column(tensordict.get(self.valid_key), action), noisy, action)
        return tensordict.set(self.action_key, noisy)


class GaussianNoise(_ActionNoise):
    """A deterministic policy whose actions get independent normal noise while exploring, as in TD3 (arXiv:1802.09477).

    ``a = clamp(policy(s) + sigma w N(0, 1), low, high)`` with ``w`` half the width of the bounds (1 where there are
    none), so that one sigma suits all tasks. Sigma goes linearly from ``sigma_start`` to ``sigma_end`` in
    ``decay_frames`` frames, in closed form; :meth:`step` advances it. Schedule and bounds are buffers: ``.to(device)``
    moves them, ``state_dict`` holds them, and a captured graph honours what is written there in place. The counterpart
    of TorchRL's ``AdditiveGaussianModule``, which steps frame by frame and asks the host whether an action is in
    bounds.

    Keys read: those of the policy, and ``valid_key`` if given. Written: those of the policy.

    Args:
        policy: writes the action, such as a :class:`~torchrl_perf.modules.DeterministicActor`.
        spec: the action's spec; by default the policy's own ``spec``.
        sigma_start: standard deviation at frame 0, as a share of ``w``.
        sigma_end: from ``decay_frames`` on; by default ``sigma_start``.
        decay_frames: frames in which sigma changes.
        action_key: the action.
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the agents that exist; the others keep the policy's action. By
            default the policy's own.

    Attributes:
        policy: the policy.
        spec: the action's spec.
        sigma: buffer, 0-d, the current standard deviation.

    Raises:
        ValueError: without a spec of continuous actions, for bounds that differ between rows, an action key that the
            policy does not write, a negative or infinite sigma.
    """

    def __init__(
        self,
        policy: TensorDictModuleBase,
        *,
        spec: TensorSpec | None = None,
        sigma_start: float = 0.1,
        sigma_end: float | None = None,
        decay_frames: int = 10_000,
        action_key: NestedKey = "action",
        valid_key: NestedKey | None = None,
    ) -> None:
        super().__init__(
            policy,
            spec=spec,
            sigma_start=sigma_start,
            sigma_end=sigma_end,
            decay_frames=decay_frames,
            action_key=action_key,
            valid_key=valid_key,
        )
        self.in_keys = self._reads(self.valid_key)  # pyright: ignore

    def _draw(self, action: Tensor, tensordict: TensorDictBase) -> Tensor:
        return torch.randn_like(action, dtype=wide_dtype(action.dtype))


class OUNoise(WideBuffers, _ActionNoise):
    """A deterministic policy whose actions get noise with a memory while exploring, as in DDPG (arXiv:1509.02971).

    ``a = clamp(policy(s) + sigma w x, low, high)`` with an Ornstein-Uhlenbeck process x of its own for each number of
    the action: ``dx = -theta x dt + dW``, in exact steps. The noise has the stationary variance
    ``sigma^2 w^2 / (2 theta)`` for any ``dt``, and the correlation ``exp(-theta dt)`` from step to step. The process
    begins at 0 where an episode does; it moves on only while exploring.

    The state is a buffer of the shape of the batch of actions, float32 at least, made at construction: a captured graph
    goes on from it, and ``state_dict`` holds it. The schedule, ``w`` and the bounds are those of
    :class:`GaussianNoise`.

    Keys read: those of the policy, ``is_init_key``, and ``valid_key`` if given. Written: those of the policy.

    Args:
        policy: writes the action.
        spec: of the whole batch of actions, ``[*, D]``, such as ``env.action_spec``; by default the policy's own.
        sigma_start: sigma at frame 0, as a share of ``w``.
        sigma_end: from ``decay_frames`` on; by default ``sigma_start``.
        decay_frames: frames in which sigma changes.
        theta: rate of return to 0; 0 is Brownian motion.
        dt: length of a step.
        keys: names other than ``{"action": "action", "is_init": "is_init", "valid": None}``; ``is_init`` is bool
            ``[*]`` or ``[*, 1]``, of the envs or of the agents, and None never resets.

    Attributes:
        state: buffer ``[*, D]``, x.

    Raises:
        ValueError: as :class:`GaussianNoise`; for a negative theta, a dt that is not positive, unknown keys; when it
            acts, for actions of another shape than the spec's.
    """

    wide_buffers = ("state",)
    state: Tensor

    def __init__(
        self,
        policy: TensorDictModuleBase,
        *,
        spec: TensorSpec | None = None,
        sigma_start: float = 0.2,
        sigma_end: float | None = None,
        decay_frames: int = 10_000,
        theta: float = 0.15,
        dt: float = 1.0,
        keys: dict[str, NestedKey | None] | None = None,
    ) -> None:
        names: dict[str, Any] = {"action": "action", "is_init": "is_init", "valid": None}
        unknown = sorted(set(keys or {}) - set(names))
        if unknown:
            raise ValueError(f"keys: expected names among {sorted(names)}, received {unknown}.")
        names |= keys or {}
        super().__init__(
            policy,
            spec=spec,
            sigma_start=sigma_start,
            sigma_end=sigma_end,
            decay_frames=decay_frames,
            action_key=names["action"],
            valid_key=names["valid"],
        )
        if not (0.0 <= theta < math.inf and 0.0 < dt < math.inf):
            raise ValueError(f"expected theta of at least 0 and a positive dt, received {theta} and {dt}.")
        self.theta, self.dt, self.is_init_key = theta, dt, names["is_init"]
        state = torch.zeros(self.spec.shape, dtype=wide_dtype(self.spec.dtype), device=self.low.device)
        self.register_buffer("state", state)
        self.in_keys = self._reads(self.is_init_key, self.valid_key)  # pyright: ignore

    def _draw(self, action: Tensor, tensordict: TensorDictBase) -> Tensor:
        if action.shape != self.state.shape:
            raise ValueError(
                f"action: expected {list(self.state.shape)}, the shape of the spec, whose numbers each have a process, "
                f"received {list(action.shape)}. Remedy: spec=env.action_spec of the env that is explored."
            )
        state = self.state
        if self.is_init_key is not None:
            state = torch.where(_column(tensordict.get(self.is_init_key), action), 0.0, state)
        noise = torch.randn_like(action, dtype=wide_dtype(action.dtype))
        self.state.copy_(ou_step(state, noise, theta=self.theta, dt=self.dt))
        return self.state


def _column(flag: Any, action: Tensor) -> Tensor:
    """A flag ``[*]`` or ``[*, 1]``, also one of all agents of an env, as it broadcasts to the action ``[*, D]``."""
    return of_rows(cast("Tensor", flag), action.shape[:-1]).unsqueeze(-1)
