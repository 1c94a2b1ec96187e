"""When calls become graphs: how often they have to repeat, and where they may not."""

from contextvars import ContextVar

import torch

from torchrl_perf.runtime.capture import is_capturing

__all__ = ["DEVICES", "INLINE", "SHAPES", "WARMUP", "SelfCaptureWarning", "may_record"]

WARMUP = 2
"""Calls of one shape that run eagerly before the next is recorded: kernels are loaded, libraries tuned."""
SHAPES = 8
"""Shapes that are recorded of one module; others run eagerly."""
DEVICES = ["cuda"]
"""Types of devices that have graphs."""
INLINE: ContextVar[bool] = ContextVar("torchrl_perf_self_capture_inline", default=False)
"""Whether something is being recorded, of which each call is a part."""


class SelfCaptureWarning(UserWarning):
    """Said once for a module that goes on eagerly, with the reason."""


def may_record() -> bool:
    """Whether a call here may become a graph: outside of compilers, of other graphs and of dispatch modes."""
    if torch.compiler.is_compiling() or not (torch.cuda.is_initialized() or "cpu" in DEVICES):
        return False
    return not (
        INLINE.get()
        or is_capturing()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
