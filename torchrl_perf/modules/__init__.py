"""Policy modules and distributions without host waits."""

from torchrl_perf.modules.actor import DeviceActor
from torchrl_perf.modules.distributions import GumbelCategorical
from torchrl_perf.modules.mlp import FusedMLP

__all__ = ["DeviceActor", "FusedMLP", "GumbelCategorical"]
