"""Sums of gradients in one kernel over symmetric memory: packed, added and their norms found at once."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_perf.kernels import processors, rank_kernels

__all__ = ["exchange_of", "sums_of"]

ALIGNED = 4
"""Numbers of float32 in 16 bytes, at which each tensor begins."""


def exchange_of(group: Any, rank: int, size: int, like: Sequence[Tensor]) -> Any:
    """What the kernel needs to sum tensors of these sizes; None where they are too many or there is no Triton.

    All ranks of the group make it at once, and not within a capture.

    Args:
        group: process group whose ranks are on one host and reach each other's memory.
        rank: of this process in it.
        size: number of ranks.
        like: float32 tensors on CUDA.

    Returns:
        A :class:`torchrl_perf.kernels.rank_sums.Exchange`.
    """
    device = like[0].device
    kernels = rank_kernels(like)
    if kernels is None or len(like) > kernels.MANY:
        return None
    parts, room = kernels.parts_of(like)
    # each program waits for one on every other GPU, so that all of them have to run at once
    if parts > processors(device):
        return None
    import torch.distributed._symmetric_memory as symmetric

    places = tuple(accumulate([-(-one.numel() // ALIGNED) * ALIGNED for one in like], initial=0))
    buffer = symmetric.empty(2 * places[-1], dtype=torch.float32, device=device)
    flag = symmetric.empty(parts * size, dtype=torch.int32, device=device)
    held = [symmetric.rendezvous(one, group.group_name) for one in (buffer, flag)]
    buffer.zero_()
    flag.zero_()
    # a sum waits on the device for those before it on every GPU: nobody counts in flags that are still to become 0
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    buffers, flags = (
        tuple([one if other == rank else handle.get_buffer(other, one.shape, one.dtype) for other in range(size)])
        for handle, one in zip(held, (buffer, flag), strict=True)
    )
    zeros = torch.zeros(parts, dtype=torch.int32, device=device)
    count = torch.zeros((), dtype=torch.int32, device=device)
    return kernels.Exchange(places, buffers, flags, rank, zeros, count, torch.empty(room, device=device))


def sums_of(tensors: Sequence[Tensor], exchange: Any, normed: int) -> tuple[Tensor, Tensor]:
    """Sums and norms, see :meth:`torchrl_perf.parallel.Ranks.summed_parts`."""
    from torchrl_perf.kernels import rank_sums

    return rank_sums.summed(tensors, exchange, normed)
