"""Many tensors written in few launches."""

import torch
from torch import Tensor

SMALL = 4_096
"""Elements up to which a copy takes less time than its launch."""


def copy_all_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """``target.copy_(source)`` for each pair, on CUDA in one launch for all small ones of a dtype.

    torch's own call for lists copies one by one where their dtypes differ, and gives a large tensor to few blocks.
    Under a compiler the copies are separate, to fuse with what made their sources.

    Args:
        targets: tensors that are overwritten, on one device.
        sources: as many tensors, each of the shape of its target or one that expands to it, of any dtype and device.
    """
    if targets and not targets[0].is_cuda and not torch.compiler.is_compiling():
        torch._foreach_copy_(targets, sources)
        return
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if torch.compiler.is_compiling() or not _is_small(target, source):
            target.copy_(source)
        else:
            group = groups.setdefault(target.dtype, ([], []))
            group[0].append(target)
            group[1].append(source)
    for group_targets, group_sources in groups.values():
        torch._foreach_copy_(group_targets, group_sources)


def _is_small(target: Tensor, source: Tensor) -> bool:
    alike = target.dtype == source.dtype and target.device == source.device and target.shape == source.shape
    return alike and target.numel() <= SMALL and target.stride() == source.stride()
