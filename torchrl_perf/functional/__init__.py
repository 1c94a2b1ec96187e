"""Pure tensor functions: no TensorDict, no state, no host waits. The rest of the package reads and writes the keys."""

from torchrl_perf.functional.advantages import (
    generalized_advantage_estimate,
    td_lambda_targets,
    vtrace_advantage_estimate,
)
from torchrl_perf.functional.scan import linear_recurrence, reverse_linear_recurrence

__all__ = [
    "generalized_advantage_estimate",
    "linear_recurrence",
    "reverse_linear_recurrence",
    "td_lambda_targets",
    "vtrace_advantage_estimate",
]
