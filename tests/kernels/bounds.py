"""Interpreted kernels touch only the memory of their arguments: the interpreter itself lets any address pass."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest


class OutOfBoundsError(Exception):
    """An element that a kernel reads or writes lies in none of its arguments."""


class _Call:
    """What a kernel was given: where its arguments' storages begin and end."""

    name = ""
    starts = ends = np.empty(0, np.uint64)

    def begin(self, kernel: Any, args: Sequence[Any]) -> None:
        spans = {}
        for storage in _storages(args):
            spans[storage.data_ptr()] = storage.nbytes()
        self.name = kernel.__name__
        self.starts = np.array(sorted(spans), np.uint64)
        self.ends = self.starts + np.array([spans[int(start)] for start in self.starts], np.uint64)

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        at = (
            pointers.data
            if mask is None
            else pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        )
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        place = np.searchsorted(self.starts, at, side="right").astype(np.int64) - 1
        inside = place >= 0
        if len(self.ends):
            inside &= at + np.uint64(size) <= self.ends[np.maximum(place, 0)]
        if inside.all():
            return
        first = at[~inside].flat[0]
        near = int(np.abs(self.ends.astype(np.int64) - np.int64(first)).min()) if len(self.ends) else 0
        raise OutOfBoundsError(
            f"{self.name}, {_line()}: {what} of {int((~inside).sum())} of {at.size} elements outside of all arguments, "
            f"the first {near} bytes from the nearest end"
        )


def _storages(args: Sequence[Any]) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, tuple):
            yield from _storages(arg)
        elif hasattr(arg, "untyped_storage"):
            yield arg.untyped_storage()


def _line() -> str:
    """The innermost line that is neither Triton's nor this file's."""
    frame = sys._getframe(1)
    while frame is not None and (
        "triton" in Path(frame.f_code.co_filename).parts or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@contextmanager
def bounds_checked() -> Iterator[None]:
    """Each access of an interpreted kernel is checked while this is entered."""
    from triton.runtime import interpreter

    call, builder = _Call(), interpreter.InterpreterBuilder
    given = interpreter.GridExecutor._init_args_hst

    def begin(self: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        found = given(self, args, kwargs)
        call.begin(self.fn, [*found[0], *found[1].values()])
        return found

    def checked(name: str, pointer: int, mask: int | None) -> Any:
        function = getattr(builder, name)

        def run(self: Any, *args: Any) -> Any:
            call.check(name.removeprefix("create_"), args[pointer], None if mask is None else args[mask])
            return function(self, *args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", begin)
        # a load or store without a mask becomes one with it
        places = {"masked_load": (0, 1), "masked_store": (0, 2), "atomic_rmw": (1, 3), "atomic_cas": (0, None)}
        for name, (pointer, mask) in places.items():
            patch.setattr(builder, f"create_{name}", checked(f"create_{name}", pointer, mask))
        yield
