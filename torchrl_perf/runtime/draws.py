"""Random numbers of many steps of a loop, drawn in a few launches and handed out step by step.

A launch costs a small loop as much as its arithmetic. What draws once a step asks :func:`uniform` or :func:`normal`.
In a plain call these draw, as ``torch.rand`` and ``torch.randn`` do. Within :func:`supplied` they hand out what was
drawn ahead.
"""

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Draw", "Row", "StepDraws", "normal", "noted", "supplied", "uniform"]

Kind = Literal["uniform", "normal"]
Row = Sequence[tuple[Kind, Tensor]]
"""Numbers that a step is supplied with, and their kinds."""

ALIGNMENT = 16
"""Bytes that compiled kernels read at once; they copy an input that begins elsewhere."""
LIMIT = 64 * 2**20
"""Most bytes that are drawn ahead, unless a single step takes more."""


class Draw(NamedTuple):
    """Random numbers that a step takes."""

    kind: Kind
    """In [0, 1), or standard normal."""
    shape: torch.Size
    dtype: torch.dtype


class _Supply:
    """What is handed out and written down now."""

    def __init__(self) -> None:
        # of the instance from the start: the compiler would compile once more after the first call has set them
        self.rows: list[tuple[Kind, Tensor]] | None = None
        self.notes: list[Draw] | None = None


class _OfThread(_Supply, threading.local):
    """Each thread has its own, since collectors may step in threads."""


_traced, _running = _Supply(), _OfThread()


def _supply() -> _Supply:
    # the compiler follows no attribute of a thread; what it traces is restored before the trace ends
    return _traced if torch.compiler.is_compiling() else _running


def uniform(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers in [0, 1), of a shape ``[*]``: those that were drawn ahead for this step, or fresh ones.

    Args:
        shape: of the numbers.
        dtype: float32 or float64.
        device: of the numbers.

    Returns:
        A tensor that must not be written to.
    """
    taken = _taken("uniform", torch.Size(shape), dtype)
    return torch.rand(shape, dtype=dtype, device=device) if taken is None else taken


def normal(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As :func:`uniform`, standard normal numbers."""
    taken = _taken("normal", torch.Size(shape), dtype)
    return torch.randn(shape, dtype=dtype, device=device) if taken is None else taken


def _taken(kind: Kind, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """The first row of this kind that is left, or None."""
    supply = _supply()
    if supply.notes is not None:
        supply.notes.append(Draw(kind, shape, dtype))
    for place, (of, row) in enumerate(supply.rows or ()):
        if of == kind and row.shape == shape and row.dtype == dtype:
            del supply.rows[place]  # pyright: ignore[reportOptionalSubscript]
            return row
    return None


@contextlib.contextmanager
def noted() -> Iterator[list[Draw]]:
    """Within it, on this thread, draws are written down in the list that is given; those that are compiled are not."""
    before, _running.notes = _running.notes, []
    try:
        yield _running.notes
    finally:
        _running.notes = before


@contextlib.contextmanager
def supplied(rows: Row) -> Iterator[None]:
    """Within it, on this thread, draws take these rows, each once; when none is left that fits, fresh numbers.

    Args:
        rows: numbers and their kinds, as :meth:`StepDraws.rows` gives them.
    """
    supply = _supply()
    before = supply.rows
    supply.rows = list(rows)
    try:
        yield
    finally:
        supply.rows = before


class StepDraws:
    """Random numbers of the steps of a loop, drawn for many steps at once into static memory.

    Which numbers a step gets depends on the draws, the number of steps and the device's generator, not on whether the
    loop runs eagerly, compiled or as a graph.

    Args:
        draws: of one step, in their order; none for a loop that draws nothing.
        steps: of the loop.
        device: of the numbers.
        limit: bytes that are drawn ahead at the most, one step at the least.

    Attributes:
        block: steps that are drawn at once.
    """

    def __init__(self, draws: Sequence[Draw], steps: int, device: torch.device, limit: int = LIMIT) -> None:
        spans: dict[tuple[Kind, torch.dtype], int] = {}
        starts = []
        for kind, shape, dtype in draws:
            unit = ALIGNMENT // dtype.itemsize
            start = spans.get((kind, dtype), 0)
            starts.append(start)
            spans[kind, dtype] = start + -(-math.prod(shape) // unit) * unit
        bytes_of_step = sum(width * dtype.itemsize for (_, dtype), width in spans.items())
        self.block = max(1, min(steps, limit // max(1, bytes_of_step)))
        self._numbers = {of: torch.zeros(self.block, width, dtype=of[1], device=device) for of, width in spans.items()}
        self._rows: list[Row] = [
            [
                (kind, self._numbers[kind, dtype][step, start : start + math.prod(shape)].view(shape))
                for start, (kind, shape, dtype) in zip(starts, draws, strict=True)
            ]
            for step in range(self.block)
        ]

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def rows(self, step: int) -> Row:
        """Numbers of a step, for :func:`supplied`; the first step of a block draws those of all."""
        place = step % self.block
        if place == 0:
            for (kind, _), numbers in self._numbers.items():
                numbers.uniform_() if kind == "uniform" else numbers.normal_()
        return self._rows[place]
