"""Several surface vehicles on their way to goals, in tensors.

Dimension key: ``E`` envs, ``R`` robots, ``O`` obstacles, ``C`` vortex cores, ``M = R + O`` objects.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from typing_extensions import Unpack

from torchrl_perf.envs.arguments import check_count
from torchrl_perf.envs.drawing import GREEN, INK, PALE, RED, Line
from torchrl_perf.envs.marine import sensing
from torchrl_perf.envs.marine.colregs import turn_angle
from torchrl_perf.envs.marine.currents import current
from torchrl_perf.envs.marine.curriculum import Curriculum
from torchrl_perf.envs.marine.layouts import CANDIDATES, OBSTACLE_RADIUS, WORLD, Contents, Layout, draw_layout
from torchrl_perf.envs.marine.outcomes import events, reward
from torchrl_perf.envs.marine.scenarios import check_room, fit_layout
from torchrl_perf.envs.marine.vehicle import SUBSTEPS, THRUST_HIGH, THRUST_LOW, THRUST_RATE, TIME_STEP, drive
from torchrl_perf.envs.structured_env import EnvSpecs, StructuredEnv, Transition

__all__ = ["MarineNavigation", "MarineOptions"]

_LEVELS = 5  # of each thruster's change, discrete
_CHANGE = THRUST_RATE * SUBSTEPS * TIME_STEP  # newtons per action at full rate


class MarineOptions(TypedDict, total=False):
    """Further arguments of :class:`MarineNavigation`, see there."""

    max_robots: int | None
    max_obstacles: int | None
    max_cores: int | None
    observation_noise: bool
    colregs: bool
    candidates: int
    fresh_layouts: int | None
    dtype: torch.dtype


class MarineNavigation(StructuredEnv):
    """Surface vehicles that go to their goals through currents, past obstacles and each other, by the rules of the sea.

    The world in which Lin et al. train distributional agents for several vehicles (arXiv:2402.11799, and with
    continuous actions arXiv:2412.09466), written from its equations: a catamaran of 5 m in three degrees of freedom,
    two thrusters, vortices, half a second per action in ten substeps. Each robot starts at rest, heading anywhere.

    **Actions.** ``("agents", "action")``: how the two thrusts change within the step, clipped to [-500, 1000] N.
    Continuous: float [E, R, 2] in [-1, 1], times 500 N. Discrete: int64 [E, R] in 0..24, ``5 left + right`` with 0..4
    for -500, -250, 0, 250, 500 N.

    **Observations.** ``("agents", "observation")`` [E, R, 37]: goal in the body frame, surge and sway over ground, yaw
    rate, both thrusts, scaled by ``sensing.SELF_SCALE``; the five nearest objects within 20 m (position, velocity,
    radius, scaled by ``sensing.OBJECT_SCALE``, perceived with noise); five flags. :meth:`split_observation` takes it
    apart. ``("agents", "active")`` bool [E, R, 1]: whether the robot takes part in the coming step.

    **Under "next"**: ``("agents", "reward")`` [E, R, 1]: -0.1, the metres made good, -0.1 times ``colregs``, +10 at the
    goal or -5 for a collision, 0 for an inactive robot. ``("agents", "event")`` int8 [E, R, 1]: 0, 1 at the
    goal, 2 for a collision. ``("agents", "colregs")`` [E, R, 1]: radians by which the course deviates from the rules of
    the road, see :func:`turn_angle`. TorchRL keeps the last two with the observations: a root repeats them.

    **Ends.** ``("next", "agents", "done")`` is True from the step that ends the robot on: it ``terminated``. A robot
    that is gone rests where it was, and is neither perceived nor hit. One still active at the time limit is
    ``truncated``. The env is done when all robots are gone, or at the limit.

    **Curriculum.** Stages begin by the number of frames (E a step), counted on the device in the buffer ``frames``;
    each reset fills the world for the present stage. Nothing is reallocated: robots, obstacles and vortices that a
    stage does not have are masked.

    **Resets** place each robot at the first of K candidates that keeps 10 m from other starts and goals and the stage's
    distance between both, and obstacles and vortices 8 m from all of these, see ``layouts``. A step draws
    ``fresh_layouts`` layouts and gives them to the rows that end, in order; if more rows end in one step, the layouts
    are used again: the first row and the ``fresh_layouts + 1``-th get the same.

    State, resets and time limit are those of :class:`StructuredEnv`.

    Args:
        num_envs: E.
        action: ``"continuous"`` or ``"discrete"``.
        curriculum: stages; the original system's by default.
        max_episode_steps: time limit.
        device: where everything lives.
        seed: passed to ``set_seed``.
        **options: ``max_robots``, ``max_obstacles``, ``max_cores``: R, O, C, by default the most of any stage.
            ``observation_noise``: whether objects are perceived with noise (default True). ``colregs``: whether the
            rules of the road count (default True). ``candidates``: K, 256. ``fresh_layouts``: by default a sixteenth
            of E, at least 8: episodes of trained robots last 30 steps and more. ``dtype``: float32.

    Raises:
        ValueError: an unknown kind of action, a curriculum with more robots, obstacles or vortices than there is room
            for in R, O, C or in the world, numbers below 1.
        TypeError: an unknown option, a dtype that is not a float type.

    Example:
        >>> env = MarineNavigation(4096, device="cuda")
        >>> env.rollout(100, break_when_any_done=False)["next", "agents", "reward"].shape
        torch.Size([4096, 100, 5, 1])
    """

    scene_half_width = 45.0

    split_observation = staticmethod(sensing.split_observation)

    frames: Tensor
    """Steps of single envs so far, int64 scalar."""
    _starts: Tensor
    _robots: Tensor
    _obstacles: Tensor
    _cores: Tensor
    _distance: Tensor
    _quantiles: Tensor

    def __init__(
        self,
        num_envs: int,
        *,
        action: Literal["continuous", "discrete"] = "continuous",
        curriculum: Curriculum | None = None,
        max_episode_steps: int | None = 1000,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        **options: Unpack[MarineOptions],
    ) -> None:
        """Check the arguments and draw the first worlds; arguments as in the class."""
        unknown = sorted(set(options) - set(MarineOptions.__annotations__))
        if unknown:
            raise TypeError(
                f"MarineNavigation expected {sorted(MarineOptions.__annotations__)}, received {unknown}. Remedy: take "
                "the others out."
            )
        if action not in ("continuous", "discrete"):
            raise ValueError(
                f"MarineNavigation expected action 'continuous' or 'discrete', received {action!r}. Remedy: one of "
                "the two."
            )
        dtype = options.get("dtype", torch.float32)
        super().__init__(num_envs, device=device, dtype=dtype, max_episode_steps=max_episode_steps)
        self.curriculum = Curriculum() if curriculum is None else curriculum
        self.discrete = action == "discrete"
        self.observation_noise = bool(options.get("observation_noise", True))
        self.colregs = bool(options.get("colregs", True))
        self.candidates = options.get("candidates", CANDIDATES)
        check_count("MarineNavigation", "candidates", self.candidates)
        fresh = options.get("fresh_layouts")
        self.fresh_layouts = min(num_envs, max(8, -(-num_envs // 16)) if fresh is None else fresh)
        check_count("MarineNavigation", "fresh_layouts", self.fresh_layouts)
        self.max_robots = self._most("robots", options.get("max_robots"))
        self.max_obstacles = self._most("obstacles", options.get("max_obstacles"))
        self.max_cores = self._most("cores", options.get("max_cores"))
        check_room(self.curriculum, self.candidates)
        self.group_map = {"agents": [f"robot_{number}" for number in range(self.max_robots)]}
        self._make_tables()
        self.begin(seed)

    def _most(self, what: str, given: int | None) -> int:
        """R, O or C: the number given, or the most that the curriculum needs, which must not exceed it."""
        needed = max(getattr(self.curriculum, what))
        if given is None:
            return needed
        check_count("MarineNavigation", f"max_{what}", given, least=min(needed, 1))
        if needed > given:
            raise ValueError(
                f"MarineNavigation expected a curriculum of at most max_{what}={given} {what}, received one with "
                f"{needed}. Remedy: raise max_{what} or take a curriculum with fewer."
            )
        return given

    def _make_tables(self) -> None:
        """Constant buffers: stages, the quantiles of the radius noise; and the counter of frames, which is state."""
        tables = {
            "_starts": torch.tensor([int(f) for f in self.curriculum.frames]),
            "_robots": torch.tensor(self.curriculum.robots),
            "_obstacles": torch.tensor(self.curriculum.obstacles),
            "_cores": torch.tensor(self.curriculum.cores),
            "_distance": torch.tensor(self.curriculum.distance, dtype=self.dtype),
            "_quantiles": sensing.von_mises_quantiles().to(self.dtype),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.to(self.device), persistent=False)
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64, device=self.device))

    @property
    def stage(self) -> Tensor:
        """Number of the stage that a reset fills its world for, int64 scalar on the device."""
        return (self.frames >= self._starts).sum() - 1

    # -- the task --------------------------------------------------------------------------------------------------

    def make_specs(self) -> EnvSpecs:
        """Return the keys that the class names."""
        robots = self.max_robots
        wide = self.choice(_LEVELS**2, robots) if self.discrete else self.box(-1.0, 1.0, robots, 2)
        return EnvSpecs(
            observation={
                ("agents", "observation"): self.unbounded(robots, sensing.OBSERVATION_SIZE),
                ("agents", "active"): self.choice(2, robots, 1, dtype=torch.bool),
            },
            action={("agents", "action"): wide},
            reward={("agents", "reward"): self.unbounded(robots, 1)},
            info={
                ("agents", "event"): self.choice(3, robots, 1, dtype=torch.int8),
                ("agents", "colregs"): self.unbounded(robots, 1),
            },
            groups={"agents": robots},
        )

    def draw_state(self) -> dict[str, Tensor]:
        """Return fresh worlds of the stage, one for each env."""
        return self._draw(self.num_envs)

    def redraw_state(self, ended: Tensor) -> dict[str, Tensor]:
        """Return ``fresh_layouts`` fresh worlds, given in turn to the rows that end."""
        if self.fresh_layouts == self.num_envs:
            return self.draw_state()
        fresh = self._draw(self.fresh_layouts)
        index = (ended.squeeze(-1).cumsum(0) - 1).remainder(self.fresh_layouts)
        return {name: value.index_select(0, index) for name, value in fresh.items()}

    def scene(self, state: dict[str, Tensor]) -> list[Line]:
        """Return the obstacles, the vortices, each goal, and the vessels with their way to it; gone ones are pale."""

        def seen(place: Tensor, there: Tensor) -> Tensor:
            return torch.where(there.unsqueeze(-1), place.flip(-1) - WORLD / 2, torch.nan)  # x is north, drawn up

        def numbered(name: str) -> Tensor:
            places = state[name]
            return torch.arange(places.shape[1], device=places.device) < state[f"num_{name}"].unsqueeze(-1)

        active, everyone = state["active"], torch.ones_like(state["active"])
        forward = torch.stack((state["heading"].cos(), state["heading"].sin()), -1)
        hulls = [seen(state["position"] + side * forward, everyone) for side in (-2.0, 2.0)]
        bows = [torch.where(active.unsqueeze(-1), hull, torch.nan) for hull in hulls]
        goal, position = seen(state["goal"], active), seen(state["position"], active)
        blocks = seen(state["obstacles"][..., :2], numbered("obstacles"))
        vortices = seen(state["cores"][..., :2], numbered("cores"))
        return [
            *([Line(vortices, vortices, 2.0, PALE)] if vortices.shape[1] else []),
            *([Line(blocks, blocks, OBSTACLE_RADIUS, INK)] if blocks.shape[1] else []),
            Line(position, goal, 0.1, PALE),
            Line(goal, goal, 0.7, GREEN),
            Line(*hulls, 0.7, PALE),
            Line(*bows, 0.7, RED),
        ]

    def advance(self, state: dict[str, Tensor], action: Tensor | dict[NestedKey, Tensor]) -> Transition:
        """Move all robots by half a second; see :meth:`StructuredEnv.advance`."""
        assert isinstance(action, Tensor)
        self.frames.add_(self.num_envs)
        active, before, goal = state["active"], state["position"], state["goal"]
        thrust = (state["thrust"] + self._change(action)).clamp(THRUST_LOW, THRUST_HIGH)
        position, heading, velocity = drive(before, state["heading"], state["velocity"], thrust, state["cores"])
        moved = {"position": position, "heading": heading, "velocity": velocity, "thrust": thrust}
        moved["ground"] = _over_ground(position, velocity, state["cores"])
        # a robot that is gone rests where it was
        moved = {
            name: torch.where(active.view(*active.shape, *(1,) * (value.ndim - 2)), value, state[name])
            for name, value in moved.items()
        }
        position, ground = moved["position"], moved["ground"]
        event = events(position, goal, active, state["obstacles"], self._exists(state))
        turn = turn_angle(position, ground, active) if self.colregs else torch.zeros_like(heading)
        rewards = torch.where(active, reward(before, position, goal, event, turn), 0.0)
        next_active = active & (event == 0)
        next_state = {**state, **moved, "active": next_active}
        if self.observation_noise:
            next_state["noise"] = self._noise(self.num_envs)
        entries: dict[NestedKey, Tensor] = {
            ("agents", "reward"): rewards.unsqueeze(-1),
            ("agents", "event"): event.unsqueeze(-1),
            ("agents", "colregs"): turn.unsqueeze(-1),
        }
        return Transition(next_state, entries, ~next_active.any(-1))

    def observe(self, state: dict[str, Tensor]) -> dict[NestedKey, Tensor]:
        """Return the observation of every robot, those that are gone included, and which robots are active."""
        position, heading, ground = state["position"], state["heading"], state["ground"]
        own = sensing.observe_self(position, heading, ground, state["velocity"][..., 2], state["goal"], state["thrust"])
        scene = (position, heading, ground, state["active"], state["obstacles"], self._exists(state))
        objects = sensing.observe_objects(*scene, noise=state.get("noise"))
        return {
            ("agents", "observation"): torch.cat((own, objects), -1),
            ("agents", "active"): state["active"].unsqueeze(-1),
        }

    def group_flags(self, step: Transition, truncated: Tensor) -> dict[NestedKey, Tensor]:
        """Return the ends of the robots: terminated once gone, truncated where the time limit finds them active."""
        active = step.next_state["active"].unsqueeze(-1)
        return {("agents", "terminated"): ~active, ("agents", "truncated"): active & truncated.unsqueeze(1)}

    # -- parts -----------------------------------------------------------------------------------------------------

    def _change(self, action: Tensor) -> Tensor:
        """Change of both thrusts in newtons, [E, R, 2]."""
        if not self.discrete:
            return action.clamp(-1.0, 1.0) * _CHANGE
        both = torch.stack((action.div(_LEVELS, rounding_mode="floor"), action.remainder(_LEVELS)), -1)
        return (both - _LEVELS // 2).to(self.dtype) * (2 * _CHANGE / (_LEVELS - 1))

    def _exists(self, state: dict[str, Tensor]) -> Tensor:
        """Bool [E, O]."""
        numbers = torch.arange(self.max_obstacles, device=self.device)
        return numbers < state["num_obstacles"].unsqueeze(-1)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=self.dtype, device=self.device)

    def _noise(self, worlds: int) -> Tensor:
        """Errors of perception, [worlds, R, M, 5]."""
        shape = (worlds, self.max_robots, self.max_robots + self.max_obstacles)
        normal = torch.randn(*shape, 4, dtype=self.dtype, device=self.device)
        return sensing.sensor_noise(normal, self._uniform(*shape), self._quantiles)

    def _contents(self) -> Contents:
        """What a world of the present stage holds."""
        stage = self.stage.view(1)
        tables = (self._robots, self._obstacles, self._cores, self._distance)
        return Contents(*(table.index_select(0, stage).squeeze(0) for table in tables))

    def _draw(self, worlds: int) -> dict[str, Tensor]:
        sizes = (worlds, self.max_robots, self.max_obstacles, self.max_cores)
        return self._at_rest(draw_layout(self._uniform, self._contents(), sizes, self.candidates)[0])

    def _at_rest(self, layout: Layout) -> dict[str, Tensor]:
        """The state in which the robots of a layout start: at rest relative to the water, thrusters off."""
        worlds = layout["heading"].shape[0]
        velocity = torch.zeros(worlds, self.max_robots, 3, dtype=self.dtype, device=self.device)
        state = {**layout, "velocity": velocity, "thrust": torch.zeros_like(velocity[..., :2])}
        state["ground"] = _over_ground(layout["position"], velocity, layout["cores"])
        if self.observation_noise:
            state["noise"] = self._noise(worlds)
        return state

    # -- from outside ----------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Tensor]:
        """The true state, copied.

        Returns:
            ``position`` [E, R, 2] and ``goal`` [E, R, 2] (metres), ``heading`` [E, R] (radians), ``velocity`` [E, R, 2]
            (over ground in the world frame, m/s), ``yaw_rate`` [E, R] (rad/s), ``thrust`` [E, R, 2] (N), ``active``
            bool [E, R], ``obstacles`` [E, O, 3] (x, y, radius), ``num_obstacles`` int64 [E], ``cores`` [E, C, 4] (x, y,
            sign, strength), ``num_cores`` int64 [E], ``elapsed`` int32 [E, 1].
        """
        state = self._state()
        names = ("position", "goal", "heading", "thrust", "active", "obstacles", "num_obstacles", "cores", "num_cores")
        seen = {name: state[name].clone() for name in names}
        seen["velocity"] = state["ground"].clone()
        seen["yaw_rate"] = state["velocity"][..., 2].clone()
        seen["elapsed"] = self.elapsed.clone()
        return seen

    def root(self) -> TensorDict:
        """The root TensorDict of the worlds as they are now."""
        return self._root(self._state())

    def sail(self, tensordict: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Step without the resets: a vessel that has ended, or whose time is up, stays inactive where it is.

        Args:
            tensordict: with the action of all vessels.

        Returns:
            What a step has under "next" besides observations, reward and event among it.
        """
        step = self.advance(self._state(), self.read_action(tensordict))
        state = dict(step.next_state)
        self.elapsed.add_(1)
        if self.max_episode_steps is not None:
            state["active"] = state["active"] & (self.elapsed < self.max_episode_steps)
        # an entry that did not change is the buffer itself, to which writing it changes nothing
        self._write(state)
        return step.entries

    def load_layout(self, layout: dict[str, Tensor]) -> TensorDict:
        """Start all rows from given layouts, such as those of :func:`scenario_set`.

        Args:
            layout: entries as in :func:`draw_layout`, for E worlds; robots, obstacles and vortices may be fewer than
                the env has room for.

        Returns:
            The root TensorDict of the first step. A later reset without a mask draws other worlds.

        Raises:
            KeyError: without one of the entries.
            ValueError: for other numbers of worlds, more robots, obstacles or vortices than there is room for, a start
                inside an obstacle.
        """
        fitted = fit_layout(layout, (self.num_envs, self.max_robots, self.max_obstacles, self.max_cores))
        state = self._at_rest({name: self._moved(value) for name, value in fitted.items()})
        self._write(state)
        self.elapsed.zero_()
        return self._root(state)

    def _moved(self, value: Tensor) -> Tensor:
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)


def _over_ground(position: Tensor, velocity: Tensor, cores: Tensor) -> Tensor:
    """Velocity over ground in the world frame, [E, R, 2]: that relative to the water, and the water's."""
    x, y = position.unbind(-1)
    return velocity[..., :2] + torch.stack(current(x, y, cores), -1)
