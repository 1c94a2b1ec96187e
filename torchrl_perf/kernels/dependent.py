"""Launches that overlap: a kernel is put onto the device while the one before it still runs, and waits there.

In a graph of hundreds of small kernels it is the gaps between two of them, about a microsecond each, that take the
time. CUDA's programmatic dependent launch closes them, from sm_90 on: a kernel says that the next one may be placed,
and that one waits until this one has ended and what it wrote can be seen. Each kernel that takes part waits before it
lets the next one come, and reads and writes nothing before the wait, so that it follows all kernels before it. A kernel
that does not take part is waited for whole. Those of PyTorch's compiler take part too
(:mod:`torchrl_perf.runtime.upstream.inductor`).

A kernel takes part if its last constant is ``EARLY`` and its first line is :func:`wait_for_previous`;
:func:`torchrl_perf.kernels.launch.launch` does the rest. Import this module only where Triton is.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(EARLY: tl.constexpr) -> None:
    """The first line of a kernel that takes part."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
