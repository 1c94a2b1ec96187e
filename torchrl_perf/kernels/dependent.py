"""Launches that overlap: a kernel is put onto the device while the one before it still runs, and waits there.

In a graph of thousands of small kernels it is the gaps between two of them, about a microsecond each, that take the
time. CUDA's programmatic dependent launch closes them, from sm_90 on: a kernel says that the next one may be placed,
and that one waits until this one has ended and what it wrote can be seen. Each kernel here waits before it lets the
next one come, and reads and writes nothing before the wait. PyTorch's compiler does the same with
``torch._inductor.config.triton.enable_pdl``; a kernel that does not take part is waited for whole.

Import this module only where Triton is.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EARLY = False
"""Whether kernels are launched this way; the constant of the same name in each of them."""


@triton.jit
def wait_for_previous(EARLY: tl.constexpr) -> None:
    """The first line of a kernel that takes part."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early() -> dict[str, bool]:
    """Options of a launch of a kernel that takes part."""
    return {"launch_pdl": True} if EARLY else {}
