"""Capture a function into a CUDA graph, with the same interface and the same effect on a CPU."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, Literal

import torch
from tensordict import is_tensor_collection
from torch import Tensor

from torchrl_perf.runtime._graph import record, warming_up
from torchrl_perf.runtime._signature import cloned, detached, difference, leaves, shallow, signature
from torchrl_perf.runtime.compile import compiled
from torchrl_perf.runtime.upstream.tensors import cut_graphs
from torchrl_perf.runtime.waits.audit import HostSyncError, no_host_sync
from torchrl_perf.runtime.waits.frames import locate, traceback_chain

__all__ = ["CaptureError", "Captured", "capture", "is_capturing", "release_recorded"]

_RUNNING: ContextVar[bool] = ContextVar("torchrl_perf_capture_running", default=False)


class CaptureError(RuntimeError):
    """Raised where a function cannot be captured, or a captured one is called with other shapes."""


def is_capturing() -> bool:
    """Return whether the caller runs inside a captured function (warm-up included) or any CUDA graph capture."""
    # is_initialized first, because asking must not make a CUDA context (or fail in a build without CUDA).
    return _RUNNING.get() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


@contextmanager
def _running() -> Iterator[None]:
    token = _RUNNING.set(True)
    try:
        yield
    finally:
        _RUNNING.reset(token)


class Captured:
    """A function as ``capture`` returns it. See there for what a call does.

    Attributes:
        device: device that the function runs on.
        mode: how calls run once warm: "graph" on CUDA, else "compile" or "eager".
        calls: number of calls that have returned, warm-up calls included.
        warmup_seconds: host time of the warm-up calls, compilation included.
        capture_seconds: host time of recording the graph; 0 on a CPU.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        warmup: int,
        compile: bool | dict[str, Any],
        device: torch.device,
        pool: Any,
        generators: Sequence[torch.Generator],
        parameters: Iterable[Tensor],
        audit: bool,
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._fn = fn
        options = compile if isinstance(compile, dict) else {}
        self._run = fn if compile is False else compiled(fn, **{"device": device, **options})
        self.device = device
        self.mode: Literal["graph", "compile", "eager"] = "eager" if compile is False else "compile"
        if device.type == "cuda":
            self.mode = "graph"
        self.calls = 0
        self.warmup_seconds = self.capture_seconds = 0.0
        self._warmup, self._warm = warmup, 0
        self._audit = audit
        self._generators = tuple(generators)
        self._parameters = tuple(parameters)
        self._shared_pool = pool
        self._own_pool: Any = None
        self._inputs: dict[str, Tensor] = {}
        self._outputs: Any = None
        self._expected_in: dict[str, object] | None = None
        self._expected_out: dict[str, object] | None = None

    @property
    def captured(self) -> bool:
        """Whether the next call replays a graph."""
        return self._graph is not None

    @property
    def pool(self) -> Any:
        """Handle of the graph's memory pool, to pass as ``capture(..., pool=...)``; None on a CPU."""
        if self.device.type != "cuda":
            return None
        if self._shared_pool is not None:
            return self._shared_pool
        if self._own_pool is None:
            self._own_pool = torch.cuda.graph_pool_handle()
        return self._own_pool

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Static inputs by path, ``args[0]`` for a tensor and ``args[0]['key']`` in a TensorDict, once it is recorded.

        To save the copy, write into them in place and pass the tensors themselves to the next call.
        """
        return self._inputs

    def __call__(self, *args: Any) -> Any:
        """Run the function once more: eagerly, compiled, or as a replay.

        Args:
            *args: tensors or TensorDicts as in the first call.

        Returns:
            What the function returns, detached. After recording the same static objects on each call.

        Raises:
            CaptureError: if shapes, dtypes, devices or keys of inputs or outputs differ from the first call's, or the
                recording fails.
            HostSyncError: on the first call, if the function waits for the host.
        """
        if torch.compiler.is_compiling():
            return self._fn(*args)
        if is_capturing():
            result = detached(self._fn(*shallow(args)))
            self.calls += 1
            return result
        self._check_inputs(args)
        if self._graph is not None:
            self._load(args)
            self._graph.replay()
        elif self._warm < self._warmup or self.device.type != "cuda":
            self._check_outputs(result := self._call(args))
            self._warm += 1
            self.calls += 1
            return result
        else:
            self._record(args)
        self.calls += 1
        return self._outputs

    def release(self) -> None:
        """Drop the graph, its inputs and outputs, and give its memory back; the next call records again.

        Outputs that the caller still holds keep their own memory until they are dropped too.
        """
        graph, self._graph = self._graph, None
        self._inputs, self._outputs, self._own_pool = {}, None, None
        if graph is None:
            return
        # A replay may still be running on memory that is about to be freed.
        torch.cuda.synchronize(self.device)
        graph.reset()
        torch.cuda.empty_cache()

    def restart(self) -> None:
        """``release``, and warm up again: for a function whose code paths change, which has to compile them."""
        self.release()
        self._warm = 0

    def __del__(self) -> None:
        graph = getattr(self, "_graph", None)
        if graph is not None:
            with suppress(Exception):  # at interpreter exit the driver may be gone before the graph
                graph.reset()

    def _call(self, args: tuple[Any, ...]) -> Any:
        """Run the function itself, not a graph: all calls on a CPU, the warm-up on CUDA."""
        first = self._warm == 0
        start = time.perf_counter()
        place = warming_up(self.device) if self.device.type == "cuda" else nullcontext()
        self._cut_graphs()
        try:
            with _running(), place:
                result = self._audited(args) if first and self._audit else self._run(*shallow(args))
                result = detached(result)
        except HostSyncError as error:
            error.add_note(f"in the first call of capture({_name(self._fn)}), which is audited; nothing was captured")
            raise
        if self._warm < self._warmup:
            self.warmup_seconds += time.perf_counter() - start
        return result

    def _cut_graphs(self) -> None:
        # the hooks by which torch's own data parallelism shares gradients are on the nodes that would be replaced
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.device.type == "cuda" and not shared:
            cut_graphs(self._parameters)

    def _audited(self, args: tuple[Any, ...]) -> Any:
        """Run the function eagerly, refusing host waits and writes to its arguments."""
        inputs = [(path, leaf) for path, leaf in leaves(args, "args") if not leaf.is_inference()]
        versions = [leaf._version for _, leaf in inputs]
        with no_host_sync(self.device):
            result = self._fn(*shallow(args))
        for (path, leaf), version in zip(inputs, versions, strict=True):
            if leaf._version != version:
                raise CaptureError(
                    f"expected {_name(self._fn)} to leave its arguments alone, received one that writes to {path} in "
                    "place, while a graph works on its own copy. Remedy: return the result, or let the function "
                    "close over the tensor"
                )
        return result

    def _check_inputs(self, args: tuple[Any, ...]) -> None:
        if not args and not self._expected_in:
            self._expected_in = {}
            return
        for position, arg in enumerate(args):
            if not isinstance(arg, Tensor) and not is_tensor_collection(arg):
                raise CaptureError(
                    f"expected tensors and TensorDicts as arguments, received {type(arg).__name__} at position "
                    f"{position}. Remedy: put a changing number in a 0-d tensor on {self.device}, bind a constant "
                    "with partial"
                )
        received = signature(args, "args")
        if self._expected_in is not None and self._warm > 0:
            if words := difference(self._expected_in, received):
                raise CaptureError(
                    f"expected inputs of {_name(self._fn)} as they were recorded, received others: {words}. Remedy: "
                    "capture it anew for other inputs"
                )
            return
        for path, leaf in leaves(args, "args"):
            if not isinstance(leaf, Tensor) or leaf.device != self.device:
                where = leaf.device if isinstance(leaf, Tensor) else type(leaf).__name__
                raise CaptureError(
                    f"expected {path} to be a tensor on {self.device}, received {where}. Remedy: move it once"
                )
            if leaf.requires_grad:
                raise CaptureError(
                    f"expected {path} to need no gradient, received requires_grad=True. Remedy: call backward inside "
                    "the function, or pass the tensor detached"
                )
        self._expected_in = received

    def _check_outputs(self, result: Any) -> None:
        if self.device.type != "cuda" and self._warm > self._warmup:
            return  # nothing is frozen on a CPU; checking a few calls is enough to show the mistake
        received = signature(result)
        if self._expected_out is None:
            self._expected_out = received
        elif words := difference(self._expected_out, received):
            raise CaptureError(
                f"expected the result of {_name(self._fn)} to keep its shape and value from call to call, received a "
                f"change: {words}. Remedy: return tensors of fixed shape, since a graph repeats what it recorded"
            )

    def _load(self, args: tuple[Any, ...]) -> None:
        """Copy the arguments into the static inputs, on the current stream; what is there already is left alone."""
        targets, sources = [], []
        for path, leaf in leaves(args, "args"):
            target = self._inputs[path]
            if leaf.data_ptr() != target.data_ptr() or leaf.stride() != target.stride():
                targets.append(target)
                sources.append(leaf)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _record(self, args: tuple[Any, ...]) -> None:
        """Record the graph and replay it once, which is this call's effect."""
        start = time.perf_counter()
        inputs = cloned(args)
        self._cut_graphs()
        try:
            with _running():
                graph, outputs = record(lambda: self._run(*shallow(inputs)), self.device, self.pool, self._generators)
        except Exception as error:
            self._own_pool = None
            site = locate(traceback_chain(error.__traceback__))
            raise CaptureError(
                f"expected {_name(self._fn)} to be captured on call {self.calls + 1}, received {type(error).__name__} "
                f"at {site}: {error}. Remedy: no host wait, no torch.cuda.synchronize, no first-time initialisation or "
                "compilation after the warm-up (raise warmup=), optimisers with capturable=True, copies of parameters "
                "by detach().clone() or the parameters as parameters="
            ) from error
        self._check_outputs(outputs)
        self._inputs = {path: leaf for path, leaf in leaves(inputs, "args") if isinstance(leaf, Tensor)}
        self._outputs = outputs
        self._graph = graph
        _RECORDED.add(self)
        self.capture_seconds = time.perf_counter() - start
        graph.replay()


_RECORDED: weakref.WeakSet[Captured] = weakref.WeakSet()
"""Functions with a graph, for as long as someone else holds them."""


def release_recorded() -> None:
    """Releases every captured function of this process; the next call of one records it again.

    For what graphs may hold and someone is about to take down, such as a communicator.
    """
    for captured in list(_RECORDED):
        captured.release()


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)


def _resolve(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise CaptureError(f'expected device "cpu" or "cuda", received "{device}". Remedy: one of the two')
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CaptureError(
            f'expected a CUDA device for device="{device}", received none. Remedy: pass device="cpu" or None'
        )
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def capture(
    fn: Callable[..., Any],
    *,
    warmup: int = 2,
    compile: bool | dict[str, Any] = False,
    device: torch.device | str | None = None,
    pool: Any = None,
    generators: Sequence[torch.Generator] = (),
    parameters: Iterable[Tensor] = (),
    audit: bool = True,
) -> Captured:
    """Make a function a CUDA graph that replays with no host work; on a CPU, the function or its compiled form.

    **Every call counts.** The k-th call of the result has the effect of the k-th call of ``fn``: the first ``warmup``
    calls run ``fn`` itself, call ``warmup + 1`` records the graph and replays it once, later calls replay. Call 1 is
    audited: it runs eagerly (``torch.compile`` inside is off) and a host wait raises with operation, file and line,
    before anything is recorded but after what ``fn`` did up to there. From call 2 on compiled functions compile. On a
    CPU, call 1 is audited in the same way and later calls run ``fn``, compiled if asked.

    What a graph can and cannot repeat:

    * **Inputs** are positional tensors and TensorDicts whose shapes, dtypes, devices and keys never change. Each call
      copies them into static inputs (except for those inputs themselves, see ``Captured.inputs``). ``fn`` must not
      write to them; keys that it adds to a TensorDict appear only in its result.
    * **Outputs** are static: the same objects on each call, overwritten by the next one. Clone what must last. They
      are detached; call ``backward`` inside ``fn``. Numbers that ``fn`` returns must be constants.
    * **State** that ``fn`` closes over is read and written in place, at one address. A tensor that ``fn`` replaces
      (``self.x = self.x + 1``) is frozen as recorded; write ``self.x.add_(1)``. Python code runs only while recording.
    * **Random numbers** are fresh on each replay for the default CUDA generator and for ``generators``.
    * **Optimisers** need ``capturable=True`` and a learning rate in a tensor if it changes.
    * **Streams**: warm-up and recording run on one side stream that waits for the current one and is waited for; a
      replay runs on the current stream. Only recording synchronises the device. Do not replay on two streams at once.
    * **Nesting**: called inside another captured function, it runs its ``fn`` inline as part of that one.

    Args:
        fn: the function.
        warmup: calls before recording, at least 1, and 2 where call 1 is audited and ``fn`` compiles.
        compile: True compiles ``fn`` as one graph, a dict gives options of ``torchrl_perf.runtime.compile.compiled``.
        device: device of the function; None is CUDA where it is available, else the CPU.
        pool: memory pool to share, as ``other.pool``. Sharing saves memory, but graphs of one pool must replay in the
            order in which they were recorded, and a replay may overwrite the outputs of the others. None: its own pool.
        generators: CUDA generators besides the default one that ``fn`` draws from.
        parameters: leaves of which ``fn`` computes gradients. Graphs that somebody else still holds of them, such as
            that of a copy by ``clone()`` without ``detach()``, are cut off while ``fn`` is recorded, which they would
            make fail; not where ``torch.distributed`` is in use.
        audit: False skips the audit of call 1.

    Returns:
        The captured function, with ``calls``, ``captured``, ``mode``, ``warmup_seconds``, ``capture_seconds`` and
        ``release()``.

    Raises:
        CaptureError: if CUDA is asked for where there is none, or ``warmup`` is too small.
    """
    least = 2 if compile is not False and audit else 1
    if warmup < least:
        raise CaptureError(
            f"expected warmup >= {least}, received {warmup}. Remedy: warmup={least}; an audited call 1 runs eagerly"
        )
    return Captured(
        fn,
        warmup=warmup,
        compile=compile,
        device=_resolve(device),
        pool=pool,
        generators=generators,
        parameters=parameters,
        audit=audit,
    )
