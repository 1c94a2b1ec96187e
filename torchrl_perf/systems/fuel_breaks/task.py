"""The task that all ways to learn fuel breaks have: landscapes, breaks, and fires that judge them."""

from dataclasses import dataclass
from typing import Literal

from torchrl_perf.trainers.config_checks import Checks, is_count, is_share

__all__ = ["TASK", "BreaksTask"]

TASK = ("size", "budget", "landscape", "landscapes", "landscape_seed", "base", "neighbours")
"""Settings of the task that a policy keeps; the number of fires may differ."""


@dataclass(frozen=True)
class BreaksTask:
    """Settings of :class:`~torchrl_perf.envs.fuel_breaks.FuelBreaks`, for a config beside it."""

    size: int = 20
    """Rows and columns of a landscape."""
    budget: float = 0.05
    """Breaks of an episode, as a share of all cells."""
    landscape: Literal["uniform", "fractal", "varied"] = "uniform"
    """Even ground where fire passes with probability base; hills with patches of vegetation and bare ground; or such
    that differ in relief and wind, some with a river or a road."""
    landscapes: int = 1
    """Number of fractal or varied landscapes to learn from; one is drawn for each episode."""
    landscape_seed: int = 0
    """Names the fractal or varied landscapes; another number gives others."""
    base: float = 0.4
    """Probability that fire passes from a cell to the next on even ground with ordinary vegetation."""
    neighbours: int = 8
    """Neighbours that a cell may set alight: 8 or 4."""
    fires: int = 16
    """Fires that an episode's breaks are judged by, at most 64."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)  # pyright: ignore[reportAttributeAccessIssue]  of the config beside it
        checks.each(("size", "landscapes"), is_count, "a positive integer")
        checks.each(("landscape_seed",), lambda value: value >= 0, "0 or a positive integer")
        checks.each(("base",), is_share, "a number in [0, 1]")
        checks.each(("neighbours",), lambda value: value in (4, 8), "4 or 8")
        checks.each(("fires",), lambda value: 1 <= value <= 64, "an integer from 1 to 64")
        checks.each(("budget",), lambda value: 0 < value < 1, "a share of the cells in (0, 1)")
        if checks.sound("size", "budget") and not 1 <= self.cells < self.size**2:
            checks.add(
                "budget",
                f"budget: expected a share of the {self.size} x {self.size} cells that is at least one break and not "
                f"all, received {self.budget!r}. Remedy: {1 / self.size**2:.3g} or more.",
            )
        if checks.sound("landscape", "landscapes") and self.landscape == "uniform" and self.landscapes != 1:
            checks.add(
                "landscapes",
                f"landscapes: expected 1 with landscape='uniform', which are all alike, received {self.landscapes}. "
                "Remedy: landscape='fractal' or 'varied'.",
            )

    @property
    def cells(self) -> int:
        """K, breaks of an episode."""
        return round(self.budget * self.size**2)
