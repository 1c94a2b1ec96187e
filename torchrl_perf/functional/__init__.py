"""Pure tensor functions: no TensorDict, no state, no host waits. The rest of the package reads and writes the keys."""

from torchrl_perf.functional.advantages import (
    generalized_advantage_estimate,
    td_lambda_targets,
    vtrace_advantage_estimate,
)
from torchrl_perf.functional.n_step import n_step_targets, n_step_window
from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.functional.scan import linear_recurrence, reverse_linear_recurrence

__all__ = [
    "generalized_advantage_estimate",
    "linear_recurrence",
    "n_step_targets",
    "n_step_window",
    "polyak_update_",
    "reverse_linear_recurrence",
    "td_lambda_targets",
    "vtrace_advantage_estimate",
]
