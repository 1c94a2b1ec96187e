"""One way to launch a kernel. Import this module only where Triton is."""

from collections.abc import Sequence
from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any], **options: int) -> None:
    """Launch a Triton kernel on the current stream of the device of its first argument.

    Args:
        kernel: a function decorated with ``triton.jit``.
        grid: programs, one to three numbers.
        args: tensors on one device, the first of them a tensor, and numbers, in the order of the kernel's arguments.
        constants: its ``constexpr`` arguments by name.
        **options: such as ``num_warps``.
    """
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **constants, **options)
