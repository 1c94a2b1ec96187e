"""Which line of code is running, and whose: call chains, split into user, library and machinery frames."""

import importlib.util
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import FrameType, TracebackType
from typing import NamedTuple

_RUNTIME = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Wrappers that torch puts between a Python call and a dispatch mode: never the cause of a wait.
_MACHINERY = ("_dynamo", "_compile.py", "_ops.py", "overrides.py", os.path.join("utils", "_python_dispatch.py"))


class Call(NamedTuple):
    """One frame of a call chain.

    Attributes:
        file: path of the source file.
        line: line number that is running.
        function: qualified name of the function.
    """

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Site:
    """A place in the code, seen from the user and from the libraries.

    Attributes:
        file: file of the innermost frame outside torch, tensordict, torchrl and the runtime package.
        line: its line number.
        source: text of that line, stripped; empty where the source is not available.
        library_file: file of the innermost frame outside torch (may be torchrl's or tensordict's).
        library_line: its line number.
    """

    file: str
    line: int
    source: str
    library_file: str
    library_line: int

    def __str__(self) -> str:
        """Return ``file:line``, the source line, and the library line where that is another one."""
        text = f"{self.file}:{self.line}"
        if self.source:
            text += f": `{self.source}`"
        if (self.library_file, self.library_line) != (self.file, self.line):
            text += f" (through {self.library_file}:{self.library_line})"
        return text


@cache
def package_root(name: str) -> str | None:
    """Return the folder of an installed package with a trailing separator, without importing it; None if absent."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return os.path.dirname(os.path.abspath(spec.origin)) + os.sep


@cache
def owner(file: str) -> str:
    """Return the owner of a source file: "runtime", "torch", "library", "stdlib" or "user".

    Args:
        file: ``co_filename`` of a frame.

    Returns:
        "library" stands for torchrl and tensordict; any other installed package counts as "user".
    """
    if file.startswith(("<frozen", "<eval_with_key", "<__array_function__")):
        return "stdlib"
    path = os.path.abspath(file)
    if path.startswith(_RUNTIME):
        return "runtime"
    if path.startswith(package_root("torch") or "\0"):
        return "torch"
    if any(path.startswith(package_root(name) or "\0") for name in ("torchrl", "tensordict")):
        return "library"
    installed = "site-packages" in path or "dist-packages" in path
    if path.startswith(sysconfig.get_paths()["stdlib"] + os.sep) and not installed:
        return "stdlib"
    return "user"


def call_chain(frame: FrameType | None, thread: int | None = None) -> list[Call]:
    """Return the frames from the innermost outwards.

    Args:
        frame: innermost frame to report.
        thread: identifier of the thread that started the work. The backward engine runs CUDA nodes in its own threads,
            whose stack ends at the engine; the frames of ``thread`` (waiting in ``backward``) are then appended.
    """
    chain = []
    if thread is not None and thread != threading.get_ident():
        frames = [frame, sys._current_frames().get(thread)]
    else:
        frames = [frame]
    for start in frames:
        current = start
        while current is not None:
            chain.append(Call(current.f_code.co_filename, current.f_lineno, current.f_code.co_qualname))
            current = current.f_back
    return chain


def traceback_chain(traceback: TracebackType | None) -> list[Call]:
    """Return the frames of an exception's traceback from the innermost outwards."""
    chain = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        chain.append(Call(code.co_filename, traceback.tb_lineno, code.co_qualname))
        traceback = traceback.tb_next
    return chain[::-1]


def is_machinery(path: str) -> bool:
    """Whether a file of torch (an absolute path) is a wrapper between a Python call and its kernel."""
    return path[len(package_root("torch") or "") :].startswith(_MACHINERY)


def innermost(chain: Iterable[Call]) -> Call | None:
    """Return the innermost frame that is neither this package's runtime nor torch's dispatch machinery."""
    for call in chain:
        kind = owner(call.file)
        if kind in ("runtime", "stdlib"):
            continue
        if kind == "torch" and is_machinery(os.path.abspath(call.file)):
            continue
        return call
    return None


def locate(chain: list[Call]) -> Site:
    """Return the user's line and the library's line of a call chain.

    Args:
        chain: frames from the innermost outwards, as from ``call_chain`` or ``traceback_chain``.

    Returns:
        The site. If no frame is the user's (a library's own thread), it is the library's line.
    """
    unknown = Call("<unknown>", 0, "")
    library = next((call for call in chain if owner(call.file) in ("library", "user")), None)
    user = next((call for call in chain if owner(call.file) == "user"), None)
    library = library or innermost(chain) or unknown
    user = user or library
    source = linecache.getline(user.file, user.line).strip()
    return Site(user.file, user.line, source, library.file, library.line)
