"""Hears the operations that wait for the device while a program runs as it is: no dispatch mode, no eager execution.

A dispatch mode sees every operation and so slows all of them, turns ``torch.compile`` off, and ends with its thread.
Here only the kernels of the waiting operations are wrapped, in the dispatcher itself, and the wrapper calls the kernel
that it found there: nothing else changes, compiled code and the threads of the backward engine included. What waits
without a kernel of its own (``torch.cuda.synchronize``, events and streams; on CPU tensors ``tolist``, ``numpy`` and
``cpu``) is wrapped as a Python attribute. All of it is undone when the context ends.

A boolean mask as index shows as the ``nonzero`` that it makes; so does its gradient.
"""

import copy
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from torchrl_perf.runtime.waits.host_copies import HostCopies
from torchrl_perf.runtime.waits.operators import (
    COPY_TO_DEVICE,
    COPY_TO_HOST,
    SYNC_MESSAGE,
    copy_waits,
    tensors_within,
)
from torchrl_perf.runtime.waits.rules import RULES, Rule

__all__ = ["Heard", "Interception"]

WAITING_KERNELS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "equal",
    "allclose",
    "repeat_interleave.Tensor",
    "bincount",
    "_linalg_check_errors",
)
"""Operators with a kernel of their own whose result, or its size, the host has to wait for."""


class Heard(NamedTuple):
    """One operation that was heard.

    Attributes:
        op: name of the operation.
        waits: whether the host waited; False for an asynchronous copy between devices.
        seconds: how long the host was blocked; 0 on CPU tensors, where nothing is waited for.
    """

    op: str
    waits: bool
    seconds: float


class Wait(NamedTuple):
    """What is about to run on CUDA.

    Attributes:
        op: name of the operation.
        device: whose current stream it waits for; None if it waits in another way or not at all.
        waits: whether it waits.
    """

    op: str
    device: torch.device | None = None
    waits: bool = True


class _Local(threading.local):
    """Per thread: whether an operation that is heard already is running."""

    busy = False


class Interception:
    """Context in which every wait of the process is reported, on whatever thread it happens.

    Args:
        heard: called with what was heard, on the thread and below the frames that caused it.
        cuda: True hears operations on CUDA tensors and copies between devices, with the time the host was blocked.
                False counts operations on CPU tensors as a stand-in; ``cpu()`` then returns a copy, as it does on CUDA.

    Raises:
        RuntimeError: on entry, by a version of PyTorch that does not give out its kernels (before 2.10).
    """

    def __init__(self, heard: Callable[[Heard], None], *, cuda: bool) -> None:
        self._heard, self._cuda = heard, cuda
        self._copies = HostCopies()
        self._local = _Local()
        self._stack = ExitStack()
        self._sync_warnings = False
        self._wait_for_stream = torch.cuda.Stream.synchronize

    def __enter__(self) -> Self:
        if not hasattr(torch.library, "get_kernel"):
            raise RuntimeError(f"expected PyTorch 2.10 or later, received {torch.__version__}: it has no get_kernel")
        with ExitStack() as stack:
            stack.callback(self._wrap_kernels()._destroy)
            if self._cuda:
                self._wrap_synchronisation(stack)
                self._listen_to_warnings(stack)
            else:
                self._wrap_methods(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    # -- kernels ----------------------------------------------------------------------------------------------------

    def _wrap_kernels(self) -> torch.library.Library:
        key = "CUDA" if self._cuda else "CPU"
        wrap = self._timed_kernel if self._cuda else self._counted_kernel
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that a kernel is replaced
            for name in WAITING_KERNELS:
                kernel = torch.library.get_kernel(f"aten::{name}", key)
                wrapped = wrap(name.split(".")[0], kernel)
                library.impl(name, wrapped, key, with_keyset=True, allow_override=True)
            if self._cuda:
                kernel = torch.library.get_kernel("aten::copy_", key)
                library.impl("copy_", self._timed_copy(kernel), key, with_keyset=True, allow_override=True)
            else:
                self._wrap_ruled_kernels(library)
                self._tell_reads_from_inner_ones(library, "_local_scalar_dense")
        return library

    def _wrap_ruled_kernels(self, library: torch.library.Library) -> None:
        """Operators that wait for some of their arguments; on CUDA their own reads and copies are heard."""
        for op, rule in RULES.items():
            for overload in rule.overloads:
                name = f"{op}.{overload}" if overload else op
                if not hasattr(torch.ops.aten, op):
                    continue  # gone from newer versions of torch, as torch.cholesky is
                if rule.reads:
                    self._tell_reads_from_inner_ones(library, name, rule)
                    continue
                kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
                wrapped = self._counted_kernel(op, kernel, rule)
                library.impl(name, wrapped, "CPU", with_keyset=True, allow_override=True)

    def _tell_reads_from_inner_ones(self, library: torch.library.Library, name: str, rule: Rule | None = None) -> None:
        """Count a read of a CPU tensor where the program asks for it, not where another CPU kernel does.

        Kernels read numbers that came as 0-d tensors (``x[mask] = 0.0`` does), or their own results, and on CUDA they
        are other kernels. The program's reads enter through the autograd key, which is excluded inside a kernel;
        tensors of the inference mode have no such key, and there the ADInplaceOrView key tells.
        """
        outer = torch.library.get_kernel(f"aten::{name}", "AutogradCPU")
        counted = self._counted_kernel(name.partition(".")[0], outer, rule)
        library.impl(name, counted, "AutogradCPU", with_keyset=True, allow_override=True)

    def _counted_kernel(self, op: str, kernel: Any, rule: Rule | None = None) -> Callable[..., Any]:
        local, heard, call, what = self._local, self._heard, kernel.call_boxed, Heard(op, True, 0.0)
        reads, copies = op == "_local_scalar_dense", self._copies

        def counted(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if local.busy or copies.has(args[0]) or (rule is not None and not rule.waits(args, kwargs)):
                return call(keyset, *args, **kwargs)
            if (reads and _is_inside_kernel(keyset)) or (kwargs and kwargs.get("output_size") is not None):
                return call(keyset, *args, **kwargs)
            local.busy = True
            try:
                heard(what)
                return call(keyset, *args, **kwargs)
            finally:
                local.busy = False

        return counted

    def _timed_kernel(self, op: str, kernel: Any) -> Callable[..., Any]:
        call = kernel.call_boxed

        def timed(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if self._local.busy or (kwargs and kwargs.get("output_size") is not None):
                return call(keyset, *args, **kwargs)
            return self._time(Wait(op, args[0].device), call, keyset, *args, **kwargs)

        return timed

    def _timed_copy(self, kernel: Any) -> Callable[..., Any]:
        call, local = kernel.call_boxed, self._local

        def timed(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            target, source = args[0].device, args[1].device
            if target.type == source.type or local.busy:
                return call(keyset, *args, **kwargs)
            to_host = target.type == "cpu"
            op, device = (COPY_TO_HOST, source) if to_host else (COPY_TO_DEVICE, target)
            wait = Wait(op, device) if copy_waits("copy_", args, kwargs) else Wait(op, waits=False)
            return self._time(wait, call, keyset, *args, **kwargs)

        return timed

    def _time(self, wait: Wait, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run an operation and report how long the host was blocked.

        The stream is waited for first, because that lets other Python threads run, which the kernel itself does not:
        they may be the ones that this thread waits for.
        """
        self._local.busy = True
        warned = self._sync_warnings and torch._C._cuda_get_sync_debug_mode() == 1
        if warned:
            self._debug_mode(0)  # the wait is known; the mode's warning would count it twice
        start = time.perf_counter()
        try:
            if wait.device is not None and not torch.cuda.is_current_stream_capturing():
                self._wait_for_stream(torch.cuda.current_stream(wait.device))
            return call(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - start
            if warned:
                self._debug_mode(1)
            self._heard(Heard(wait.op, wait.waits, seconds))
            self._local.busy = False

    # -- waits without a kernel -------------------------------------------------------------------------------------

    def _wrap_synchronisation(self, stack: ExitStack) -> None:
        for owner, name, op in (
            (torch.cuda, "synchronize", "cuda.synchronize"),
            (torch.cuda.Event, "synchronize", "Event.synchronize"),
            (torch.cuda.Stream, "synchronize", "Stream.synchronize"),
        ):
            replace(stack, owner, name, lambda original, op=op: self._timed_call(op, original))

    def _timed_call(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._local.busy or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return self._time(Wait(op), original, *args, **kwargs)

        return timed

    def _wrap_methods(self, stack: ExitStack) -> None:
        for name in ("tolist", "numpy", "__array__", "cpu", "__repr__", "__reduce_ex__"):
            op = "pickle" if name == "__reduce_ex__" else name
            replace(stack, Tensor, name, lambda original, op=op: self._counted_method(op, original))
        for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (Tensor, "new_tensor")):
            replace(stack, owner, name, lambda original, owner=owner: self._counted_constructor(original, owner))
        for owner in (torch, Tensor):
            for name in ("quantile", "nanquantile", "tensor_split"):
                replace(stack, owner, name, self._quiet_call)
            for name in ("cov", "corrcoef"):
                replace(stack, owner, name, self._quiet_call)

    def _counted_method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method that reads a CPU tensor without a kernel; reads of what ``cpu`` has returned wait no more."""
        local, heard, what, copies = self._local, self._heard, Heard(name, True, 0.0), self._copies

        @wraps(original)
        def counted(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            plain = type(self) is Tensor or type(self) is nn.Parameter  # a tensor that is being traced is neither
            if not plain or local.busy or self.device.type != "cpu" or torch.compiler.is_compiling():
                return original(self, *args, **kwargs)
            if copies.has(self) or (name == "pickle" and sys._getframe(1).f_code.co_filename == copy.__file__):
                return original(self, *args, **kwargs)  # `copy.copy` shares the memory
            local.busy = True
            try:
                heard(what)
                result = original(self, *args, **kwargs)
                return copies.copied(self, result) if name == "cpu" else result
            finally:
                local.busy = False

        return counted

    def _counted_constructor(self, original: Callable[..., Any], owner: Any) -> Callable[..., Any]:
        """A constructor that reads the numbers of the tensors in a list, one by one."""
        local, heard, what = self._local, self._heard, Heard("_local_scalar_dense", True, 0.0)
        position = 0 if owner is torch else 1

        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if local.busy or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            data = args[position] if len(args) > position else kwargs.get("data")
            for _ in range(tensors_within(data)):
                heard(what)
            return original(*args, **kwargs)

        return counted

    def _quiet_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose reads of CPU tensors do not happen on CUDA."""
        local = self._local

        @wraps(original)
        def quiet(*args: Any, **kwargs: Any) -> Any:
            weighted = kwargs.keys() & {"fweights", "aweights"}  # of a covariance: those are checked
            if local.busy or weighted or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            local.busy = True
            try:
                return original(*args, **kwargs)
            finally:
                local.busy = False

        return quiet

    def counted_copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``TensorDict.cpu``, which on the CPU copies nothing and so calls nothing.

        Args:
            original: the method.
        """
        local, heard, what, copies = self._local, self._heard, Heard("cpu", True, 0.0), self._copies

        @wraps(original)
        def counted(td: Any, *args: Any, **kwargs: Any) -> Any:
            if self._cuda or local.busy or torch.compiler.is_compiling():
                return original(td, *args, **kwargs)
            heard(what)
            result = original(td, *args, **kwargs)
            result = result.clone() if result is td else result
            for leaf in result.values(True, True):
                copies.mark(leaf)
            return result

        return counted

    # -- CUDA's own warnings ----------------------------------------------------------------------------------------

    def _listen_to_warnings(self, stack: ExitStack) -> None:
        """Hear what waits inside a kernel that is not wrapped, by the warnings of CUDA's sync debug mode."""
        stack.enter_context(warnings.catch_warnings())
        stack.callback(self._debug_mode, 0)
        self.rearm()
        if torch.cuda.is_initialized():
            self._arm()
        else:  # asking for the mode now would make a CUDA context before the program decides on one, or forks
            torch.cuda._lazy_call(self._arm)

    def _arm(self) -> None:
        self._sync_warnings = True
        self._debug_mode(1)

    def _debug_mode(self, mode: int) -> None:
        if self._sync_warnings:
            torch._C._cuda_set_sync_debug_mode(mode)

    def rearm(self) -> None:
        """Put the warning filter back in front, where the program has set filters of its own meanwhile; cheap."""
        if not self._cuda:
            return
        filters = warnings.filters
        if not filters or filters[0][0] != "always" or SYNC_MESSAGE not in str(filters[0][1]):
            warnings.filterwarnings("always", message=f".*{SYNC_MESSAGE}")
        if getattr(warnings.showwarning, "hears_syncs", False):
            return
        show = warnings.showwarning

        def showwarning(message: Any, *args: Any, **kwargs: Any) -> None:
            if SYNC_MESSAGE not in str(message):
                show(message, *args, **kwargs)
            elif not self._local.busy:
                self._heard(Heard("cuda_sync", True, 0.0))

        showwarning.hears_syncs = True  # pyright: ignore[reportFunctionMemberAccess]
        warnings.showwarning = showwarning


_BELOW_AUTOGRAD = torch._C.DispatchKey.ADInplaceOrView
_AUTOGRAD = torch._C.DispatchKey.AutogradCPU


def _is_inside_kernel(keyset: Any) -> bool:
    """Whether a CPU kernel that got these keys was called by another kernel."""
    return not keyset.has(_AUTOGRAD) and torch._C._dispatch_tls_is_dispatch_key_excluded(_BELOW_AUTOGRAD)


def replace(stack: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace an attribute by a wrapper of itself until the stack closes.

    Args:
        stack: undoes it.
        owner: module or class. An inherited attribute is shadowed, and the shadow removed at the end.
        name: of the attribute.
        wrap: takes the attribute, returns what stands in for it.
    """
    own = name in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    stack.callback(setattr, owner, name, original) if own else stack.callback(delattr, owner, name)
