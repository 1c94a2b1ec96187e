"""Recording one CUDA graph: the side stream, the memory pool, and a clean retreat when it fails."""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from torchrl_perf.runtime._signature import detached


@cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """Return the one stream on which warm-up and capture run.

    One stream for both, because an AccumulateGrad node keeps the stream on which it was made: a node left over from the
    warm-up would pull another stream into the capture, and one from the default stream would break it.
    """
    return torch.cuda.Stream(device=index)


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Run on the side stream, after the current stream's work and before what the current stream does next."""
    stream = _side_stream(device.index)
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from freeing CUDA graphs and memory while a graph is recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def warming_up(device: torch.device) -> Iterator[None]:
    """Run warm-up calls: on the side stream, without the optimisers' warning that nothing is being captured yet."""
    with on_side_stream(device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*constructed with capturable=True")
        yield


def record(
    fn: Callable[[], Any],
    device: torch.device,
    pool: Any,
    generators: Sequence[torch.Generator],
    *,
    frees_memory: bool = True,
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record what ``fn`` does into a CUDA graph without running it, and leave CUDA usable if that fails.

    A host wait reaches the driver, which refuses it and drops the capture; what that leaves half switched is put back.
    CUDA's sync debug mode would refuse it before, but belongs to the process: a thread that reads a result meanwhile
    would be refused too.

    Args:
        fn: function without arguments, warm: nothing left to compile, allocate lazily or tune.
        device: CUDA device with an index.
        pool: memory pool handle.
        generators: CUDA generators besides the default one that ``fn`` draws from.
        frees_memory: give back what garbage and the allocator's cache hold before, for a graph that needs much; it
            takes some 0.25 s.

    Returns:
        The graph, and the detached result of ``fn``: static tensors that each replay overwrites.

    Raises:
        Exception: whatever ``fn`` or the capture raises.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    torch.cuda.synchronize(device)
    if frees_memory:
        gc.collect()
        torch.cuda.empty_cache()
    with _no_garbage_collection(), on_side_stream(device):
        # thread_local: a logger or a data thread may use CUDA meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                outputs = detached(fn())
            graph.capture_end()
        except BaseException as error:
            _abandon(graph, device, pool, generators)
            shorten(error)
            raise
    return graph, outputs


def shorten(error: BaseException) -> None:
    """Leave of the driver's error its first line: the advice below it is on errors that are told late.

    Args:
        error: any; others stay as they are.
    """
    if isinstance(error, RuntimeError) and str(error).startswith("CUDA error"):
        error.args = (str(error).partition("\n")[0],)


def _abandon(
    graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any, generators: Sequence[torch.Generator]
) -> None:
    """End a failed capture so that CUDA stays usable: stream, allocator, random state."""
    try:
        graph.capture_end()
    except Exception:
        # The driver dropped the capture, and torch stopped before it undid its own part of it.
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(device.index, pool)
        for generator in (torch.cuda.default_generators[device.index], *generators):
            with suppress(Exception):
                # A copied state is one that is not being captured; seed and offset stay.
                generator.graphsafe_set_state(generator.clone_state())
    with suppress(Exception):
        graph.reset()
