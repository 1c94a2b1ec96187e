"""Sums of small buffers over symmetric memory: each rank reads those of its peers, in one kernel."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["OneShot"]

MOST_READ_BYTES = 4 << 20
"""That a rank reads from all of its peers: beyond, a ring sends less."""
EXACT_SIZES = (2, 4, 8)
"""Numbers of ranks for which PyTorch adds in the order of ranks, so that the sums are equal to the last bit."""


class OneShot:
    """All-reduce of ``torch.distributed._symmetric_memory`` for buffers that are made here.

    Args:
        group: process group whose ranks are on one host.
        size: number of its ranks.
    """

    def __init__(self, group: Any, size: int) -> None:
        self._name, self._size = getattr(group, "group_name", None), size
        self._whole: dict[int, Tensor] = {}  # each buffer with what pads it, by its address
        self._reaches: bool | None = None

    def takes(self, size: int, dtype: torch.dtype) -> bool:
        """Whether a buffer ``[size]`` may be one: it is small, of a dtype that the kernel has, and peers are near."""
        if self._size not in EXACT_SIZES or dtype not in (torch.float32, torch.bfloat16):
            return False
        if size * dtype.itemsize * (self._size - 1) > MOST_READ_BYTES or self._name is None:
            return False
        if self._reaches is None:
            self._reaches = _peers_reach(self._size)
        return self._reaches

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer ``[size]``, in memory that all ranks can read; all of them make it at once."""
        import torch.distributed._symmetric_memory as symmetric

        # the kernel reads 16 bytes at once
        per_load = 16 // dtype.itemsize
        whole = symmetric.empty(-(-size // per_load) * per_load, dtype=dtype, device=device)
        symmetric.rendezvous(whole, self._name)
        self._whole[whole.data_ptr()] = whole
        whole.zero_()
        return whole[:size]

    def holds(self, values: Tensor) -> bool:
        """Whether it is such a buffer."""
        return values.data_ptr() in self._whole

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, as a new tensor."""
        whole = self._whole[values.data_ptr()]
        return torch.ops.symm_mem.one_shot_all_reduce(whole, "sum", self._name)[: values.numel()]


def _peers_reach(size: int) -> bool:
    """Whether as many GPUs of this host can read each other's memory as there are ranks."""
    if torch.cuda.device_count() < size:
        return False
    here = torch.cuda.current_device()
    return all(torch.cuda.can_device_access_peer(here, other) for other in range(size) if other != here)
