"""Many tensors written in few launches."""

import torch
from torch import Tensor

SMALL = 4_096
"""Elements of a tensor that is copied with others: the kernel for lists gives up to 65,536 of one to a single block."""


def copy_all_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """``target.copy_(source)`` for each pair, on CUDA in one launch for all small ones of a dtype.

    torch's own call for lists copies one by one where their dtypes differ, and gives a large tensor to few blocks.
    Under a compiler the copies are separate, to fuse with what made their sources.

    Args:
        targets: tensors that are overwritten, on one device.
        sources: as many tensors, each of the shape of its target or one that expands to it, of any dtype and device.
    """
    if torch.compiler.is_compiling():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    elif targets and targets[0].is_cuda:
        _copy_by_dtype(targets, sources)
    elif targets:
        torch._foreach_copy_(targets, sources)


def _copy_by_dtype(targets: list[Tensor], sources: list[Tensor]) -> None:
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if _is_small(target, source):
            group = groups.setdefault(target.dtype, ([], []))
            group[0].append(target)
            group[1].append(source)
        else:
            target.copy_(source)
    for group_targets, group_sources in groups.values():
        torch._foreach_copy_(group_targets, group_sources)


def _is_small(target: Tensor, source: Tensor) -> bool:
    alike = target.dtype == source.dtype and target.device == source.device and target.shape == source.shape
    return alike and target.numel() <= SMALL and target.stride() == source.stride()
