"""What a sweep runs: settings from lists and ranges, seeds, and the command of each run."""

import hashlib
import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Run", "Space", "runs_of", "space_of"]


@dataclass(frozen=True)
class Space:
    """The values that one setting takes."""

    name: str
    values: tuple[str, ...] = ()
    """Those of a list; all of them are run."""
    low: float = math.nan
    high: float = math.nan
    """Of a range, from which values are drawn."""
    log: bool = False
    """Whether they are drawn evenly on the scale of the logarithm."""

    def draw(self, numbers: random.Random) -> str:
        """A value of a range.

        Args:
            numbers: gives the random number.
        """
        if self.log:
            return f"{math.exp(numbers.uniform(math.log(self.low), math.log(self.high))):.6g}"
        return f"{numbers.uniform(self.low, self.high):.6g}"


def space_of(text: str) -> Space:
    """The space of ``NAME=A,B,C``, ``NAME=LOW..HIGH`` or ``NAME=LOW..HIGH:log``.

    Args:
        text: of the command line.

    Raises:
        ValueError: for text of another form, and ranges without a room.
    """
    name, equals, values = (part.strip() for part in text.partition("="))
    if not (name and equals and values):
        raise ValueError(
            f"--set {text}: expected NAME=A,B,C or NAME=LOW..HIGH[:log], received no {'values' if name else 'name'}. "
            "Remedy: --set learning_rate=3e-4,1e-3."
        )
    name = name.replace("-", "_")
    if ".." not in values:
        return Space(name, values=tuple(value.strip() for value in values.split(",")))
    ends, _, scale = values.partition(":")
    low, _, high = ends.partition("..")
    try:
        bounds = float(low), float(high)
    except ValueError:
        raise ValueError(
            f"--set {text}: expected two numbers as LOW..HIGH, received no numbers. Remedy: --set {name}=1e-4..1e-2."
        ) from None
    if not bounds[0] < bounds[1] or scale not in ("", "log") or (scale and bounds[0] <= 0):
        raise ValueError(
            f"--set {text}: expected LOW..HIGH or LOW..HIGH:log, where the first number is to be the smaller one, and "
            f"above 0 with log, received {values!r}. Remedy: --set {name}=1e-4..1e-2:log."
        )
    return Space(name, low=bounds[0], high=bounds[1], log=scale == "log")


@dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    algorithm: str
    settings: dict[str, str]
    """Those that differ from run to run."""
    seed: int
    given: tuple[str, ...]
    """Options that all runs have."""
    folder: str
    """Of the sweep."""

    @property
    def place(self) -> Path:
        """Folder of this run, the same whenever it is begun again."""
        text = json.dumps([self.algorithm, sorted(self.settings.items()), self.seed, self.given])
        return Path(self.folder) / "runs" / f"{hashlib.sha256(text.encode()).hexdigest()[:10]}-seed{self.seed}"

    @property
    def options(self) -> list[str]:
        """What ``torchrl-perf train ALGORITHM`` is given."""
        changed = [word for name, value in self.settings.items() for word in _option(name, value)]
        usual = ["--seed", str(self.seed), "--run-dir", str(self.place), "--logger", "csv"]
        return [*self.given, *changed, *usual]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, of which ``Run(**values)`` makes it again."""
        return asdict(self) | {"given": list(self.given)}


def _option(name: str, value: str) -> list[str]:
    """A setting as words of a command line."""
    word = name.replace("_", "-")
    if value.lower() in ("true", "false"):
        return [f"--{word}" if value.lower() == "true" else f"--no-{word}"]
    return [f"--{word}", *value.split()]


def runs_of(
    algorithm: str, spaces: Sequence[Space], given: Sequence[str], *, seeds: int, samples: int, folder: str | Path
) -> list[Run]:
    """All runs of a sweep: every combination of lists, with ``samples`` draws from ranges, each with all seeds.

    Args:
        algorithm: name of what is trained.
        spaces: of the settings.
        given: options of all runs.
        seeds: number of them, from 0.
        samples: draws from the ranges for each combination; the same ones whenever it is asked for.
        folder: of the sweep.
    """
    lists = [space for space in spaces if space.values]
    ranges = [space for space in spaces if not space.values]
    numbers, found = random.Random(0), []
    for values in itertools.product(*(space.values for space in lists)):
        for _ in range(samples if ranges else 1):
            settings = {space.name: value for space, value in zip(lists, values, strict=True)}
            settings |= {space.name: space.draw(numbers) for space in ranges}
            found += [Run(algorithm, settings, seed, tuple(given), str(folder)) for seed in range(seeds)]
    return found
