"""Several processes that learn one policy: ``torch.distributed`` inside the iteration, captured or not."""

from torchrl_perf.parallel.gradients import SharedGradients
from torchrl_perf.parallel.join import RankError, RankLostError, RankStoppedError, join, leave
from torchrl_perf.parallel.ranks import Ranks

__all__ = ["RankError", "RankLostError", "RankStoppedError", "Ranks", "SharedGradients", "join", "leave"]
