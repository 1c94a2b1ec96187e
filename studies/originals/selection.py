"""Deletion of the k leftmost nodes of a colony, as durotaxis had it before and after its first optimisation.

One graph at a time, and each node's position read from the device on its own. The last two forms are the steps between
these and :func:`torchrl_perf.functional.leftmost_k`.
"""

import numpy as np
import torch
from torch import Tensor


def by_sort(nodes: Tensor, k: int) -> set[int]:
    """Before: a list of all positions, one read each, sorted.

    Args:
        nodes: ``[N, F]``, the position in column 0.
        k: number of nodes.

    Returns:
        Indices of the k leftmost; of equal positions the first.
    """
    positions = [(index, nodes[index][0].item()) for index in range(len(nodes))]
    positions.sort(key=lambda pair: pair[1])
    return {index for index, _ in positions[:k]}


def by_partition(nodes: Tensor, k: int) -> set[int]:
    """After: the same reads, then a partial selection by NumPy; of equal positions any."""
    positions = np.array([nodes[index][0].item() for index in range(len(nodes))])
    return _partition(positions, k)


def by_partition_of_one_copy(nodes: Tensor, k: int) -> set[int]:
    """The partition after one copy of the column."""
    return _partition(nodes[:, 0].cpu().numpy(), k)


def _partition(positions: np.ndarray, k: int) -> set[int]:
    if k <= 0:
        return set()
    return set(np.argpartition(positions, k - 1)[:k].tolist())


def by_topk(key: Tensor, k: int) -> Tensor:
    """Torch's ``topk`` on all rows, ``[*, N]`` bool: one k for all; of equal positions any."""
    chosen = key.topk(k, dim=-1, largest=False, sorted=False).indices
    return torch.zeros(key.shape, dtype=torch.bool, device=key.device).scatter(-1, chosen, True)


def as_mask(chosen: set[int], size: int) -> Tensor:
    """``[N]`` bool of a set of indices."""
    mask = torch.zeros(size, dtype=torch.bool)
    mask[sorted(chosen)] = True
    return mask
