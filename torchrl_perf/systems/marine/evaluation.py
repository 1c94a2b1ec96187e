"""How well a policy navigates: fixed scenarios, and the outcome of every vessel's first episode.

Dimension key: ``E`` scenarios, ``R`` vessels of each, ``T`` steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.envs.marine import Curriculum, MarineNavigation, scenario_set, scripted_action
from torchrl_perf.envs.marine.outcomes import COLLISION, GOAL
from torchrl_perf.envs.marine.vehicle import SUBSTEPS, TIME_STEP
from torchrl_perf.runtime.seeds import seeded

__all__ = ["NavigationFigures", "Scenarios", "evaluate", "scripted", "start"]

STEP_SECONDS = SUBSTEPS * TIME_STEP
THRUSTS = slice(5, 7)  # of an observation, in kN: see sensing.SELF_SCALE
CHECK_INTERVAL = 50  # steps between two checks of whether all have ended
ActionKind = Literal["continuous", "discrete"]
Layout = dict[str, Tensor]
Policy = nn.Module | Callable[[TensorDictBase], TensorDictBase]


@dataclass(frozen=True)
class Scenarios:
    """A fixed set of scenarios: the same layouts for the same arguments, on every machine.

    Raises:
        ValueError: for numbers out of range, or ``exact`` together with several vessels or obstacles.
    """

    count: int = 100
    """Number of scenarios (E)."""
    seed: int = 1_000
    """Seed of the layouts, and of the noise of observations."""
    robots: int = 3
    """Vessels of each (R)."""
    obstacles: int = 0
    """Obstacles of each."""
    cores: int = 0
    """Vortices of each."""
    distance: float = 40.0
    """Least distance from start to goal, in metres."""
    exact: bool = False
    """One vessel whose goal is at exactly this distance, in any direction, in an empty world."""
    max_episode_steps: int = 1_000
    """Steps after which a vessel counts as late."""

    def __post_init__(self) -> None:
        if min(self.count, self.robots, self.max_episode_steps) < 1 or min(self.obstacles, self.cores) < 0:
            raise ValueError(
                "scenarios: expected count, robots and max_episode_steps of at least 1, obstacles and cores of at "
                f"least 0, received {self}. Remedy: numbers in these ranges."
            )
        if self.exact and (self.robots, self.obstacles, self.cores) != (1, 0, 0):
            raise ValueError(
                "exact: expected one vessel in an empty world, received "
                f"{self.robots} vessels, {self.obstacles} obstacles and {self.cores} vortices. Remedy: robots=1, "
                "obstacles=0, cores=0, or exact=False."
            )

    def layout(self) -> Layout:
        """The layouts, as :meth:`MarineNavigation.load_layout` takes them."""
        contents = {"robots": self.robots, "obstacles": self.obstacles, "cores": self.cores}
        drawn = scenario_set(self.seed, self.count, **contents, distance=0.0 if self.exact else self.distance)
        if self.exact:
            bearing = 2 * math.pi * torch.rand(self.count, 1, generator=torch.Generator().manual_seed(self.seed))
            way = self.distance / 2 * torch.stack((bearing.cos(), bearing.sin()), -1)
            middle = 27.5
            drawn |= {"position": middle - way, "goal": middle + way}
        return drawn

    def env(self, action: ActionKind, device: torch.device | str = "cpu", **options: Any) -> AgentStreams:
        """An env of the scenarios, a row for each vessel; :func:`evaluate` starts it from the layouts.

        Args:
            action: ``"discrete"`` or ``"continuous"``, as the policy acts.
            device: of everything.
            **options: further arguments of :class:`MarineNavigation`, such as ``observation_noise``.
        """
        # worlds drawn after the layouts are not evaluated and need no distance
        stage = Curriculum.fixed(self.robots, self.obstacles, self.cores, distance=0.0)
        return AgentStreams(
            MarineNavigation(
                self.count,
                action=action,
                curriculum=stage,
                max_episode_steps=self.max_episode_steps,
                device=device,
                **options,
            )
        )


@dataclass(frozen=True)
class NavigationFigures:
    """Outcomes of the vessels."""

    vessels: int
    """Number of vessels."""
    success: float
    """Share that reached their goal."""
    collision: float
    """Share that collided."""
    timeout: float
    """Share that did neither in time."""
    mean_time: float
    """Seconds to the goal, of those that reached it; NaN for none."""
    mean_return: float
    """Mean sum of rewards."""
    colregs_share: float
    """Share of the vessels' steps in which the rules of the road asked for a turn."""
    colregs_angle: float
    """Mean angle of those turns, in radians; 0 for none."""
    mean_energy: float
    """Thrust of both thrusters, forward or back, over time until the goal, in kN s, of those that reached it; NaN for
    none. It stands for the energy, which the model of the vessel does not know."""

    def __str__(self) -> str:
        return (
            f"{self.vessels} vessels: {self.success:.1%} arrived, {self.collision:.1%} collided, {self.timeout:.1%} "
            f"late; {self.mean_time:.1f} s and {self.mean_energy:.1f} kN s to the goal, return {self.mean_return:.1f}; "
            f"a turn was due in {self.colregs_share:.1%} of the steps, by {self.colregs_angle:.2f} rad"
        )


def scripted(env: AgentStreams) -> Policy:
    """The proportional controller as a policy for the vessels of an env with continuous actions.

    Args:
        env: of :meth:`Scenarios.env` with ``"continuous"``.
    """

    def act(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", scripted_action(cast("Any", env.base_env)).flatten(0, 1))

    return act


@torch.no_grad()
def evaluate(policy: Policy, scenarios: Scenarios, env: AgentStreams) -> NavigationFigures:
    """Let a policy steer the vessels of a set of scenarios, without exploration.

    Args:
        policy: reads ``observation`` ``[E * R, 37]`` and writes ``action``, such as a trainer's.
        scenarios: where they start.
        env: of :meth:`Scenarios.env`.

    Returns:
        The figures of each vessel's first episode.
    """
    running = torch.ones(*env.batch_size, 1, dtype=torch.bool, device=env.device)
    sums = {name: torch.zeros((), dtype=torch.float64, device=env.device) for name in _SUMS}
    elapsed = torch.zeros(running.shape, dtype=torch.float64, device=env.device)
    spent = torch.zeros_like(elapsed)
    with set_exploration_type(ExplorationType.DETERMINISTIC), seeded(scenarios.seed, env.device):
        td = start(scenarios, env)
        for step in range(scenarios.max_episode_steps):
            counts = running & td.get("valid")
            stepped, td = env.step_and_maybe_reset(policy(td))
            _add(sums, elapsed, spent, counts, stepped.get("next"))
            running &= ~stepped.get("next").get("done")
            if step % CHECK_INTERVAL == CHECK_INTERVAL - 1 and not bool(running.any()):
                break
    return _figures({name: float(value) for name, value in sums.items()})


def start(scenarios: Scenarios, env: AgentStreams) -> TensorDictBase:
    """Start an env from the scenarios.

    Args:
        scenarios: where the vessels start.
        env: of :meth:`Scenarios.env`; :func:`~torchrl_perf.envs.marine.recording.record` goes on from here.

    Returns:
        The root of the first step.

    Raises:
        ValueError: for an env of another number of scenarios or vessels.
    """
    base = cast("Any", env.base_env)
    expected = (scenarios.count, scenarios.robots)
    if (*base.batch_size, env.num_agents) != expected:
        raise ValueError(
            f"env: expected {expected[0]} scenarios of {expected[1]} vessels, received {list(base.batch_size)} of "
            f"{env.num_agents}. Remedy: scenarios.env(action)."
        )
    return env.root_of(base.load_layout(scenarios.layout()))


_SUMS = ("ended", "success", "collision", "timeout", "seconds", "energy", "reward", "steps", "turns", "angle")


def _add(sums: dict[str, Tensor], elapsed: Tensor, spent: Tensor, counts: Tensor, following: TensorDictBase) -> None:
    """Adds the results of a step for the vessels that count, ``[N, 1]``."""
    event, phi = following.get("event"), following.get("colregs")
    ended = counts & following.get("done")
    elapsed += counts
    # both thrusts change at the beginning of a step and hold for the rest of it
    thrust = following.get("observation")[..., THRUSTS].abs().sum(-1, keepdim=True)
    spent += torch.where(counts, thrust * STEP_SECONDS, 0.0)
    goal, hit = ended & (event == GOAL), ended & (event == COLLISION)
    values = {
        "ended": ended,
        "success": goal,
        "collision": hit,
        "timeout": ended & ~goal & ~hit,
        "seconds": torch.where(goal, elapsed * STEP_SECONDS, 0.0),
        "energy": torch.where(goal, spent, 0.0),
        "reward": torch.where(counts, following.get("reward"), 0.0),
        "steps": counts,
        "turns": counts & (phi > 0),
        "angle": torch.where(counts, phi, 0.0),
    }
    for name, value in values.items():
        sums[name] += value.sum(dtype=torch.float64)


def _figures(sums: dict[str, float]) -> NavigationFigures:
    vessels, arrived = sums["ended"], sums["success"]
    return NavigationFigures(
        vessels=int(vessels),
        success=arrived / vessels,
        collision=sums["collision"] / vessels,
        timeout=sums["timeout"] / vessels,
        mean_time=sums["seconds"] / arrived if arrived else math.nan,
        mean_return=sums["reward"] / vessels,
        colregs_share=sums["turns"] / sums["steps"],
        mean_energy=sums["energy"] / arrived if arrived else math.nan,
        colregs_angle=sums["angle"] / sums["turns"] if sums["turns"] else 0.0,
    )
