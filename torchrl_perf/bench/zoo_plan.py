"""What the zoo consists of: every algorithm on a task at least, and each of the five systems once."""

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["PLAN", "Planned"]


class Planned(NamedTuple):
    """An entry to make: the settings are those of the task's preset, but for ``changes``."""

    algorithm: str
    """As ``torchrl-perf train`` names it."""
    task: str
    """As ``--env`` has it."""
    seconds: float
    """About how long training takes on an H200 in graphs of eager kernels, from first calculations."""
    changes: Mapping[str, Any] = {}
    """Settings by name."""

    @property
    def name(self) -> str:
        """Of the entry."""
        return f"{self.algorithm}-{self.task}"


LIST = (
    Planned("ppo", "CartPole", 5),
    Planned("dqn", "CartPole", 20),
    Planned("pqn", "CartPole", 10),
    Planned("qr-dqn", "CartPole", 12),
    Planned("iqn", "CartPole", 12),
    Planned("rainbow", "CartPole", 16),
    Planned("sac", "Pendulum", 12),
    Planned("td3", "Pendulum", 10),
    Planned("ddpg", "Pendulum", 10),
    Planned("ac-iqn", "Pendulum", 12),
    Planned("sac-options", "Ferry", 10),
    Planned("hybrid-ppo", "HybridTarget", 6),
    Planned("durotaxis", "Durotaxis", 34),
    Planned("marine-iqn", "MarineEmpty", 45),
    Planned("fuel-breaks", "FuelBreaksSmall", 20),
    Planned("options-market", "OptionMarketKelly", 15),
    # What counts is the R^2 of predictions; returns, which are information, say little. It is computed at the end.
    Planned("active-dynamics", "limit_cycle", 25, {"eval_interval": 1_000_000}),
    Planned("ppo", "Pendulum", 7),
    Planned("ppo", "Acrobot", 5),
    Planned("ppo", "MountainCarContinuous", 10),
    Planned("pqn", "Acrobot", 12),
    Planned("dqn", "Acrobot", 12, {"total_steps": 150_000}),
)

PLAN: dict[str, Planned] = {planned.name: planned for planned in LIST}
"""Entries by name; those that are wanted most come first."""
