"""Small tasks whose optimum is known in closed form."""

from torchrl_perf.envs.toy.ferry import Ferry
from torchrl_perf.envs.toy.hybrid_target import HybridTarget

__all__ = [
    "Ferry",
    "HybridTarget",
]
