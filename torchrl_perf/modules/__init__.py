"""Policy modules and distributions without host waits."""

from torchrl_perf.modules.actor import DeviceActor
from torchrl_perf.modules.distributions import GumbelCategorical
from torchrl_perf.modules.ensemble import EnsembleMLP, EnsembleQ
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.mlp import FusedMLP
from torchrl_perf.modules.q_networks import DuelingMLP
from torchrl_perf.modules.squashed_normal import SquashedNormal, SquashedNormalHead

__all__ = [
    "DeviceActor",
    "DuelingMLP",
    "EnsembleMLP",
    "EnsembleQ",
    "EpsilonGreedy",
    "FusedMLP",
    "GumbelCategorical",
    "SquashedNormal",
    "SquashedNormalHead",
]
