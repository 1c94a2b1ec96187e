"""Pure tensor functions: no TensorDict, no state, no host waits. The rest of the package reads and writes the keys."""

from torchrl_perf.functional.advantages import (
    generalized_advantage_estimate,
    td_lambda_targets,
    vtrace_advantage_estimate,
)
from torchrl_perf.functional.distributional import categorical_projection, quantile_huber_loss
from torchrl_perf.functional.n_step import n_step_targets, n_step_window
from torchrl_perf.functional.options import arrival_value, option_segments, smdp_target, time_hazard
from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.functional.risk import Risk, distort
from torchrl_perf.functional.scan import linear_recurrence, reverse_linear_recurrence
from torchrl_perf.functional.selection import leftmost_k

__all__ = [
    "Risk",
    "arrival_value",
    "categorical_projection",
    "distort",
    "generalized_advantage_estimate",
    "leftmost_k",
    "linear_recurrence",
    "n_step_targets",
    "n_step_window",
    "option_segments",
    "polyak_update_",
    "quantile_huber_loss",
    "reverse_linear_recurrence",
    "smdp_target",
    "td_lambda_targets",
    "time_hazard",
    "vtrace_advantage_estimate",
]
