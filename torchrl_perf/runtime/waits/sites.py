"""Where a wait comes from, found fast enough to be asked at each of them.

The stack is walked to the first frame of the script; what is found there is worked out once and remembered by the
instructions involved.
"""

import ast
import dis
import linecache
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torchrl_perf.runtime.waits.frames import Call, is_machinery, owner, package_root
from torchrl_perf.runtime.waits.operators import is_artefact
from torchrl_perf.runtime.waits.replacements import remedy_for

__all__ = ["Place", "Places"]

_SKIP, _TORCH, _LIBRARY, _SCRIPT = range(4)
_Found = tuple[FrameType | None, FrameType | None, FrameType | None]
_UNKNOWN: Any = object()
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_METRICS = os.path.join(_PACKAGE, "metrics") + os.sep
# Envs that step on the host, which HostCollector is for.
HOST_ENVS = ("torchrl.envs.gym_like", "torchrl.envs.libs.gym", "torchrl.envs.batched_envs", "torchrl.envs.async_envs")
# Thin Python wrappers around one operation, which say less than the line that calls them.
_THIN = ("_tensor.py", "functional.py", "_jit_internal.py")


@dataclass(frozen=True)
class Place:
    """A line of the script and the line of a library beneath it.

    Attributes:
        op: name of the operation.
        file: file of the innermost frame of the script's own code.
        line: its line number.
        source: text of that line, stripped.
        library_file: file of the innermost frame that is not PyTorch's dispatch machinery: a library's, or the
            script's own.
        library_line: its line number.
        library_source: text of that line, stripped.
        function: qualified name of the function there.
        remedy: what to write instead.
        replacement: full name of this package's replacement; "" where there is none.
        planned: whether this is the one packed copy per interval of this package's metrics, which is no fault.
    """

    op: str
    file: str
    line: int
    source: str
    library_file: str
    library_line: int
    library_source: str
    function: str
    remedy: str
    replacement: str
    planned: bool = False


class Places:
    """Finds the ``Place`` of a wait.

    Args:
        script: path of the script. Its own code is what lies outside the standard library, the folders of installed
            packages and this package, and whatever lies in the folder of the script itself.
        cuda: False leaves out reads that only the stand-in of CPU tensors has.
    """

    def __init__(self, script: str, *, cuda: bool) -> None:
        self._root = os.path.dirname(os.path.abspath(script)) + os.sep
        self._cuda = cuda
        self._kinds: dict[str, int] = {}
        self._places: dict[tuple[str, int, int, int, int, int, int], Place | None] = {}
        self._known: dict[Place | None, Place | None] = {}
        self._codes: list[CodeType] = []  # kept alive, so that their ids stay theirs
        self._main = threading.main_thread().ident

    def find(self, op: str, frame: FrameType | None) -> Place | None:
        """The place of an operation.

        Args:
            op: its name.
            frame: frame that called it, or one inside it.

        Returns:
            The place, the same object each time; None for a read that is left out: an artefact of the CPU stand-in,
            or the compiler at work.
        """
        inner, library, script = self._walk(frame)
        if script is None:
            inner, library, script = self._without_script(frame, inner, library)
        if inner is None or library is None or script is None:
            return None
        inner_code, library_code, script_code = inner.f_code, library.f_code, script.f_code
        key = (
            op,
            id(inner_code),
            inner.f_lasti,
            id(library_code),
            library.f_lasti,
            id(script_code),
            script.f_lasti,
        )
        place = self._places.get(key, _UNKNOWN)
        if place is _UNKNOWN:
            self._codes += [inner_code, library_code, script_code]
            place = self._describe(op, frame, (inner, library, script))
            place = self._places[key] = self._known.setdefault(place, place)
        return place

    def _without_script(self, frame: FrameType | None, inner: FrameType | None, library: FrameType | None) -> _Found:
        """Stand-ins where a thread has no frame of the script.

        A thread of the backward engine has no frames of its own, and the main thread waits for it in ``backward``.
        """
        script = None
        if threading.get_ident() != self._main and self._main is not None:
            other = self._walk(sys._current_frames().get(self._main))
            inner, library, script = inner or other[0], library or other[1], other[2]
        script = script or library or inner or frame
        return inner or script, library or script, script

    def _walk(self, frame: FrameType | None) -> _Found:
        """Innermost frame that is not machinery, innermost one outside PyTorch, innermost one of the script."""
        kinds, inner, library = self._kinds, None, None
        while frame is not None:
            file = frame.f_code.co_filename
            kind = kinds.get(file)
            if kind is None:
                kind = kinds[file] = self._kind(file)
            if kind:
                if inner is None:
                    inner = frame
                if kind >= _LIBRARY:
                    if library is None:
                        library = frame
                    if kind == _SCRIPT:
                        return inner, library, frame
            frame = frame.f_back
        return inner, library, None

    def _kind(self, file: str) -> int:
        """Whose code a file is."""
        if file.startswith("<") or "torchinductor_" in file:
            return _SKIP
        path = os.path.abspath(file)
        kind = owner(file)
        if kind in ("runtime", "stdlib"):
            return _SKIP
        if kind == "torch":
            thin = path[len(package_root("torch") or "") :] in _THIN
            return _SKIP if is_machinery(path) or thin else _TORCH
        if path.startswith(self._root) and "-packages" not in path[len(self._root) :]:
            return _SCRIPT
        installed = "site-packages" in path or "dist-packages" in path
        return _LIBRARY if kind == "library" or installed or path.startswith(_PACKAGE) else _SCRIPT

    def _describe(self, op: str, frame: FrameType | None, found: Sequence[FrameType]) -> Place | None:
        inner, library, script = found
        chain = _chain(frame)
        if _compiles(chain):
            return None
        if not self._cuda and (is_artefact(chain) or _is_checked_one_hot(inner)):
            return None
        op = _indexing(op, inner)
        between = self._between(chain)
        remedy, replacement = remedy_for(op, between, _expression(library), on_host=_steps_on_host(frame))
        return Place(
            op,
            script.f_code.co_filename,
            _position(script)[0],
            _line(script),
            library.f_code.co_filename,
            _position(library)[0],
            _line(library),
            library.f_code.co_qualname,
            remedy,
            replacement,
            planned=any(os.path.abspath(call.file).startswith(_METRICS) for call in between),
        )

    def _between(self, chain: list[Call]) -> list[Call]:
        """The frames of libraries, PyTorch's included, up to the script's first."""
        frames = []
        for call in chain:
            kind = self._kinds.get(call.file, _SKIP)
            if kind == _SCRIPT:
                break
            if kind != _SKIP:
                frames.append(call)
        return frames


def _chain(frame: FrameType | None) -> list[Call]:
    chain = []
    while frame is not None:
        chain.append(Call(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return chain


def _steps_on_host(frame: FrameType | None) -> bool:
    """Whether the innermost env that is at work, or that a collector steps, lives in gymnasium or other processes."""
    common = sys.modules.get("torchrl.envs.common")
    while frame is not None and common is not None:
        owner = frame.f_locals.get("self")
        env = owner if isinstance(owner, common.EnvBase) else getattr(owner, "env", None)
        if isinstance(env, common.EnvBase):
            while hasattr(env, "base_env"):
                env = env.base_env
            modules = {kind.__module__ for kind in type(env).__mro__}
            return any(name.startswith(HOST_ENVS) for name in modules)
        frame = frame.f_back
    return False


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, _position(frame)[0], frame.f_globals).strip()


def _position(frame: FrameType) -> tuple[int, int | None, int | None, int | None]:
    """First line, last line, first and last column of what a frame is evaluating.

    A branch asks for a truth value, but carries the lines of its whole condition: the instruction before it is what it
    asks.
    """
    code, index = frame.f_code, frame.f_lasti // 2
    name = dis.opname[code.co_code[frame.f_lasti]]
    first, last, start, end = list(code.co_positions())[index - ("JUMP" in name or name == "TO_BOOL")]
    return frame.f_lineno if first is None else first, last, start, end


def _expression(frame: FrameType) -> str:
    """Text of what a frame is evaluating; of its line where the source does not tell."""
    node = _segment(frame)
    return _line(frame) if node is None else ast.unparse(node)


def _compiles(chain: list[Call]) -> bool:
    """Whether the compiler is reading values to trace or fold, which the compiled program does not do."""
    return any(call.file.endswith(os.path.join("_dynamo", "convert_frame.py")) for call in chain)


def _segment(frame: FrameType) -> ast.AST | None:
    """The expression that a frame is evaluating."""
    first, last, start, end = _position(frame)
    if last is None or start is None or end is None:
        return None
    lines = [linecache.getline(frame.f_code.co_filename, number).encode() for number in range(first, last + 1)]
    if not lines or not all(lines):
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"".join(lines).decode().strip(), mode="eval").body
    except (SyntaxError, UnicodeDecodeError):
        return None


def _is_checked_one_hot(frame: FrameType) -> bool:
    """Whether a read is ``one_hot`` checking its range, which it does on the CPU only, given the number of classes."""
    node = _segment(frame)
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("one_hot"):
        return False
    return len(node.args) > 1 or any(keyword.arg == "num_classes" for keyword in node.keywords)


def _indexing(op: str, frame: FrameType) -> str:
    """The name of the operation whose mask a ``nonzero`` makes."""
    if op != "nonzero":
        return op
    first, last, *_ = _position(frame)
    node = _segment(frame)
    if isinstance(node, ast.Subscript):
        text = linecache.getline(frame.f_code.co_filename, last or first)
        return "index_put_" if _is_target(text, node) else "index"
    return op


def _is_target(line: str, node: ast.Subscript) -> bool:
    """Whether a line assigns to a subscript."""
    try:
        statement = ast.parse(line.strip()).body[0]
    except (SyntaxError, IndexError):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(ast.unparse(target) == ast.unparse(node) for target in targets)
