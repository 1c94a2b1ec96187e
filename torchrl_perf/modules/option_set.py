"""Options by name, with the rules that say where they begin and end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.losses.options import time_hazard

Rule = Callable[[TensorDictBase], Tensor]
"""A function of a TensorDict ``[*]`` that returns one entry for each option, ``[*, O]``."""

OPTION_KEY = "option"
AGE_KEY = "option_age"
ACTIVE_KEY = "active_option"
START_KEY = "option_start"
LOG_PROB_KEY = "option_log_prob"
AVAILABLE_KEY = "option_available"


@dataclass(frozen=True)
class OptionSet:
    """Names and rules of O options (Sutton, Precup and Singh, 1999).

    A rule is called with the TensorDict of a step and returns one tensor for all rows and options; a rule that is an
    ``nn.Module`` moves with the controller. :class:`TimeHazard` is a rule for ``termination``.

    Attributes:
        names: of the options, in the order of their indices.
        initiation: td -> bool ``[*, O]``, where an option may be chosen; None: everywhere.
        termination: td -> float ``[*, O]``, the probability that an option ends here; "option_age" holds the steps that
            the running one has executed. None: an option ends only with the episode.
        min_duration: executed steps before which an option does not end, for each option or one number for all.
        fallback: name of the option that runs where none is available; None is the last one.
        action_range: for each option the part of the action's bounds that it uses, where -1 is the lower bound and 1
            the upper one: ``(low, high)``, or a scale s for ``(-s, s)``; None: all of it for all of them. Read by
            :class:`~torchrl_perf.modules.OptionActor`.
        continues: whether the running option is among those to choose from where it ends by chance, even if it may not
            begin there; not where its end is certain. The paper assumes that an option may begin wherever it may go on.

    Raises:
        ValueError: for fewer than two names or equal ones, another number of entries, and entries out of range.
    """

    names: Sequence[str]
    initiation: Rule | None = None
    termination: Rule | None = None
    min_duration: int | Sequence[int] = 1
    fallback: str | None = None
    action_range: Sequence[float | tuple[float, float]] | None = None
    continues: bool = False

    def __post_init__(self) -> None:
        """Checks what can be checked without a step."""
        names = list(self.names)
        if isinstance(self.names, str) or len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(
                f"names: expected at least two different names of options, received {self.names!r}. Remedy: two or "
                "more names, each once."
            )
        if self.fallback is not None and self.fallback not in names:
            raise ValueError(
                f"fallback: expected one of {names} or None, received {self.fallback!r}. Remedy: one of the names, or "
                "None."
            )
        if len(self.min_durations) != len(names) or min(self.min_durations) < 1:
            raise ValueError(
                f"min_duration: expected a number of steps >= 1, or {len(names)} of them, one for each of {names}, "
                f"received {self.min_duration!r}. Remedy: 1 for an option that may end at each step."
            )
        ranges = self.action_ranges
        if len(ranges) != len(names) or not all(-1 <= low < high <= 1 for low, high in ranges):
            raise ValueError(
                f"action_range: expected {len(names)} scales in (0, 1] or pairs -1 <= low < high <= 1, one for each "
                f"of {names}, received {self.action_range!r}. Remedy: a scale or a pair for each option."
            )

    @property
    def num_options(self) -> int:
        """O."""
        return len(self.names)

    @property
    def fallback_index(self) -> int:
        """Index of the option that is taken where none is available."""
        return len(self.names) - 1 if self.fallback is None else list(self.names).index(self.fallback)

    @property
    def min_durations(self) -> list[int]:
        """O numbers of steps."""
        return [self.min_duration] * len(self.names) if isinstance(self.min_duration, int) else list(self.min_duration)

    @property
    def action_ranges(self) -> list[tuple[float, float]]:
        """O pairs within [-1, 1]."""
        if self.action_range is None:
            return [(-1.0, 1.0)] * len(self.names)
        pairs = [(-entry, entry) if isinstance(entry, int | float) else entry for entry in self.action_range]
        return [(float(low), float(high)) for low, high in pairs]


class TimeHazard(nn.Module):
    """Termination by the time that an option has run: a rule td -> ``[*, O]`` for :class:`OptionSet`.

    The curve is :func:`~torchrl_perf.functional.losses.options.time_hazard`. Its parameters are numbers, or O of them,
    held in buffers. Combine it with rules of the state as in ``lambda td: torch.maximum(hazard(td), flat(td))``; such
    a function does not move with the controller, while an ``nn.Module`` that holds the hazard does.

    Keys read: "option_age", int64 ``[*]``.

    Args:
        num_options: O.
        hazard_min: steps before which the probability is 0, in addition to the controller's minimum duration.
        hazard_max: steps at which the curve ends.
        steepness: of the curve; 0 for a constant, the ``cap``.
        cap: greatest probability before the hard maximum.
        hard_max: whether ``hazard_max`` ends an option for certain, whatever the cap.

    Raises:
        ValueError: for another number of entries, ``hazard_max <= hazard_min``, a cap outside [0, 1].
    """

    def __init__(
        self,
        num_options: int,
        *,
        hazard_min: float | Sequence[float] = 0.0,
        hazard_max: float | Sequence[float],
        steepness: float | Sequence[float],
        cap: float | Sequence[float] = 1.0,
        hard_max: bool | Sequence[bool] = True,
        age_key: NestedKey = AGE_KEY,
    ) -> None:
        super().__init__()
        columns = {"hazard_min": hazard_min, "hazard_max": hazard_max, "steepness": steepness, "cap": cap}
        for name, value in columns.items():
            self.register_buffer(name, _column(name, value, num_options, torch.float32))
        self.register_buffer("hard_max", _column("hard_max", hard_max, num_options, torch.bool))
        self.age_key = age_key
        low, high, top = (cast("Tensor", getattr(self, name)) for name in ("hazard_min", "hazard_max", "cap"))
        if not bool((low < high).all()):
            raise ValueError(
                f"hazard_max: expected more than hazard_min {hazard_min}, received {hazard_max}. Remedy: raise "
                "hazard_max or lower hazard_min."
            )
        if not bool(((top >= 0) & (top <= 1)).all()):
            raise ValueError(f"cap: expected probabilities in [0, 1], received {cap}. Remedy: numbers from 0 to 1.")

    def forward(self, tensordict: TensorDictBase) -> Tensor:
        """Probabilities ``[*, O]`` of termination."""
        own = {name: getattr(self, name) for name in ("hazard_min", "hazard_max", "steepness", "cap", "hard_max")}
        return time_hazard(tensordict.get(self.age_key).unsqueeze(-1), **own)


def one_hot(option: Tensor, num_options: int, dtype: torch.dtype) -> Tensor:
    """``[*]`` int64 -> ``[*, O]``; unlike torch's own, it does not ask the host whether the indices are in range."""
    return (option.unsqueeze(-1) == torch.arange(num_options, device=option.device)).to(dtype)


def _column(name: str, value: Any, num_options: int, dtype: torch.dtype) -> Tensor:
    """``[O]`` of a number, or of O of them."""
    tensor = torch.as_tensor(value, dtype=dtype)
    if tensor.shape not in (torch.Size(()), torch.Size((num_options,))):
        raise ValueError(
            f"{name}: expected a number or {num_options} of them, received {value!r}. Remedy: one number for all "
            "options, or one each."
        )
    return tensor.expand(num_options).clone()
