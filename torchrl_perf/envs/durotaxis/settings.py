"""What a colony's world is like: substrate, limits of the action, ends of an episode, stages of a curriculum."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from typing import Any, Literal

__all__ = ["ColonyCurriculum", "ColonySettings"]

Field = Literal["linear", "exponential"]
Deletion = Literal["leftmost", "random"]

GOAL = 0.95
"""Share of the width at which a node has reached the goal."""
START_WIDTH = 0.1
"""The first nodes lie within this share of the width."""
START_HEIGHT = (0.4, 0.6)
"""And between these shares of the height."""
LEFTWARD_LIMIT = 30
"""Consecutive steps of the centroid to the left that end an episode."""

ACTION_NAMES = ("delete_ratio", "gamma", "alpha", "noise", "theta")
"""The numbers of a global action, in order; with ``actions="per_node"`` all but the first remain."""
ACTION_LOW = (0.0, 0.5, 0.5, 0.05)
"""Least values of the first four; that of theta is a setting."""
ACTION_HIGH = (15.0, 4.0, 0.5)
"""Greatest values of gamma, alpha and noise; the others are settings."""
HELD_SHAPE = (5.0, 2.0, 0.5, 0.0)
"""Gamma, alpha, noise and theta in a stage in which the policy only sets the share to delete."""


@dataclass(frozen=True)
class ColonySettings:
    """Substrate, limits and rules of a :class:`Durotaxis` env; its constructor takes them as keyword arguments.

    Raises:
        ValueError: for a value outside its range, naming what was expected, what was received and the remedy.
    """

    size: tuple[float, float] = (400.0, 400.0)
    """Width W and height H of the substrate."""
    start_nodes: int = 5
    """Nodes of a fresh colony."""
    critical_nodes: int = 100
    """C: an episode ends when the colony has more nodes than this. There are M = 2 C slots, which no step exceeds."""
    slope: float = 0.01
    """m of the stiffness ``m x + b`` or ``b exp(m x)``, in 1 / length."""
    intercept: float = 1.0
    """b of the stiffness, its value at the left edge."""
    field: Field = "linear"
    """How the stiffness depends on the place."""
    delete_max: float = 0.5
    """Greatest share of the nodes that one action deletes."""
    theta_max: float = math.pi / 6
    """Greatest angle between the direction of growth and the gradient, in radians; pi is the full circle."""
    deletion: Deletion = "leftmost"
    """Which nodes a share deletes: those farthest left, or any (to tell selection from growth)."""
    confine: bool = True
    """Whether children are kept at least max(2, 1 %) away from the edges; if not, they may fall off."""

    def __post_init__(self) -> None:
        _check_size(self.size)
        for name, low in (("start_nodes", 1), ("critical_nodes", 1)):
            value = getattr(self, name)
            _require(
                isinstance(value, int) and not isinstance(value, bool) and value >= low, name, "an int >= 1", value
            )
        if self.critical_nodes < self.start_nodes:
            raise ValueError(
                f"critical_nodes: expected at least start_nodes = {self.start_nodes}, received {self.critical_nodes}: "
                "a fresh colony would be over-grown. Remedy: a greater critical_nodes or fewer start_nodes."
            )
        _require(0.0 < self.delete_max <= 1.0, "delete_max", "a share in (0, 1]", self.delete_max)
        _require(0.0 < self.theta_max <= math.pi, "theta_max", "an angle in (0, pi] radians", self.theta_max)
        _require(self.field in ("linear", "exponential"), "field", "'linear' or 'exponential'", self.field)
        _require(self.deletion in ("leftmost", "random"), "deletion", "'leftmost' or 'random'", self.deletion)
        _require(isinstance(self.confine, bool), "confine", "True or False", self.confine)
        low, high = self.stiffness_range
        if not (low > 0.0 and high < 1e6):
            raise ValueError(
                f"slope, intercept: expected a stiffness between 0 and 1e6 all over the substrate, received {low:.6g} "
                f"to {high:.6g} with slope={self.slope}, intercept={self.intercept}, field={self.field!r} and width "
                f"{self.size[0]}. Remedy: a positive intercept, and a slope that suits the width."
            )

    @classmethod
    def of(cls, values: dict[str, Any]) -> ColonySettings:
        """The settings with these values.

        Raises:
            TypeError: for a name that is none of theirs.
        """
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise TypeError(
                f"Durotaxis: expected settings among {names}, received {unknown}. Remedy: take the others out."
            )
        return cls(**values)

    @property
    def slots(self) -> int:
        """M, twice ``critical_nodes``: what a colony that had not over-grown can divide into."""
        return 2 * self.critical_nodes

    @property
    def margin(self) -> tuple[float, float]:
        """Least distance of a child from the edges across x and across y."""
        width, height = self.size
        return max(2.0, 0.01 * width), max(2.0, 0.01 * height)

    @property
    def stiffness_range(self) -> tuple[float, float]:
        """Least and greatest stiffness of the substrate."""
        ends = [self.stiffness_at(place) for place in (0.0, float(math.floor(self.size[0] - 1.0)))]
        return min(ends), max(ends)

    def stiffness_at(self, place: float) -> float:
        """The stiffness at one place ``x``, which is cut to a whole number within the substrate."""
        place = float(math.floor(min(max(place, 0.0), self.size[0] - 1.0)))
        if self.field == "linear":
            return self.slope * place + self.intercept
        # far above what is accepted, and yet not an overflow
        return self.intercept * math.exp(min(self.slope * place, 300.0))

    @property
    def action_bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Least and greatest values of the five numbers of a global action, in the order of ``ACTION_NAMES``."""
        low = (*ACTION_LOW, -self.theta_max)
        return low, (self.delete_max, *ACTION_HIGH, self.theta_max)


@dataclass(frozen=True)
class ColonyCurriculum:
    """Stages of a colony's task by frames. A row enters the stage of the moment when it is reset.

    Stage i begins when the env has made ``frames[i]`` frames, counted on the device. Nothing is reallocated: a stage is
    a row of a table. Entries that are left out are those of the env itself in every stage.

    Raises:
        ValueError: for stages that get easier: frames that do not rise from 0, a goal that comes nearer, an action
            that loses a part; and for entries of another number than frames, or outside their range.
    """

    frames: tuple[int, ...] = (0,)
    """Frames from which each stage applies; the first is 0."""
    delete_only: tuple[bool, ...] = ()
    """Whether only the action's share to delete counts, while gamma, alpha, noise and theta stay at 5, 2, .5, 0."""
    goal: tuple[float, ...] = ()
    """Share of the width at which a node has reached the goal."""
    critical_nodes: tuple[int, ...] = ()
    """Number of nodes beyond which the colony has over-grown; at most the env's own. It may fall or rise."""

    def __post_init__(self) -> None:
        stages = len(self.frames)
        if not stages or self.frames[0] != 0 or any(b <= a for a, b in itertools.pairwise(self.frames)):
            raise ValueError(
                f"frames: expected numbers that rise from 0, received {self.frames}. Remedy: one for each stage, in "
                "the order in which they come, such as (0, 1_000_000)."
            )
        for name in ("delete_only", "goal", "critical_nodes"):
            values = getattr(self, name)
            if values and len(values) != stages:
                raise ValueError(
                    f"{name}: expected {stages} entries, one for each of frames = {self.frames}, received {values}. "
                    "Remedy: one value for all stages, or one a stage."
                )
        if any(not 0.0 < goal <= 1.0 for goal in self.goal):
            raise ValueError(
                f"goal: expected shares of the width in (0, 1], received {self.goal}. Remedy: for example 0.75."
            )
        if any(nodes < 1 for nodes in self.critical_nodes):
            raise ValueError(
                f"critical_nodes: expected ints >= 1, received {self.critical_nodes}. Remedy: 1 or more in each stage."
            )
        self._check_forward("goal", self.goal)
        self._check_forward("delete_only", tuple(not alone for alone in self.delete_only))

    def _check_forward(self, name: str, difficulty: tuple[float, ...]) -> None:
        if any(b < a for a, b in itertools.pairwise(difficulty)):
            raise ValueError(
                f"{name}: expected stages that do not go backwards, received {getattr(self, name)}. Remedy: the easier "
                "stages first."
            )

    def check_for(self, settings: ColonySettings, actions: str) -> None:
        """Refuse stages that an env of these settings and actions cannot have.

        Raises:
            ValueError: for more critical nodes than there are slots for, fewer than a fresh colony has, a goal on which
                it starts, or a share to delete where nodes choose for themselves.
        """
        for nodes in self.critical_nodes:
            if not settings.start_nodes <= nodes <= settings.critical_nodes:
                raise ValueError(
                    f"critical_nodes: expected start_nodes = {settings.start_nodes} to {settings.critical_nodes}, the "
                    f"env's own, in each stage, received {self.critical_nodes}. Remedy: the greatest of them for the "
                    "env, which makes room for it."
                )
        if any(goal <= START_WIDTH for goal in self.goal):
            raise ValueError(
                f"goal: expected more than {START_WIDTH}, within which colonies start, received {self.goal}. Remedy: "
                "a goal farther right."
            )
        if any(self.delete_only) and actions != "global":
            raise ValueError(
                f"delete_only: expected it with actions='global', which have a share to delete, received "
                f"actions={actions!r}. Remedy: leave delete_only out."
            )


def _check_size(size: Any) -> None:
    sound = isinstance(size, tuple | list) and len(size) == 2 and all(math.isfinite(s) and s >= 20.0 for s in size)
    _require(sound, "size", "(width, height), each at least 20", size)


def _require(sound: bool, name: str, expected: str, received: Any) -> None:
    if not sound:
        raise ValueError(f"{name}: expected {expected}, received {received!r}. Remedy: a value within that range.")
