"""One way to launch a kernel: after the first time without Triton's search for the variant that it has compiled.

Triton finds the variant anew at each launch, from the types of all arguments and from what it assumes of them. With the
twenty arguments of a replay buffer's kernels that takes longer than the kernel. Here the same is asked in one pass, and
what Triton returned the first time is launched.

It imports no Triton: a kernel brings it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_VARIANTS: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""What was compiled, with the values of its constants in the order of the kernel's arguments."""


def launch(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any], **options: int) -> None:
    """Launch a Triton kernel on the current stream of the device of its first argument.

    Args:
        kernel: a function decorated with ``triton.jit`` whose constants come last.
        grid: programs, one to three numbers.
        args: tensors on one device, the first of them a tensor, numbers, and tuples of tensors, in the order of the
            kernel's arguments.
        constants: its ``constexpr`` arguments by name, without an ``EARLY`` at their end: see
            :mod:`torchrl_perf.kernels.dependent`.
        **options: such as ``num_warps``.
    """
    index = args[0].device.index
    if index is None or index == torch.cuda.current_device():  # no index: a CPU, where Triton's interpreter runs
        _launch(kernel, grid, args, constants, options, index)
        return
    with torch.cuda.device(index):
        _launch(kernel, grid, args, constants, options, index)


def _launch(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any], options: dict[str, int],
    device: int | None,
) -> None:  # fmt: skip
    if kernel.arg_names[-1] == "EARLY":
        is_early = overlaps(device)
        constants = {**constants, "EARLY": is_early}
        options = {**options, "launch_pdl": True} if is_early else options
    key = (id(kernel), device, assumptions(args), *constants.values(), *options.values())
    known = _VARIANTS.get(key)
    if known is None:
        compiled = _first(kernel, grid, args, constants, options, device)
        if compiled is not None:  # Triton's interpreter compiles nothing
            _VARIANTS[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
        return
    compiled, values = known
    compiled[(*grid, 1, 1)[:3]](*args, *values)


def _first(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any], options: dict[str, int],
    device: int | None,
) -> Any:  # fmt: skip
    """A launch that Triton compiles, unless it is interpreted."""
    if device is None:
        return kernel[grid](*args, **constants, **options)
    from torchrl_perf.kernels.assembler import sound_assembler

    with sound_assembler(device) as more:
        return kernel[grid](*args, **constants, **options, **more)


@functools.cache
def overlaps(device: int | None) -> bool:
    """Whether launches on the CUDA device of this index overlap; None is a CPU, where kernels are interpreted."""
    return device is not None and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def dense_rows(rows: Tensor) -> Tensor:
    """The tensor itself if its last dim is dense, else a copy: gradients of sums are expanded."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def assumptions(args: Sequence[Any]) -> tuple[Any, ...]:
    """What Triton compiles into a kernel of its arguments, equal for two calls that one variant serves.

    Of a tensor the dtype, and how far behind a multiple of 16 bytes it begins; of an integer whether it is 1, a
    multiple of 16, and wider than 32 bits; of other numbers their type.
    """
    found: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is int:
            found.append(1 if arg == 1 else (arg & 15 == 0, arg.bit_length() > 31))
        elif kind is float or kind is bool:
            found.append(kind)
        elif kind is tuple:
            found += [(each.dtype, each.data_ptr() & 15) for each in arg]
        else:
            found.append(arg.dtype)
            found.append(arg.data_ptr() & 15)
    return tuple(found)
