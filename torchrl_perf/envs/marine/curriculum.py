"""Stages of growing difficulty, by frames."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Curriculum", "Stage"]


@dataclass(frozen=True)
class Stage:
    """What a world of one stage holds.

    Attributes:
        robots: number of robots, at least 1.
        obstacles: number of static obstacles.
        cores: number of vortices.
        distance: least distance from start to goal, metres.
    """

    robots: int
    obstacles: int
    cores: int
    distance: float


@dataclass(frozen=True)
class Curriculum:
    """Stages and the frames at which they begin; frames are steps of single envs, all envs counted.

    The default is the original system's: from 3 robots 30 m from their goals to 5 robots, 4 obstacles and 40 m, in
    steps of a million frames.

    Attributes:
        frames: at which each stage begins; the first is 0, and they rise.
        robots: of each stage, at least 1.
        obstacles: of each stage.
        cores: of each stage, vortices.
        distance: of each stage, least distance from start to goal in metres.

    Raises:
        ValueError: for entries of another length than ``frames``, frames that do not rise from 0, numbers out of range.
    """

    frames: tuple[float, ...] = (0, 1e6, 2e6, 3e6, 4e6, 5e6)
    robots: tuple[int, ...] = (3, 4, 5, 5, 5, 5)
    obstacles: tuple[int, ...] = (0, 0, 0, 2, 3, 4)
    cores: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    distance: tuple[float, ...] = (30.0, 35.0, 40.0, 40.0, 40.0, 40.0)

    def __post_init__(self) -> None:
        """Check all entries."""
        for name in ("frames", "robots", "obstacles", "cores", "distance"):
            value = tuple(getattr(self, name))
            object.__setattr__(self, name, value)
            if not value or len(value) != len(self.frames):
                raise ValueError(
                    f"Curriculum expected one {name} for each of {len(self.frames)} stages, received {value}. Remedy: "
                    "give all entries the same length, at least 1."
                )
        frames = self.frames
        if frames[0] != 0 or any(b <= a for a, b in pairwise(frames)):
            raise ValueError(
                f"Curriculum expected frames that rise from 0, received {frames}. Remedy: sort the stages "
                "by the frame at which they begin, each its own: a curriculum does not go backwards."
            )
        for name, least in (("robots", 1), ("obstacles", 0), ("cores", 0)):
            if any(not isinstance(v, int) or isinstance(v, bool) or v < least for v in getattr(self, name)):
                raise ValueError(
                    f"Curriculum expected {name} of ints >= {least}, received {getattr(self, name)}. Remedy: {least} "
                    "or more in each stage."
                )
        if not all(0 <= d < float("inf") for d in self.distance):
            raise ValueError(
                f"Curriculum expected distances >= 0 in metres, received {self.distance}. Remedy: metres of 0 or more."
            )

    @classmethod
    def fixed(cls, robots: int = 5, obstacles: int = 4, cores: int = 0, distance: float = 40.0) -> Curriculum:
        """Return a curriculum of one stage."""
        return cls((0,), (robots,), (obstacles,), (cores,), (distance,))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in order."""
        return tuple(
            Stage(*parts) for parts in zip(self.robots, self.obstacles, self.cores, self.distance, strict=True)
        )
