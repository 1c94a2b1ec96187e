"""Tasks that one observation does not tell enough of: velocities hidden, signs and cards to be remembered."""

from torchrl_perf.envs.partly_observed.cards import RepeatFirst, RepeatPrevious
from torchrl_perf.envs.partly_observed.stateless import (
    NoisyStatelessCartPole,
    NoisyStatelessPendulum,
    StatelessCartPole,
    StatelessPendulum,
)
from torchrl_perf.envs.partly_observed.tmaze import TMaze

__all__ = [
    "NoisyStatelessCartPole",
    "NoisyStatelessPendulum",
    "RepeatFirst",
    "RepeatPrevious",
    "StatelessCartPole",
    "StatelessPendulum",
    "TMaze",
]
