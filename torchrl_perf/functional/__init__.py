"""Pure tensor functions: no TensorDict, no state, no host waits. The rest of the package reads and writes the keys."""

from torchrl_perf.functional.advantages import (
    generalized_advantage_estimate,
    td_lambda_targets,
    vtrace_advantage_estimate,
)
from torchrl_perf.functional.coloured_noise import coloured_noise
from torchrl_perf.functional.losses.distributional import categorical_projection, quantile_huber_loss
from torchrl_perf.functional.losses.elbo import beta_at, decayed_weights, gaussian_kl
from torchrl_perf.functional.losses.information import (
    a_optimality,
    d_optimality,
    embedding_information_gain,
    ensemble_disagreement,
    fisher_diagonal,
)
from torchrl_perf.functional.losses.options import arrival_value, option_segments, smdp_target, time_hazard
from torchrl_perf.functional.losses.risk import Risk, distort
from torchrl_perf.functional.n_step import n_step_targets, n_step_window
from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.functional.rows.selection import leftmost_k
from torchrl_perf.functional.scan import linear_recurrence, reverse_linear_recurrence

__all__ = [
    "Risk",
    "a_optimality",
    "arrival_value",
    "beta_at",
    "categorical_projection",
    "coloured_noise",
    "d_optimality",
    "decayed_weights",
    "distort",
    "embedding_information_gain",
    "ensemble_disagreement",
    "fisher_diagonal",
    "gaussian_kl",
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
