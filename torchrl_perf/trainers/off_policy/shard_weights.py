"""Prioritised sampling where each rank draws from a shard: the weights that make it a draw from the whole replay."""

from collections.abc import Callable
from typing import cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_perf.parallel import Ranks
from torchrl_perf.replay import DevicePrioritizedSampler
from torchrl_perf.replay.priority_tree import PriorityTree

__all__ = ["corrections_of", "shard_correction", "weight_of"]


def shard_correction(
    sampler: DevicePrioritizedSampler, ranks: Ranks, corrections: Callable[..., Tensor] | None = None
) -> Tensor:
    """What importance weights of rows of this rank's shard are multiplied by, float32 0-d; one small collective.

    Each rank draws as many rows, with probability ``w / S_r`` from its shard of the sum ``S_r``. In the replay of all
    ranks a row's probability is ``w / S``, of the R ranks' sum S: with the factor ``R S_r / S`` the weighted draw is
    the draw from the whole. The weights are also scaled to the smallest one of all ranks in place of the shard's, since
    the joint loss is ``sum(w x) / sum(w)`` over the rows of all.

    Args:
        sampler: of this rank, that has drawn.
        ranks: the processes.
        corrections: :func:`corrections_of`, compiled say.
    """
    corrections = corrections_of if corrections is None else corrections
    tree = cast("PriorityTree", sampler.tree)
    own = torch.stack([tree.total.to(torch.float64).reshape(()), tree.minimum.to(torch.float64).reshape(())])
    # a number stays one: made a tensor of the device, it would be a copy that no graph can hold
    beta = sampler.beta.to(torch.float64) if isinstance(sampler.beta, Tensor) else sampler.beta
    return corrections(ranks.gathered(own), beta)[ranks.rank].to(torch.float32)


def corrections_of(shards: Tensor, beta: float | Tensor) -> Tensor:
    """The factors of all ranks, ``[R]`` float64.

    Args:
        shards: sum and smallest positive weight (infinity for none) of each rank's shard, ``[R, 2]`` float64.
        beta: exponent of the importance weights, a number or float64 0-d.
    """
    sums, least = shards.unbind(-1)
    total = sums.sum()
    share = len(sums) * sums / total
    # (w / least of all) ** -beta from (w / least of the shard) ** -beta
    scale = (least / least.amin()) ** -beta
    # a shard without a priority adds nothing; where no shard has one, all draw uniformly with weight 1
    return torch.where(total > 0, torch.where(sums > 0, share * scale, 0.0), 1.0)


def weight_of(sample: TensorDictBase, ranks: Ranks) -> Tensor | None:
    """How much a rank's mean loss of a sample ``[B]`` counts: the sum of its importance weights; None where all equal.

    Args:
        sample: rows of the replay buffer.
        ranks: the processes.
    """
    weight = sample.get("priority_weight", None) if ranks.several else None
    return None if weight is None else weight.sum().to(torch.float32)
