"""The env of latent dynamics: a vector field, an input, process noise, and noisy observations.

Dimension key: ``N`` envs, ``D`` channels of the observation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypedDict

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from typing_extensions import Unpack

from torchrl_perf.envs.arguments import check_count
from torchrl_perf.envs.drawing import BLUE, INK, RED, Line
from torchrl_perf.envs.latent_field.action_encoder import make_action_encoder
from torchrl_perf.envs.latent_field.fields import INTEGRATORS, VectorField, flow, make_field
from torchrl_perf.envs.latent_field.observation import NOISES, ObservationMap, draw_observation
from torchrl_perf.envs.structured_env import EnvSpecs, StructuredEnv, Transition

__all__ = ["LatentField", "LatentOptions", "goal_reward"]


class LatentOptions(TypedDict, total=False):
    """Further arguments of :class:`LatentField`, see there."""

    dt: float
    process_noise: float
    integrator: Literal["euler", "rk4"]
    substeps: int
    observation_std: float
    rate: float
    initial_range: float
    initial_place: tuple[float, float]
    extent: float | None
    goal: tuple[float, float] | None
    action_cost: float
    action_encoder: str | Callable[[Tensor, Tensor], Tensor] | None
    world_seed: int
    dtype: torch.dtype


ARROWS = 9  # of the drawn field, in a row


class LatentField(StructuredEnv):
    """A point z on the plane follows an unknown vector field f; inputs push it, and many channels observe it.

    ``z' = z + (f(z) + a) dt + sqrt(Q dt) N(0, I)``: the world of active learning of latent dynamics, as in Dowling,
    Zhao and Park, "eXponential FAmily Dynamical Systems" (arXiv:2403.01371). Inputs are chosen so that the observations
    tell most about f.

    **Fields**: ``"limit_cycle"``, ``"double_limit_cycle"``, ``"van_der_pol"``, ``"duffing"``, ``"snowman"`` and
    ``"multi_attractor"``, see :mod:`torchrl_perf.envs.latent_field`, or a function of points ``[*, 2]``.

    **Integration**: ``"euler"``, or ``"rk4"``, in ``substeps`` steps for each dt, the input held constant. Process
    noise is added once a dt. Euler's method changes the limit cycle: on the Hopf normal form with d = w = 1 and dt =
    0.1 its radius is 1.02476 and its angular speed 1.0017.

    **Observation**: means of D channels by :class:`ObservationMap`, then ``"none"``, ``"gaussian"`` or ``"poisson"``
    noise. Counts need the log-linear map, whose means are expected counts.

    **Reward**: 0, or with a ``goal``, ``-|z' - goal|^2 - action_cost |a|^2``.

    Episodes begin uniformly within ``initial_range`` of ``initial_place`` along each axis, terminate where the point
    leaves ``[-extent, extent]^2``, if there is an extent, and are truncated after ``max_episode_steps``. A point that
    is no longer finite is truncated and re-drawn.

    Read: ``"action"`` [N, 2], clipped to ``[-action_max, action_max]``. Written at the root and under "next":
    ``"observation"`` [N, D] and ``"latent"`` [N, 2], z; ``("next", "reward")`` [N, 1].

    **State**: ``latent`` [N, 2], and with noise ``observation`` [N, D], as buffers ``state_...``. The map's tables are
    buffers, too.

    Args:
        num_envs: N, at least 1.
        field: f.
        observation: ``"log_linear"``, ``"linear"``, ``"identity"`` or ``"mlp"``.
        noise: of the observation; by default ``"poisson"`` for the log-linear map, ``"gaussian"`` for the others.
        observation_size: D; by default 20, or 2 for the identity.
        action_max: bound of each input.
        max_episode_steps: time limit; none by default.
        device: where everything lives.
        seed: passed to ``set_seed``.
        **options: ``dt`` (0.1), ``process_noise`` (Q, 0.01), ``integrator`` ("euler"), ``substeps`` (1),
            ``observation_std`` (of Gaussian noise, 0.1), ``rate`` (mean counts of the log-linear map, 1),
            ``initial_range`` (1.5), ``initial_place`` ((0, 0)), ``extent`` (None: the whole plane), ``goal`` (None),
            ``action_cost`` (0), ``action_encoder`` (a name of :class:`ActionEncoder`, or a function of inputs and
            points, ``[*, 2]`` each, whose result is added to f in place of the input), ``world_seed`` (0; seed of the
            observation map, the action encoder and the random field, which ``seed`` does not change), ``dtype``
            (float32).

    Attributes:
        field: f.
        observation_map: the channels.

    Raises:
        ValueError: for an unknown field, observation, noise or integrator, counts of a map other than the log-linear
            one, numbers outside what is described.
        TypeError: for an unknown option, a dtype that is not a float type.
    """

    resets_nonfinite = True
    initial_place: Tensor
    scene_half_width = 1.05

    def __init__(
        self,
        num_envs: int,
        *,
        field: str | VectorField = "limit_cycle",
        observation: str = "log_linear",
        noise: str | None = None,
        observation_size: int | None = None,
        action_max: float = 0.1,
        max_episode_steps: int | None = None,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        **options: Unpack[LatentOptions],
    ) -> None:
        """Check the arguments and draw world and first states; arguments as in the class."""
        unknown = sorted(set(options) - set(LatentOptions.__annotations__))
        if unknown:
            raise TypeError(
                f"LatentField expected options of {sorted(LatentOptions.__annotations__)}, received {unknown}. "
                "Remedy: take the others out."
            )
        super().__init__(
            num_envs, device=device, dtype=options.get("dtype", torch.float32), max_episode_steps=max_episode_steps
        )
        self.observation_noise = _default_noise(observation) if noise is None else noise
        _check_noise(observation, self.observation_noise)
        self.action_max = _number("action_max", action_max, above=0.0)
        self.dt = _number("dt", options.get("dt", 0.1), above=0.0)
        self.process_noise = _number("process_noise", options.get("process_noise", 0.01))
        self.observation_std = _number("observation_std", options.get("observation_std", 0.1))
        self._set_place(options)
        self.action_cost = _number("action_cost", options.get("action_cost", 0.0))
        self.integrator, self.substeps = options.get("integrator", "euler"), options.get("substeps", 1)
        if self.integrator not in INTEGRATORS:
            raise ValueError(
                f"integrator: expected one of {list(INTEGRATORS)}, received {self.integrator!r}. Remedy: one of these."
            )
        check_count("LatentField", "substeps", self.substeps)
        world = options.get("world_seed", 0)
        encoder = options.get("action_encoder")
        if isinstance(encoder, str):
            encoder = make_action_encoder(encoder, seed=world, device=self.device, dtype=self.dtype)
        self.action_encoder = encoder
        self.field, radius = make_field(field, seed=world, device=self.device, dtype=self.dtype)
        size = (2 if observation == "identity" else 20) if observation_size is None else observation_size
        self.observation_map = ObservationMap(
            observation,
            size,
            dt=self.dt,
            rate=options.get("rate", 1.0),
            radius=radius,
            seed=world,
            device=self.device,
            dtype=self.dtype,
        )
        self._set_goal(options.get("goal"))
        self.begin(seed)

    # -- the task --------------------------------------------------------------------------------------------------

    def make_specs(self) -> EnvSpecs:
        """Return the keys of the class docstring."""
        return EnvSpecs(
            observation={"observation": self.unbounded(self.observation_map.size), "latent": self.unbounded(2)},
            action={"action": self.box(-self.action_max, self.action_max, 2)},
            reward={"reward": self.unbounded(1)},
        )

    def draw_state(self) -> dict[str, Tensor]:
        """Return points of a square around the initial place, and their observations."""
        uniform = torch.rand(self.num_envs, 2, dtype=self.dtype, device=self.device)
        return self._seen(self.initial_place + (2.0 * uniform - 1.0) * self.initial_range)

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return the field as short lines on a grid, and the point."""
        width = max(self.initial_range, 1.5)  # points may begin in one place
        side = torch.linspace(-1.0, 1.0, ARROWS, dtype=self.dtype, device=self.device) * width * 1.4
        grid = torch.cartesian_prod(side, side)
        flow_ = self.field(grid)
        tips = grid + flow_ / flow_.norm(dim=-1, keepdim=True).clamp_min(1e-6) * width * 0.1
        unit = 1 / (2.2 * width)
        starts, ends = ((each * unit).expand(self.num_envs, -1, 2) for each in (grid, tips))
        point = state["latent"] * unit
        return [Line(starts, ends, 0.005, BLUE), Line(starts, starts, 0.007, INK), Line(point, point, 0.025, RED)]

    def advance(self, state: dict[str, Tensor], action: Tensor | dict[NestedKey, Tensor]) -> Transition:
        """Follow the field for a time dt, add noise, observe."""
        assert isinstance(action, Tensor)
        latent = self.predict(state["latent"], action)
        if self.process_noise > 0.0:
            latent = latent + math.sqrt(self.process_noise * self.dt) * torch.randn_like(latent)
        if self.goal is None:
            reward = torch.zeros(self.num_envs, dtype=self.dtype, device=self.device)
        else:
            reward = goal_reward(latent, self.clip(action), self.goal, self.action_cost)
        if self.extent is None:
            left = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        else:
            left = (latent.abs() > self.extent).any(-1)
        return Transition(self._seen(latent), {"reward": reward.unsqueeze(-1)}, left)

    def observe(self, state: dict[str, Tensor]) -> dict[NestedKey, Tensor]:
        """Return the entries of the class docstring."""
        seen = state.get("observation")
        seen = self.observation_map(state["latent"]) if seen is None else seen.clone()
        return {"observation": seen, "latent": state["latent"].clone()}

    # -- from outside ----------------------------------------------------------------------------------------------

    def clip(self, action: Tensor) -> Tensor:
        """Inputs ``[*, 2]`` within the bounds."""
        return action.clamp(-self.action_max, self.action_max)

    def predict(self, latent: Tensor, action: Tensor) -> Tensor:
        """The true dynamics without process noise, such as a planner's model.

        Args:
            latent: ``[*, 2]``.
            action: ``[*, 2]``, clipped here.

        Returns:
            Points ``[*, 2]`` after a time dt.
        """
        push = self.clip(action)
        if self.action_encoder is not None:
            push = self.action_encoder(push, latent)
        return flow(self.field, latent, push, self.dt, integrator=self.integrator, substeps=self.substeps)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _seen(self, latent: Tensor) -> dict[str, Tensor]:
        """The state of points: it includes the noise, so that observing twice gives the same."""
        if self.observation_noise == "none":
            return {"latent": latent}
        mean = self.observation_map(latent)
        return {"latent": latent, "observation": draw_observation(mean, self.observation_noise, self.observation_std)}

    def _set_place(self, options: LatentOptions) -> None:
        """Where points begin, and where they end."""
        self.initial_range = _number("initial_range", options.get("initial_range", 1.5))
        place = _point("initial_place", options.get("initial_place", (0.0, 0.0)), self.dtype)
        self.register_buffer("initial_place", place.to(self.device), persistent=False)
        extent, furthest = options.get("extent"), float(place.abs().max()) + self.initial_range
        self.extent = None if extent is None else _number("extent", extent, above=furthest)

    def _set_goal(self, goal: tuple[float, float] | None) -> None:
        self.goal: Tensor | None
        if goal is None:
            self.goal = None
            return
        self.register_buffer("goal", _point("goal", goal, self.dtype).to(self.device), persistent=False)


def goal_reward(latent: Tensor, action: Tensor, goal: Tensor, action_cost: float = 0.0) -> Tensor:
    """``-|z - goal|^2 - action_cost |a|^2``.

    Args:
        latent: ``[*, 2]``.
        action: ``[*, 2]``.
        goal: ``[2]``.
        action_cost: weight of the second term.

    Returns:
        ``[*]``.
    """
    return -(latent - goal).square().sum(-1) - action_cost * action.square().sum(-1)


def _default_noise(observation: str) -> str:
    return "poisson" if observation == "log_linear" else "gaussian"


def _check_noise(observation: str, noise: str) -> None:
    if noise not in NOISES:
        raise ValueError(f"noise: expected one of {list(NOISES)}, received {noise!r}. Remedy: one of these.")
    if noise == "poisson" and observation != "log_linear":
        raise ValueError(
            f"noise: expected 'gaussian' or 'none' with observation={observation!r}, whose means may be negative, "
            "received 'poisson'. Remedy: observation='log_linear'."
        )


def _point(name: str, value: tuple[float, float], dtype: torch.dtype) -> Tensor:
    """Two finite numbers."""
    point = torch.as_tensor(value, dtype=dtype)
    if point.shape != (2,) or not bool(point.isfinite().all()):
        raise ValueError(f"{name}: expected a point of two finite numbers, received {value!r}. Remedy: {name}=(x, y).")
    return point


def _number(name: str, value: float, above: float | None = None) -> float:
    """A finite number of at least 0, or above a bound."""
    fits = math.isfinite(value) and (value >= 0.0 if above is None else value > above)
    if not fits:
        wanted = "of at least 0" if above is None else f"above {above:g}"
        raise ValueError(
            f"{name}: expected a finite number {wanted}, received {value!r}. Remedy: a number {wanted}, not inf or nan."
        )
    return float(value)
