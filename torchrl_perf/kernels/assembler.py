"""Which assembler makes the machine code of our kernels on Hopper: none older than CUDA 12.9's.

A product of a warp group (``wgmma``) finds its operand in shared memory by a descriptor in uniform registers. Where
several such products follow one another, ptxas 12.8 makes some descriptors from registers that hold something else, or
nothing: the same PTX, which is right, becomes a read beyond memory, as on an H200 with layers (4, 64, 32, 2) in bf16
and (4, 64, 64, 64, 2) in fp16, or a wrong sum and no error. ptxas 12.9 and 13.0 make right descriptors of all that were
compared, and these two networks ran right there as 12.9 assembles them. Triton 3.6 takes 12.8 up to
Hopper and brings 12.9 beside it, for Blackwell. Others met it, too: triton-lang/triton issue 11366 and
fla-org/flash-linear-attention pull request 1262.

Import this module only where Triton is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton

__all__ = ["sound_assembler"]

LEAST = (12, 9)
"""The first version of CUDA whose ptxas is taken for Hopper."""
PTX = 88
"""PTX of that version: named at each compilation, it keeps the code apart in Triton's cache from that of another ptxas,
which Triton does not tell apart within a process."""


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))


@contextmanager
def sound_assembler(device: int) -> Iterator[dict[str, int]]:
    """What is compiled while this is entered is assembled by a ptxas whose code is right.

    Args:
        device: index of the CUDA device to compile for.

    Yields:
        Options of the launch.

    Raises:
        RuntimeError: on Hopper, if Triton knows only older ones.
    """
    nvidia = triton.knobs.nvidia
    if torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9 or _version(nvidia.ptxas) >= LEAST:
        yield {}
        return
    tools = nvidia.ptxas, nvidia.ptxas_blackwell
    if _version(tools[1]) < LEAST:
        found = " and ".join(f"{tool.version} ({tool.path})" for tool in tools)
        raise RuntimeError(
            f"expected ptxas {'.'.join(map(str, LEAST))} or newer on a Hopper GPU, where older ones make wrong code of "
            f"matrix products, received {found}. Remedy: set TRITON_PTXAS_PATH to the ptxas of a newer CUDA toolkit."
        )
    with nvidia.scope():
        nvidia.ptxas = tools[1].path
        yield {"ptx_version": PTX}
