"""When calls become graphs: how often they have to repeat, and where they may not."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from torchrl_perf.runtime.capture import is_capturing
from torchrl_perf.runtime.upstream.tensors import under_a_mode

__all__ = [
    "DEVICES",
    "SHAPES",
    "WARMUP",
    "SelfCaptureWarning",
    "alone_on_side_stream",
    "go_back_on_this_thread",
    "may_record",
    "no_autocast_cache",
    "plain_calls",
]

WARMUP = 2
"""Calls of one shape that run eagerly before the next is recorded: kernels are loaded, libraries tuned."""
SHAPES = 8
"""Shapes that are recorded of one module; others run eagerly."""
DEVICES = ["cuda"]
"""Types of devices that have graphs."""
_PLAIN: ContextVar[bool] = ContextVar("torchrl_perf_self_capture_inline", default=False)
"""Whether calls run as they are: something is being recorded, of which each is a part, or the caller asked for it."""

_SIDE_STREAM = threading.RLock()


class SelfCaptureWarning(UserWarning):
    """Said once for a module that goes on eagerly, with the reason."""


@contextmanager
def plain_calls() -> Iterator[None]:
    """Within it, on this thread, modules run as they are: for a loop whose mode says how its parts run."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


@contextmanager
def alone_on_side_stream() -> Iterator[None]:
    """Within it, no other thread records, nor runs a pass over what was recorded: both use one stream.

    Nor does one change the compiler's stance, of which there is one for all threads.

    Waits for ten seconds at most. A function that is being recorded and takes gradients itself needs the thread of
    autograd, which may be the one that waits here; going on spoils that recording, which then runs eagerly.
    """
    taken = _SIDE_STREAM.acquire(timeout=10.0)
    try:
        yield
    finally:
        if taken:
            _SIDE_STREAM.release()


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Within it, weights are converted in each call: one that was converted outside is no part of a recording."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def may_record() -> bool:
    """Whether a call here may become a graph: outside of compilers, of other graphs and of dispatch modes."""
    if torch.compiler.is_compiling() or not (torch.cuda.is_initialized() or "cpu" in DEVICES):
        return False
    return not (_PLAIN.get() or is_capturing() or under_a_mode())


class _Thread(threading.local):
    goes_back_itself = False


_THREAD = _Thread()


def go_back_on_this_thread() -> None:
    """From now on backward passes that this thread begins run on it, and not on one of autograd's.

    Handing over to another thread and back takes a backward pass of few operations longer than the operations do:
    measured in a loop of PPO on an H200, 2.1 ms an update with it and 1.3 ms without. Whoever turns it on again,
    ``torch.autograd.set_multithreading_enabled(True)``, is not overruled.
    """
    if not _THREAD.goes_back_itself:
        _THREAD.goes_back_itself = True
        torch.autograd.set_multithreading_enabled(False)
