"""Any MuJoCo model as a batched env on MuJoCo Warp.

Dimension key: ``N`` worlds, ``Q`` positions, ``V`` velocities, ``U`` actuators, ``O`` observed numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.envs.arguments import check_count
from torchrl_perf.envs.mujoco.models import PhysicsSettings, load_model, start_of
from torchrl_perf.envs.mujoco.pictures import WorldPainter
from torchrl_perf.envs.mujoco.randomization import Randomization
from torchrl_perf.envs.mujoco.simulation import Simulation
from torchrl_perf.envs.mujoco.task_checks import (
    check_functions,
    check_pose,
    check_rows,
    check_unwritten,
    try_function,
    versions_of,
)
from torchrl_perf.envs.structured_env import EnvSpecs, StructuredEnv, Transition

__all__ = ["MuJoCoEnv"]

State = dict[str, Tensor]
LARGEST = 1e10
"""Positions and velocities from here on are no physics any more; MuJoCo's own limit."""
TOO_MANY_CONTACTS = 0b1_0011_1100
"""Bits of an overflow of the buffers of contacts: broad and narrow phase, convex shapes, height fields."""
TOO_MANY_CONSTRAINTS = 0b11
"""Bits of an overflow of the rows of constraints."""
NOT_SOLVED = 1 << 9
"""Bit of a solver that made its last iteration before it had converged."""


class MuJoCoEnv(StructuredEnv):
    """``num_envs`` worlds of a MuJoCo model on MuJoCo Warp, as one TorchRL env that never waits for the host.

    A task is three functions of tensors and a model file (MJCF). They read a state: a dict of ``"qpos"`` ``[N, Q]``,
    ``"qvel"`` ``[N, V]`` and each name of ``observed``, such as ``"xpos"`` ``[N, bodies, 3]``. Like MuJoCo after a
    step, quantities that are derived belong to the start of its last physics step, while ``qpos`` and ``qvel`` belong
    to its end. A subclass may write the methods :meth:`features`, :meth:`reward`, :meth:`is_terminated` and
    :meth:`draw_pose` in place of passing functions.

    Physics is float32. On CUDA it runs in a graph, alone or inside of the one that a trainer records; on a CPU it runs
    on Warp's CPU device, which is for tests, and where it repeats bit for bit. On CUDA it does not: two runs of eight
    steps of ``HalfCheetah`` from the same state differed by 1e-5 in positions on an H200, with ``deterministic=True``
    as without.

    **Reset.** ``qpos`` is the model's own, or a keyframe's, plus uniform noise of +-``reset_noise``, ``qvel`` that of
    the keyframe plus normal noise times ``reset_noise``. Quantities of forces are zero then. Everything else is as
    :class:`StructuredEnv` says: rows that end start over inside the step, final observations are kept, the time limit
    truncates.

    **Faults are counted, on the device.** ``overflows`` int64 ``[2]`` counts worlds and steps in which contacts or
    constraints found no room and were left out (:meth:`faults` names the remedy); ``broken_worlds`` int64 ``[]`` counts
    worlds whose positions or velocities became NaN or huge, or whose action was NaN. Such a row keeps its last good
    state, gets a reward of 0, and its episode is truncated. ``unsolved_steps`` int64 ``[]`` counts worlds and steps
    in which the solver stopped at its greatest number of iterations, which is no fault while it is rare.

    **Domain randomisation.** ``mass_noise``, ``friction_noise`` and ``gain_noise`` give each world factors of its own,
    see :class:`Randomization`.

    Keys: ``"observation"`` float32 ``[N, O]``, ``"action"`` float32 ``[N, U]`` within the model's control ranges (what
    is beyond counts as their end, as behind Gymnasium's ``ClipAction``), ``"reward"`` ``[N, 1]``, ``"is_init"`` and
    done flags as :class:`StructuredEnv` writes them.

    Args:
        model: path of an MJCF file, MJCF text, a ``mujoco.MjSpec`` or a ``mujoco.MjModel``.
        num_envs: N.
        observe: from a state to observations ``[N, O]``; by default ``qpos`` and ``qvel``.
        reward: from the states before and after a step and the action between them to rewards ``[N]``.
        terminated: from a state to bool ``[N]``; by default never.
        observed: derived quantities that the functions read, see :data:`~torchrl_perf.envs.mujoco.simulation.PLACES`.
        frame_skip: physics steps of a step.
        max_episode_steps: time limit; None means none.
        reset_noise: scale of the noise of initial states.
        keyframe: name or number of the model's keyframe that episodes begin at, before noise; None is its ``qpos0``.
        mass_noise, friction_noise, gain_noise: half-widths of the factors of domain randomisation, 0 for none.
        device: where everything lives. Default: torch's default device.
        seed: passed to ``set_seed``.
        **physics: settings in place of the model's own, by the names of
            :class:`~torchrl_perf.envs.mujoco.models.PhysicsSettings`: ``integrator="implicitfast"``, ``nconmax=32``.

    Raises:
        ImportError: without MuJoCo Warp.
        NotImplementedError: for a model that MuJoCo Warp cannot take.
        KeyError: for a function that reads a quantity that is not observed.
        TypeError: for an unknown setting, without a reward, and for a function in whose place a subclass has a method.
        ValueError: for a model that cannot be read, unknown quantities, functions and methods that return other than
            rows of the worlds or write into states, worlds that do not fit.

    Examples:
        >>> env = MuJoCoEnv("robot.xml", 4096, reward=lambda before, action, after: after["qvel"][:, 0])
        >>> env.rollout(10)["next", "reward"].shape
        torch.Size([4096, 10, 1])
    """

    initial_qpos: Tensor
    initial_qvel: Tensor
    initial_act: Tensor
    default_physics: ClassVar[PhysicsSettings] = PhysicsSettings()
    """Settings of a task in place of its model's, before those of the call."""

    def __init__(  # noqa: PLR0913  a model, three functions of a task, and the usual arguments of an env
        self,
        model: Any,
        num_envs: int,
        *,
        observe: Callable[[State], Tensor] | None = None,
        reward: Callable[[State, Tensor, State], Tensor] | None = None,
        terminated: Callable[[State], Tensor] | None = None,
        observed: Sequence[str] = (),
        frame_skip: int = 5,
        max_episode_steps: int | None = 1000,
        reset_noise: float = 0.1,
        keyframe: int | str | None = None,
        mass_noise: float = 0.0,
        friction_noise: float = 0.0,
        gain_noise: float = 0.0,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        **physics: Any,
    ) -> None:
        super().__init__(num_envs, device=device, max_episode_steps=max_episode_steps)
        check_count(type(self).__name__, "frame_skip", frame_skip)
        if isinstance(reset_noise, bool) or not isinstance(reset_noise, int | float) or not 0 <= reset_noise < math.inf:
            raise ValueError(f"reset_noise: expected a number of at least 0, received {reset_noise!r}. Remedy: 0.1.")
        where = cast("torch.device", self.device)
        where = torch.device("cuda", where.index or 0) if where.type == "cuda" else where
        settings = PhysicsSettings.of(self.default_physics, **physics)
        self.model = settings.apply(load_model(model))
        start = start_of(self.model, keyframe)
        # not as self.frame_skip, for which TorchRL would wrap the env into a transform that skips once more
        self.reset_noise = reset_noise
        self._painter: WorldPainter | None = None
        self._observe, self._reward, self._terminated = observe, reward, terminated
        check_functions(type(self), MuJoCoEnv, observe=observe, reward=reward, terminated=terminated)
        noises = {"mass_noise": mass_noise, "friction_noise": friction_noise, "gain_noise": gain_noise}
        self.randomization = Randomization(self.model, **noises, device=where)
        self.simulation = Simulation(
            self.model,
            num_envs,
            frame_skip=frame_skip,
            observed=observed,
            varied=self.randomization.names,
            settings=settings,
            device=where,
        )
        for name, value in start._asdict().items():
            # checkpoints have always had the positions, and never the rest
            numbers = torch.tensor(value, dtype=torch.float32, device=where)
            self.register_buffer(f"initial_{name}", numbers, persistent=name == "qpos")
        self.register_buffer("overflows", torch.zeros(2, dtype=torch.int64, device=where))
        self.register_buffer("broken_worlds", torch.zeros((), dtype=torch.int64, device=where))
        self.register_buffer("unsolved_steps", torch.zeros((), dtype=torch.int64, device=where))
        self.begin(seed)

    @property
    def dt(self) -> float:
        """Seconds of a step."""
        return float(self.model.opt.timestep) * self.simulation.frame_skip

    # -- the task --------------------------------------------------------------------------------------------------

    def features(self, state: State) -> Tensor:
        """Return what is observed of ``state``, ``[N, O]``."""
        if self._observe is not None:
            return self._observe(state)
        return torch.cat([state["qpos"], state["qvel"]], -1)

    def reward(self, before: State, action: Tensor, after: State) -> Tensor:
        """Return the rewards ``[N]`` of ``action`` ``[N, U]`` between two states."""
        if self._reward is None:
            raise TypeError(
                f"{type(self).__name__} expected a reward, received none. Remedy: reward=lambda before, action, after: "
                "a tensor [N]."
            )
        return self._reward(before, action, after)

    def is_terminated(self, state: State) -> Tensor:
        """Return in which worlds the task has ended, bool ``[N]``."""
        if self._terminated is not None:
            return self._terminated(state)
        return torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def draw_pose(self) -> tuple[Tensor, Tensor]:
        """Return initial positions ``[N, Q]`` and velocities ``[N, V]`` of all worlds; new tensors."""
        return self.around(self.reset_noise), self.initial_qvel + self.normal(self.reset_noise)

    def _pose(self) -> tuple[Tensor, Tensor]:
        """What :meth:`draw_pose` returns, of the right form."""
        qpos, qvel = self.draw_pose()
        check_pose("positions", qpos, (self.num_envs, self.model.nq))
        check_pose("velocities", qvel, (self.num_envs, self.model.nv))
        return qpos, qvel

    def around(self, width: float) -> Tensor:
        """Return the positions of the start plus uniform noise of +-``width``, ``[N, Q]``."""
        return self.initial_qpos + self.uniform(-width, width, self.model.nq)

    def uniform(self, low: float, high: float, count: int) -> Tensor:
        """Return uniform numbers ``[N, count]``."""
        # whatever torch's default dtype is
        return low + (high - low) * torch.rand(self.num_envs, count, dtype=torch.float32, device=self.device)

    def normal(self, scale: float) -> Tensor:
        """Return normal velocities ``[N, V]`` of the standard deviation ``scale``."""
        return scale * torch.randn(self.num_envs, self.model.nv, dtype=torch.float32, device=self.device)

    def picture(self, state: State, height: int, width: int) -> Tensor:
        """Return pictures ``[N, H, W, 3]`` uint8 of all worlds, drawn one after the other on the host.

        Raises:
            ValueError: where OpenGL cannot be used, with what installs it.
        """
        if self._painter is None or self._painter.size != (height, width):
            self._painter = WorldPainter(self.model, height, width)
        drawn = [self._painter.draw(world) for world in state["qpos"].to("cpu", torch.float64).numpy()]
        return torch.as_tensor(np.stack(drawn)).to(self.device)

    # -- faults ----------------------------------------------------------------------------------------------------

    def fault_counts(self) -> dict[str, Tensor]:
        """Return counts, 0-d int64: contact_overflows, constraint_overflows, broken_worlds and unsolved_steps."""
        contacts, constraints = self.overflows.unbind()
        return {
            "contact_overflows": contacts,
            "constraint_overflows": constraints,
            "broken_worlds": self.broken_worlds,
            "unsolved_steps": self.unsolved_steps,
        }

    def faults(self) -> dict[str, str]:
        """Return what has gone wrong since the env was made, by the names of the counts; waits for the host."""
        contacts, constraints, broken = (int(count) for count in (*self.overflows, self.broken_worlds))
        found = {}
        if contacts:
            found["contact_overflows"] = (
                f"nconmax: expected room for all contacts, received {contacts} steps of worlds with more than fit, "
                "which were left out. Remedy: a larger nconmax=."
            )
        if constraints:
            found["constraint_overflows"] = (
                f"njmax: expected room for all constraints, received {constraints} steps of worlds with more than fit, "
                "which were left out. Remedy: a larger njmax=."
            )
        if broken:
            found["broken_worlds"] = (
                f"physics: expected finite positions, velocities and actions, received {broken} worlds without, which "
                "were reset. Remedy: a smaller timestep=, integrator='implicitfast', or a softer model; a policy whose "
                "numbers stay finite."
            )
        return found

    # -- the hooks of the base -------------------------------------------------------------------------------------

    def make_specs(self) -> EnvSpecs:
        """Return the specs; the size of an observation is that of one drawn state."""
        limited = torch.as_tensor(self.model.actuator_ctrllimited, dtype=torch.bool)
        ranges = torch.as_tensor(self.model.actuator_ctrlrange, dtype=torch.float32)
        low = torch.where(limited, ranges[:, 0], -torch.inf).to(self.device)
        high = torch.where(limited, ranges[:, 1], torch.inf).to(self.device)
        state = self.simulation.at(*self._pose())
        still = torch.zeros(self.num_envs, self.model.nu, dtype=torch.float32, device=self.device)
        for name, function, inputs in (
            ("reward", self._reward, (state, still, state)),
            ("terminated", self._terminated, (state,)),
        ):
            if function is not None:  # a task that cannot run is refused at once
                try_function(name, function, state, *inputs)
        size = try_function("observe", self.features, state, state).shape[-1]
        action = self.box(low, high, self.model.nu) if bool(limited.all()) else self.unbounded(self.model.nu)
        self._range = low, high
        return EnvSpecs(
            observation={"observation": self.unbounded(size)},
            action={"action": action},
            reward={"reward": self.unbounded(1)},
        )

    def draw_state(self) -> State:
        """Return fresh worlds, with fields of the model of their own."""
        state = self.simulation.at(*self._pose())
        if "act" in state:
            state["act"] = self.initial_act.expand_as(state["act"]).clone()
        return {**state, **self.randomization.draw(self.num_envs)}

    def advance(self, state: State, action: Tensor | dict[NestedKey, Tensor]) -> Transition:
        """Step the physics, and keep worlds in which it broke as they were."""
        control = cast("Tensor", action).clamp(*self._range)
        after, overflow = self.simulation.step(state, control, state)
        sound = (after["qpos"].abs() < LARGEST).all(-1) & (after["qvel"].abs() < LARGEST).all(-1)
        sound &= ~control.isnan().any(-1)  # which physics would take for a bound of the actuator
        after = {
            name: torch.where(sound.view(-1, *(1,) * (value.ndim - 1)), value, state[name])
            for name, value in after.items()
        }
        short = torch.stack([(overflow & TOO_MANY_CONTACTS) != 0, (overflow & TOO_MANY_CONSTRAINTS) != 0])
        self.overflows += short.sum(-1)
        self.broken_worlds += (~sound).sum()
        self.unsolved_steps += ((overflow & NOT_SOLVED) != 0).sum()
        versions = versions_of(state, after)
        reward = torch.where(sound, check_rows("reward", self.reward(state, control, after), self.num_envs), 0.0)
        check_unwritten("reward", versions, state, after)
        terminated = check_rows("terminated", self.is_terminated(after), self.num_envs) & sound
        check_unwritten("terminated", versions, state, after)
        fields = {name: state[name] for name in self.randomization.names}
        return Transition({**after, **fields}, {"reward": reward.unsqueeze(-1)}, terminated, ~sound)

    def observe(self, state: State) -> dict[NestedKey, Tensor]:
        """Return the observation of ``state``."""
        versions = versions_of(state)
        seen = self.features(state)
        check_unwritten("observe", versions, state)
        return {"observation": seen}
