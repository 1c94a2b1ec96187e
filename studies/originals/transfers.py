"""How active_dynamics moved a batch to its device, before and after, and how it cleaned up behind each step.

The device is asked for by the text of its name, as there.
"""

from typing import Any

import torch
from torch import Tensor


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Before: each entry by ``.to(device)``."""
    return {name: value.to(device) for name, value in batch.items()}


def to_device_later(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """After: each entry with ``non_blocking`` where the device's name has "cuda" in it. The source stays pageable."""
    options: dict[str, Any] = {"device": device}
    if "cuda" in str(device):
        options["non_blocking"] = True
    return {name: value.to(**options) for name, value in batch.items()}


class Cleanup:
    """What followed each step: PyTorch's cache emptied, where the device is CUDA.

    Args:
        device: the agent's.
        flag: after: whether it is CUDA is found out once, here; before: at each step, from its name.
        empties: whether the cache is emptied at all, which the original did in both versions.
    """

    def __init__(self, device: torch.device, *, flag: bool, empties: bool = True) -> None:
        self.device, self.flag, self.empties = device, flag, empties
        self.is_cuda = "cuda" in str(device)

    def __call__(self) -> bool:
        """Cleans up; returns whether the device is CUDA."""
        is_cuda = self.is_cuda if self.flag else "cuda" in str(self.device)
        if is_cuda and self.empties:
            torch.cuda.empty_cache()
        return is_cuda
