"""What is told of a number that was not finite: its place, and what to do."""

from dataclasses import dataclass
from typing import Literal

from torchrl_perf.functional.rows.nonfinite import KINDS

OnNan = Literal["stop", "skip", "rollback"]


@dataclass(frozen=True)
class Fault:
    """One number that was not finite, the first of an interval."""

    key: str
    """Entry of the batch (nested keys with slashes), name of the loss, or name of the parameter."""
    kind: str
    """``"NaN"``, ``"inf"``, ``"-inf"``; of a gradient ``"not finite"``."""
    iteration: int
    """Iteration, from 1."""
    source: Literal["batch", "loss", "gradient"]
    """What kind of number it was."""
    step: int = -1
    """Step t within the iteration, from 0; of a batch."""
    env: int = -1
    """Number n of the env, from 0; of a batch."""
    update: int = -1
    """Update within the iteration, from 0; of a loss or gradient."""

    def __str__(self) -> str:
        if self.source == "batch":
            return f"{self.kind} in {self.key!r} of env {self.env} at step {self.step} of iteration {self.iteration}"
        bad = self.kind if self.source == "loss" else f"a gradient that is {self.kind}"
        what = f"{bad} in {self.key!r}"
        return f"{what} at update {self.update} of iteration {self.iteration}"


@dataclass(frozen=True)
class Verdict:
    """What a row of metrics says about its interval, and what to do."""

    action: OnNan
    """``"stop"``: end the run; ``"rollback"``: call :meth:`NumericalGuard.rollback`; ``"skip"``: go on."""
    message: str
    """What was found and what to do about it."""
    fault: Fault | None
    """The first number that was not finite, None where it cannot be told (the sum of finite numbers overflowed)."""


def unpack(place: float, size: int) -> tuple[int, int, str]:
    """Iteration, index and kind of a place among ``size`` values."""
    iteration, code = divmod(int(-place), size * len(KINDS))
    return iteration, code // len(KINDS), KINDS[code % len(KINDS)]


def remedy_of(fault: Fault | None) -> str:
    """What to do about a number that was not finite, in words."""
    if fault is not None and fault.source == "batch" and not fault.key.split("/")[-1].startswith("action"):
        return "look at the env's arithmetic and the size of its actions; on_nan='skip' leaves such rows out."
    return "a lower learning_rate or max_grad_norm, precision='ieee'."
