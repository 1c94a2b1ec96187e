"""Noise added to the actions of a deterministic policy: Gaussian, or correlated in time (Ornstein-Uhlenbeck)."""

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
from torchrl_perf.modules.specs import composite_of, leaf_of
from torchrl_perf.modules.wide_buffers import WideBuffers
from torchrl_perf.runtime.draws import normal


class _ActionNoise(TensorDictModuleBase):
    """A policy, or one that comes before, and noise on its action while exploring; see :class:`GaussianNoise`."""

    sigma: Tensor
    frames: Tensor
    sigma_start: Tensor
    sigma_end: Tensor
    decay_frames: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self,
        policy: TensorDictModuleBase | TensorSpec,
        *,
        spec: TensorSpec | None,
        sigma_start: float,
        sigma_end: float | None,
        decay_frames: int,
        action_key: NestedKey,
        valid_key: NestedKey | None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(policy, TensorSpec):
            policy, spec = cast("Any", None), policy
        if policy is not None and action_key not in policy.out_keys:
            raise ValueError(
                f"action_key: expected a key that the policy writes, {policy.out_keys}, received {action_key!r}. "
                "Remedy: one of these keys."
            )
        leaf = leaf_of(getattr(policy, "spec", None) if spec is None else spec, action_key)
        if not isinstance(leaf, TensorSpec) or not leaf.dtype.is_floating_point:
            received = "none" if leaf is None else f"{type(leaf).__name__} of {leaf.dtype}"
            raise ValueError(
                f"spec: expected that of continuous actions, received {received}. Remedy: spec=env.action_spec; "
                "EpsilonGreedy for discrete actions."
            )
        leaf = leaf if device is None else leaf.to(device)
        sigma_end = sigma_start if sigma_end is None else sigma_end
        for name, value in (("sigma_start", sigma_start), ("sigma_end", sigma_end)):
            if not 0.0 <= value < math.inf:
                raise ValueError(
                    f"{name}: expected a finite number of at least 0, received {value}. Remedy: 0 or more."
                )
        self.policy, self.action_key = policy, action_key
        self.spec = composite_of(leaf, action_key)
        # an agent that does not exist keeps its neutral action; the policy has the key that says which those are
        self.valid_key = getattr(policy, "valid_key", None) if valid_key is None else valid_key
        self.out_keys = [action_key] if policy is None else list(policy.out_keys)  # pyright: ignore
        low, high = action_bounds(leaf, finite=False)
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        for name, value in (("sigma", sigma_start), ("sigma_start", sigma_start), ("sigma_end", sigma_end)):
            self.register_buffer(name, torch.tensor(float(value), device=low.device))
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64, device=low.device))
        self.register_buffer("decay_frames", torch.tensor(decay_frames, dtype=torch.int64, device=low.device))

    def _reads(self, *more: NestedKey | None) -> list[NestedKey]:
        """The policy's keys, and those of the others that are neither None nor among them."""
        keys = [self.action_key] if self.policy is None else list(self.policy.in_keys)
        return keys + [key for key in more if key is not None and key not in keys]

    def step(self, frames: int | Tensor = 1) -> None:
        """Advances the schedule of sigma, and the policy's own, by a number of frames at the cost of one."""
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
        if self.policy is not None:
            tensordict = self.policy(tensordict)
        if interaction_type() is not InteractionType.RANDOM:
            return tensordict
        action = cast("Tensor", tensordict.get(self.action_key))
        draw = self._draw(action, tensordict)
        if self.policy is None:
            # in the unit and the dtype of actions, as TorchRL's
            noisy = (action + self.sigma * draw).clamp(self.low, self.high).to(action.dtype)
        else:
            noisy = bounded_gaussian(action, draw, self.sigma, self.low, self.high)
            noisy = noisy.to(torch.promote_types(action.dtype, self.low.dtype))
        if self.valid_key is not None:
            noisy = torch.where(_column(tensordict.get(self.valid_key), action), noisy, action)
        return tensordict.set(self.action_key, noisy)


class GaussianNoise(_ActionNoise):
    """A deterministic policy whose actions get independent normal noise while exploring, as in TD3 (arXiv:1802.09477).

    ``a = clamp(policy(s) + sigma w N(0, 1), low, high)`` with ``w`` half the width of the bounds (1 where there are
    none), so that one sigma suits all tasks. Sigma goes linearly from ``sigma_start`` to ``sigma_end`` in
    ``decay_frames`` frames, in closed form; :meth:`step` advances it. Schedule and bounds are buffers: ``.to(device)``
    moves them, ``state_dict`` holds them, and a captured graph sees in-place changes. The counterpart of TorchRL's
    ``AdditiveGaussianModule``, which steps frame by frame and asks the host whether an action is in bounds.

    With a spec in place of the policy it is called as ``AdditiveGaussianModule`` is and follows a policy,
    ``TensorDictSequential(policy, GaussianNoise(spec))``: ``a = clamp(a + sigma (mean + std N(0, 1)), low, high)``,
    where sigma is in the unit of actions.

    Keys read: those of the policy (or the action), and ``valid_key`` if given. Written: those of the policy.

    Args:
        policy: writes the action, such as a :class:`~torchrl_perf.modules.DeterministicActor`; or a spec.
        sigma_init: standard deviation at frame 0, as a share of ``w``, 0.1 by default; 1 without a policy.
        sigma_end: from ``annealing_num_steps`` on; by default ``sigma_init``; 0.1 without a policy.
        annealing_num_steps: frames in which sigma changes, 10,000 by default; 1,000 without a policy.
        mean: of the noise; 0.
        std: of the noise, which sigma multiplies; 1.
        spec: the action's spec; by default the policy's own ``spec``.
        action_key: the action.
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the agents that exist; the others keep the policy's action. By
            default the policy's own.
        device: of bounds and schedule; by default the spec's.
        **former: ``sigma_start`` and ``decay_frames`` for ``sigma_init`` and ``annealing_num_steps``.

    Attributes:
        policy: the policy, or None.
        spec: a Composite that holds the action's spec.
        sigma: buffer, 0-d, the current standard deviation.

    Raises:
        ValueError: without a spec of continuous actions, for bounds that differ between rows, an action key that the
            policy does not write, a negative or infinite sigma or std.
        TypeError: for other arguments.
    """

    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self,
        policy: TensorDictModuleBase | TensorSpec | None = None,
        sigma_init: float | None = None,
        sigma_end: float | None = None,
        annealing_num_steps: int | None = None,
        mean: float = 0.0,
        std: float = 1.0,
        *,
        spec: TensorSpec | None = None,
        action_key: NestedKey = "action",
        valid_key: NestedKey | None = None,
        device: torch.device | str | None = None,
        **former: Any,
    ) -> None:
        policy = cast("Any", spec if policy is None else policy)
        follows = isinstance(policy, TensorSpec)
        sigma_init = former.pop("sigma_start", sigma_init)
        steps = former.pop("decay_frames", annealing_num_steps)
        _refuse(self, former)
        if not (math.isfinite(mean) and 0.0 <= std < math.inf):
            raise ValueError(
                f"expected a finite mean and a finite std of at least 0, received {mean} and {std}. Remedy: mean=0.0, "
                "std=0.1, for example."
            )
        super().__init__(
            policy,
            spec=None if follows else spec,
            sigma_start=(1.0 if follows else 0.1) if sigma_init is None else sigma_init,
            sigma_end=0.1 if follows and sigma_end is None else sigma_end,
            decay_frames=(1_000 if follows else 10_000) if steps is None else steps,
            action_key=action_key,
            valid_key=valid_key,
            device=device,
        )
        self.mean, self.std = float(mean), float(std)
        self.in_keys = self._reads(self.valid_key)  # pyright: ignore

    def _draw(self, action: Tensor, tensordict: TensorDictBase) -> Tensor:
        noise = normal(action.shape, dtype=wide_dtype(action.dtype), device=action.device)
        return noise if (self.mean, self.std) == (0.0, 1.0) else self.mean + self.std * noise


class OUNoise(WideBuffers, _ActionNoise):
    """A deterministic policy whose actions get correlated noise while exploring, as in DDPG (arXiv:1509.02971).

    ``a = clamp(policy(s) + sigma w x, low, high)`` with a separate Ornstein-Uhlenbeck process x for each number of the
    action: ``dx = -theta x dt + dW``, in exact steps. The noise has the stationary variance
    ``sigma^2 w^2 / (2 theta)`` for any ``dt``, and the correlation ``exp(-theta dt)`` from step to step. The process
    starts at 0 with each episode, and advances only while exploring.

    The state is a buffer of the shape of the batch of actions, float32 at least, made at construction: a captured graph
    continues from it, and ``state_dict`` holds it. The schedule, ``w`` and the bounds are those of
    :class:`GaussianNoise`.

    With a spec in place of the policy it is called as TorchRL's ``OrnsteinUhlenbeckProcessModule`` is and follows a
    policy, ``TensorDictSequential(policy, OUNoise(spec))``: ``a = clamp(a + eps sigma x, low, high)`` in the unit of
    actions, with TorchRL's defaults, ``dt = 0.01`` among them. The steps are exact here, too, where TorchRL's are
    Euler's.

    Keys read: those of the policy (or the action), ``is_init_key``, and ``valid_key`` if given. Written: those of the
    policy.

    Args:
        policy: writes the action; or the spec of the whole batch of actions.
        eps_init: sigma at frame 0, as a share of ``w``, 0.2 by default; without a policy a factor of ``sigma``, 1.
        eps_end: from ``annealing_num_steps`` on; by default ``eps_init``; without a policy 0.1.
        annealing_num_steps: frames in which it changes, 10,000 by default; 1,000 without a policy.
        theta: rate of return to 0; 0 is Brownian motion.
        mu: 0: the process returns to the policy's action.
        sigma: without a policy, of the process, 0.2.
        dt: length of a step, 1 by default; 0.01 without a policy.
        spec: of the whole batch of actions, ``[*, D]``, such as ``env.action_spec``; by default the policy's own.
        action_key: the action.
        is_init_key: bool ``[*]`` or ``[*, 1]``, of the envs or of the agents; None never resets.
        device: of state and schedule; by default the spec's.
        **former: ``sigma_start``, ``sigma_end`` and ``decay_frames`` for ``eps_init``, ``eps_end`` and
            ``annealing_num_steps``; ``keys``: a dict of names at "action", "is_init" and "valid".

    Attributes:
        state: buffer ``[*, D]``, x.

    Raises:
        ValueError: as :class:`GaussianNoise`; for a negative theta, a mu that is not 0, a dt that is not positive,
            unknown keys; when it acts, for actions of another shape than the spec's.
        TypeError: for other arguments.
    """

    wide_buffers = ("state",)
    state: Tensor

    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self,
        policy: TensorDictModuleBase | TensorSpec | None = None,
        eps_init: float | None = None,
        eps_end: float | None = None,
        annealing_num_steps: int | None = None,
        theta: float = 0.15,
        mu: float = 0.0,
        sigma: float | None = None,
        dt: float | None = None,
        *,
        spec: TensorSpec | None = None,
        action_key: NestedKey = "action",
        is_init_key: NestedKey | None = "is_init",
        device: torch.device | str | None = None,
        **former: Any,
    ) -> None:
        policy = cast("Any", spec if policy is None else policy)
        follows = isinstance(policy, TensorSpec)
        start, end = former.pop("sigma_start", eps_init), former.pop("sigma_end", eps_end)
        steps, keys = former.pop("decay_frames", annealing_num_steps), former.pop("keys", None)
        _refuse(self, former)
        if mu != 0.0 or (sigma is not None and not follows):
            raise ValueError(
                f"mu, sigma: expected 0, and None with a policy, received {mu} and {sigma}. Remedy: a policy whose "
                "action is the mean, and sigma_start; or a spec in place of the policy."
            )
        names: dict[str, Any] = {"action": action_key, "is_init": is_init_key, "valid": None}
        unknown = sorted(set(keys or {}) - set(names))
        if unknown:
            raise ValueError(
                f"keys: expected names among {sorted(names)}, received {unknown}. Remedy: names among these."
            )
        names |= keys or {}
        scale = (0.2 if sigma is None else sigma) if follows else 1.0
        start = (1.0 if follows else 0.2) if start is None else start
        end = 0.1 if follows and end is None else end
        dt = (0.01 if follows else 1.0) if dt is None else dt
        super().__init__(
            policy,
            spec=None if follows else spec,
            sigma_start=start * scale,
            sigma_end=None if end is None else end * scale,
            decay_frames=(1_000 if follows else 10_000) if steps is None else steps,
            action_key=names["action"],
            valid_key=names["valid"],
            device=device,
        )
        if not (0.0 <= theta < math.inf and 0.0 < dt < math.inf):
            raise ValueError(
                f"expected theta of at least 0 and a positive dt, received {theta} and {dt}. Remedy: theta=0.15, "
                "dt=0.01, for example."
            )
        self.theta, self.dt, self.is_init_key = theta, dt, names["is_init"]
        leaf = leaf_of(self.spec, self.action_key)
        state = torch.zeros(leaf.shape, dtype=wide_dtype(leaf.dtype), device=self.low.device)
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
            flag = tensordict.get(self.is_init_key, None)
            if flag is None:
                raise KeyError(
                    f"Expected {self.is_init_key!r}, True where an episode begins, received "
                    f"{sorted(map(str, tensordict.keys()))}. Remedy: TorchRL's InitTracker, or is_init_key=None."
                )
            state = torch.where(_column(flag, action), 0.0, state)
        noise = normal(action.shape, dtype=wide_dtype(action.dtype), device=action.device)
        self.state.copy_(ou_step(state, noise, theta=self.theta, dt=self.dt))
        return self.state


def _refuse(owner: object, unknown: dict[str, Any]) -> None:
    if unknown:
        raise TypeError(
            f"{type(owner).__name__}: expected its own arguments, received {sorted(unknown)}. Remedy: take these out."
        )


def _column(flag: Any, action: Tensor) -> Tensor:
    """A flag ``[*]`` or ``[*, 1]``, of agents or of an env, in a shape that broadcasts to the action ``[*, D]``."""
    return of_rows(cast("Tensor", flag), action.shape[:-1]).unsqueeze(-1)
