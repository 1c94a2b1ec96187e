"""Kernel launches at a third of the host time of Triton's own, which looks at every argument in Python each time.

Triton compiles a kernel anew for other dtypes, constants, alignments of pointers and divisibility of integers. What it
compiled is kept here by just those properties, and launched directly. Import this module only where Triton is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any], **options: int) -> None:
    """Launch a Triton kernel on the current stream of the device of its first argument.

    Args:
        kernel: a function decorated with ``triton.jit``.
        grid: programs, one to three numbers.
        args: tensors on one device and numbers, in the order of the kernel's arguments; no ``None``.
        constants: its ``constexpr`` arguments by name, in that order, after the others.
        **options: such as ``num_warps``.
    """
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, args, constants, **options)
    key = (kernel, device.index, *map(_specialisation, args), *constants.values(), *options.values())
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[grid](*args, **constants, **options)
        return None
    compiled[grid + (1,) * (3 - len(grid))](*args, *constants.values())
    return None


def _specialisation(arg: Any) -> Any:
    """What Triton specialises a kernel on."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, tuple):
        return tuple(map(_specialisation, arg))
    if isinstance(arg, int):
        return arg if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31)
    return type(arg)
