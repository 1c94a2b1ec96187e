"""Host waits: where a program makes the host wait for the device, counted or refused.

An operation is a host wait when Python needs a value, or a size, that the device has yet to compute: ``.item()``,
``bool(tensor)``, ``nonzero``, a boolean mask as index, ``unique``, ``equal``, a blocking copy. ``host_syncs`` counts
them by line, ``no_host_sync`` raises at the first. Both look at dispatched operations, those of the backward pass
included, so they work on CPU tensors as a stand-in for CUDA; on CUDA, ``torch.cuda.set_sync_debug_mode`` adds what no
dispatched operation shows.

Reads that only the CPU stand-in has are not reported, see ``ARTEFACTS`` in ``_waits.py``:

* ``torch.optim`` keeps ``step`` (and what follows from it) on the CPU unless ``capturable`` or ``fused`` is set, and
  these need an accelerator. Recognised by the innermost frame lying in ``torch/optim/`` (schedulers and LBFGS
  excepted).
* ``torch.nn.functional.one_hot`` with an explicit ``num_classes`` checks the range of its input on the CPU only.
* Counters that TorchRL always keeps in CPU tensors: revision and cursor of a storage, the next trajectory id.

Not seen: ``torch.cuda.synchronize()`` and ``Event.synchronize()`` (a CUDA graph capture refuses them), and on CPU
tensors copies between devices other than ``cpu()``. Inside an audit ``cpu()`` returns a copy, as on CUDA; reads of that
copy, or of results computed from it alone, are no further waits.

For a whole unchanged script, compiled functions and other threads included, use ``ScriptAudit`` in ``script_audit.py``
(``torchrl-perf syncs``), which wraps the kernels of the waiting operations instead.
"""

import copy
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_perf.runtime.waits.frames import Site, call_chain, locate, traceback_chain
from torchrl_perf.runtime.waits.host_copies import HostCopies
from torchrl_perf.runtime.waits.operators import (
    CONSTRUCTORS,
    COVARIANCES,
    CUDA_REMEDY,
    FREE_ON_CUDA,
    HOST_METHODS,
    REMEDIES,
    SYNC_MESSAGE,
    host_wait,
    is_artefact,
    tensors_within,
)
from torchrl_perf.runtime.waits.replacements import replaced_by

__all__ = ["HostSync", "HostSyncError", "HostSyncReport", "host_syncs", "may_wait", "no_host_sync"]


@dataclass(frozen=True)
class HostSync:
    """One line of code that made the host wait.

    Attributes:
        op: name of the operation (``_local_scalar_dense`` is what ``.item()``, ``bool``, ``int`` and ``float`` dispatch
            to).
        file: file of the innermost frame outside torch, tensordict, torchrl and the runtime package.
        line: its line number.
        count: how often it waited.
        source: text of that line.
        library_file: file of the innermost frame outside torch.
        library_line: its line number.
    """

    op: str
    file: str
    line: int
    count: int
    source: str
    library_file: str
    library_line: int


class HostSyncError(RuntimeError):
    """Raised when code that must not wait for the device would.

    Attributes:
        op: name of the operation.
        file: file of the user's line.
        line: its line number.
        source: text of that line.
        remedy: what to write instead.
    """

    def __init__(self, op: str, site: Site, remedy: str = "") -> None:
        self.op, self.site = op, site
        self.file, self.line, self.source = site.file, site.line, site.source
        self.remedy = remedy or REMEDIES.get(op, CUDA_REMEDY)
        super().__init__(f"expected no host wait, received {op} at {site}. Remedy: {self.remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.op, self.site, self.remedy)


class HostSyncReport:
    """Host waits by line, filled while ``host_syncs`` is open and readable at any time."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, Site]] = Counter()
        self._lock = threading.Lock()

    def add(self, op: str, site: Site, count: int = 1) -> None:
        """Count waits of operation ``op`` at ``site``. Safe to call from the threads of the backward engine."""
        with self._lock:
            self._counts[op, site] += count

    def without(self, other: "HostSyncReport") -> "HostSyncReport":
        """These waits, less as many as another report has of the same operations at the same innermost lines."""
        left, taken = HostSyncReport(), Counter[tuple[str, str, int]]()
        for row in other.rows:
            taken[_innermost(row)] += row.count
        for row in self.rows:
            found = min(row.count, taken[_innermost(row)])
            taken[_innermost(row)] -= found
            if row.count > found:
                site = Site(row.file, row.line, row.source, row.library_file, row.library_line)
                left.add(row.op, site, row.count - found)
        return left

    @property
    def rows(self) -> tuple[HostSync, ...]:
        """One row per operation and line, most frequent first."""
        with self._lock:
            counts = self._counts.most_common()
        return tuple(
            HostSync(op, site.file, site.line, count, site.source, site.library_file, site.library_line)
            for (op, site), count in counts
        )

    @property
    def total(self) -> int:
        """Number of waits in all."""
        with self._lock:
            return sum(self._counts.values())

    def __str__(self) -> str:
        """Return a table: count, operation, line, and the library's line where it is another one."""
        rows = self.rows
        lines = [f"{self.total} host waits at {len(rows)} lines"]
        width = max((len(row.op) for row in rows), default=0)
        for row in rows:
            site = Site(row.file, row.line, row.source, row.library_file, row.library_line)
            lines.append(f"{row.count:>6}  {row.op:<{width}}  {site}")
        return "\n".join(lines)


def _innermost(row: HostSync) -> tuple[str, str, int]:
    return row.op, row.library_file or row.file, row.library_line or row.line


_PERMITTED: list[None] = []
"""As long as the number of :func:`may_wait` that are open."""


@contextmanager
def may_wait(device: torch.device) -> Iterator[None]:
    """Within it nothing is a host wait: for what is read once before a capture, and never in a graph.

    Args:
        device: of what is read.
    """
    _PERMITTED.append(None)
    try:
        with sync_debug_mode("default") if device.type == "cuda" else nullcontext():
            yield
    finally:
        _PERMITTED.pop()


class _Audit:
    """State shared by the two modes of one context: what to do at a wait, and what to keep quiet about."""

    def __init__(self, cuda: bool, report: HostSyncReport | None) -> None:
        self.cuda, self.report = cuda, report
        self.first: HostSyncError | None = None
        self.quiet = False
        self.counted = False
        self.copies = HostCopies()
        self._thread = threading.get_ident()

    def wait(self, op: str) -> None:
        """Count a wait, or raise ``HostSyncError`` if there is no report to count in."""
        chain = call_chain(sys._getframe(1), self._thread)
        if self.quiet or _PERMITTED or (not self.cuda and is_artefact(chain)):
            return
        site = locate(chain)
        if self.report is not None:
            self.report.add(op, site)
            return
        error = HostSyncError(op, site, replaced_by(chain))
        self.first = self.first or error
        raise error

    @contextmanager
    def hushed(self) -> Iterator[None]:
        """Report nothing inside the context: the operation is counted already, or is an artefact."""
        previous, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = previous


class _Operations(TorchDispatchMode):
    """Sees each dispatched operation, in the forward and the backward pass."""

    def __init__(self, audit: _Audit) -> None:
        super().__init__()
        self._audit = audit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        audit, kwargs = self._audit, kwargs or {}
        # torch shows the sync debug mode's warning when the outermost call returns, after the operation itself
        audit.counted = False
        if not audit.cuda and audit.copies.has_any and audit.copies.are_all(args):
            return audit.copies.marked(func(*args, **kwargs))
        op = host_wait(func, args, kwargs, cuda=audit.cuda)
        if op is not None:
            audit.wait(op)
            audit.counted = True
            with audit.hushed():
                return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if audit.report is None and SYNC_MESSAGE in str(error):
                audit.wait(getattr(getattr(func, "overloadpacket", None), "__name__", str(func)))
            raise


class _Methods(TorchFunctionMode):
    """Sees functions that read a CPU tensor without a dispatched operation; used only for the CPU stand-in."""

    def __init__(self, audit: _Audit) -> None:
        super().__init__()
        self._audit = audit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        audit = self._audit
        if _is_free(func, args, kwargs):
            with audit.hushed():
                return func(*args, **kwargs)
        if func in CONSTRUCTORS:
            data = args[-1] if func is Tensor.new_tensor else (args[0] if args else kwargs.get("data"))
            for _ in range(tensors_within(data)):
                audit.wait("_local_scalar_dense")
            with audit.hushed():
                return func(*args, **kwargs)
        name = HOST_METHODS.get(func)
        if func is Tensor.untyped_storage and _is_pickling(sys._getframe(1)):
            name = "pickle"
        if name is None or args[0].device.type != "cpu" or audit.copies.has(args[0]):
            return func(*args, **kwargs)
        if not (name == "pickle" and _is_shallow_copy()):
            audit.wait(name)
        with audit.hushed():
            result = func(*args, **kwargs)
            return audit.copies.copied(args[0], result) if name == "cpu" else result


def _is_free(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function's reads of CPU tensors do not happen on CUDA."""
    if func is torch.nn.functional.one_hot:
        return (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) != -1
    if func is Tensor.__setitem__:  # ``x[mask] = number`` is a fill, which does not wait
        index, value = args[1], args[2]
        return isinstance(value, int | float) and isinstance(index, Tensor) and index.dtype == torch.bool
    if func in COVARIANCES:
        return len(args) < 3 and not {"fweights", "aweights"} & kwargs.keys()
    return func in FREE_ON_CUDA


def _is_pickling(frame: Any) -> bool:
    """Whether a tensor is asked for its storage in order to be written; ``__reduce_ex__`` itself passes no mode."""
    return frame.f_code.co_name == "_typed_storage" and frame.f_back.f_code.co_name == "_reduce_ex_internal"


def _is_shallow_copy() -> bool:
    """Whether a tensor is asked for its parts by ``copy.copy``, which shares its memory."""
    frame = sys._getframe(2)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_filename == copy.__file__:
            return True
        frame = frame.f_back
    return False


class _ForcedEager:
    """Keep compiled functions eager while at least one audit is open.

    The compiler's stance belongs to the process: two threads that restored it in the wrong order would leave it eager
    for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._open += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._stance.__exit__(None, None, None)


_FORCED_EAGER = _ForcedEager()


def _is_cuda(device: torch.device | str | None) -> bool:
    if device is None:
        return torch.cuda.is_available()
    kind = torch.device(device).type
    if kind == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f'expected a CUDA device for device="{device}", received none. Remedy: pass device="cpu" or None'
        )
    if kind not in ("cpu", "cuda"):
        raise ValueError(f'expected device "cpu" or "cuda", received "{device}". Remedy: one of the two')
    return kind == "cuda"


@contextmanager
def sync_debug_mode(mode: int | str) -> Iterator[None]:
    """Set ``torch.cuda.set_sync_debug_mode`` inside the context and restore the previous mode after it.

    Args:
        mode: "default", "warn" or "error" (0, 1, 2). Needs CUDA.
    """
    previous = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode(mode)
    try:
        yield
    finally:
        _set_sync_debug_mode(previous)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _heard(audit: _Audit) -> Iterator[None]:
    """Turn the warnings of CUDA's sync debug mode into waits, except for operations that are counted already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{SYNC_MESSAGE}")
        show = warnings.showwarning

        def showwarning(message: Any, *args: Any, **kwargs: Any) -> None:
            if SYNC_MESSAGE in str(message):
                if not audit.counted:
                    audit.wait("cuda_sync")
            else:
                show(message, *args, **kwargs)

        warnings.showwarning = showwarning
        with sync_debug_mode("warn"):
            yield


@contextmanager
def host_syncs(device: torch.device | str | None = None) -> Iterator[HostSyncReport]:
    """Count the host waits of the code inside, by operation and line.

    Functions made with ``torch.compile`` run eagerly inside, since Dynamo does not trace under a dispatch mode.
    Contexts nest: each counts what happens inside it. One context belongs to one thread and its backward passes.

    Args:
        device: None counts on CUDA tensors where CUDA is available, else on CPU tensors as a stand-in; "cpu" and "cuda"
            choose. On CUDA, reads of CPU tensors are not waits; CPU tensors show no device transfers.

    Yields:
        The report: ``rows``, ``total``, and ``str(report)`` as a table.

    Raises:
        RuntimeError: if "cuda" is asked for where there is none.
    """
    audit = _Audit(_is_cuda(device), HostSyncReport())
    with ExitStack() as stack:
        stack.enter_context(_FORCED_EAGER)
        if audit.cuda:
            stack.enter_context(_heard(audit))
        else:
            stack.enter_context(_Methods(audit))
        stack.enter_context(_Operations(audit))
        assert audit.report is not None
        yield audit.report


@contextmanager
def no_host_sync(device: torch.device | str | None = None, *, trace: bool = True) -> Iterator[None]:
    """Raise ``HostSyncError`` at the first host wait of the code inside, naming operation, file, line and remedy.

    On CUDA, ``torch.cuda.set_sync_debug_mode("error")`` is set too, and the previous mode restored at the end; that
    mode belongs to the process, so other threads must not wait meanwhile either. An error that the code inside
    swallowed is raised when the context ends.

    Args:
        device: as for ``host_syncs``.
        trace: False sets only CUDA's sync debug mode, so that compiled functions run compiled; nothing is checked on
            a CPU then.

    Raises:
        HostSyncError: at the first wait.
        RuntimeError: if "cuda" is asked for where there is none.
    """
    audit = _Audit(_is_cuda(device), None)
    try:
        with ExitStack() as stack:
            if trace:
                stack.enter_context(_FORCED_EAGER)
                if not audit.cuda:
                    stack.enter_context(_Methods(audit))
                stack.enter_context(_Operations(audit))
            if audit.cuda:
                stack.enter_context(sync_debug_mode("error"))
            yield
    except HostSyncError:
        raise
    except Exception as error:
        if audit.first is not None:
            raise HostSyncError(audit.first.op, audit.first.site, audit.first.remedy) from error
        if SYNC_MESSAGE in str(error):
            raise HostSyncError("cuda_sync", locate(traceback_chain(error.__traceback__))) from error
        raise
    if audit.first is not None:
        raise audit.first
