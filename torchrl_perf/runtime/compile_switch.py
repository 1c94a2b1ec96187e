"""Functions of a loop that run as they are at first and are compiled later, so that it starts without the compiler."""

import logging
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

import torch

from torchrl_perf.runtime.capture import Captured, CaptureError
from torchrl_perf.runtime.oom import first_line, is_out_of_memory
from torchrl_perf.runtime.timing import Stopwatch

__all__ = ["CompileSwitch"]

T = TypeVar("T")
logger = logging.getLogger("torchrl_perf")

NOTE = "compiled_from"
"""Key of a run's notes: the iteration in which kernels had to be compiled early."""


class CompileSwitch:
    """Decides by the number of an iteration whether the functions of a loop are compiled.

    A CUDA graph of eager kernels is recorded within a second; compiled ones are faster, after tens of seconds. Both
    calculate the same up to rounding, so a run's numbers depend on the iteration in which they change. It is the number
    of the iteration that decides, and no clock: a run and its resumption change in the same one. The change goes both
    ways, for a loop that loads an earlier state.

    Args:
        compile: makes a compiled function, such as ``Acceleration.compile``; None never compiles.
        at: the iteration, counted from 0, from which on functions are compiled; 0 compiles from the start, and None
            only what cannot be recorded otherwise.
        may_go_on: what the compiler refuses stays as it is, with a warning, and what cannot be recorded as it is gets
            compiled. Otherwise both are errors.

    Attributes:
        at: as given.
        on: whether functions are compiled now.
    """

    def __init__(
        self, compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None, *, at: int | None, may_go_on: bool
    ) -> None:
        self._compile, self.at, self._may_go_on = compile, at, may_go_on
        self.on = compile is not None and at == 0
        self._functions: list[_Switched] = []
        self._followers: list[Callable[[bool], None]] = []
        self._iteration, self._notes = 0, {}
        self._began: tuple[int, Stopwatch] | None = None

    @property
    def changes(self) -> bool:
        """Whether functions may be compiled later than at the start."""
        return self._compile is not None and self.at != 0

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, compiled while :attr:`on`."""
        if self._compile is None:
            return fn
        if self.at == 0:
            return self._compile(fn)
        switched = _Switched(fn, self._compile, self._may_go_on)
        self._functions.append(switched)
        return switched

    def follow(self, change: Callable[[bool], None]) -> None:
        """Has ``change(on)`` called whenever :attr:`on` changes."""
        self._followers.append(change)

    def settle(self, iteration: int, notes: MutableMapping[str, Any], *captured: Any) -> None:
        """Before an iteration: compiled functions or not, as its number says.

        Args:
            iteration: iterations done.
            notes: plain values that are saved with the state of the loop.
            *captured: what is recorded anew after a change; what is not ``Captured`` is left alone.
        """
        if not self.changes:
            return
        self._iteration, self._notes = iteration, notes
        at = notes.get(NOTE, self.at)
        on = at is not None and iteration >= at
        if on != self.on:
            self._turn(on)
            for fn in captured:
                if isinstance(fn, Captured):
                    fn.restart()
        elif self._began is not None and all(_is_recorded(fn) for fn in captured):
            first, watch = self._began
            self._began = None
            watch.stop()
            logger.warning(
                "iteration %d: compiled kernels from here on, for which the run waited %.1f s.",
                *(first + 1, watch.host_seconds),
            )

    def call(self, run: Callable[..., T], fn: Callable[..., Any], *args: Any) -> T:
        """``run(fn, *args)``; what cannot be recorded as it is gets compiled, if that is allowed.

        Args:
            run: calls what it is given, such as ``MicroBatches.call``.
            fn: what ``capture`` returned, or any function.
            *args: its arguments.

        Raises:
            CaptureError: if it cannot be recorded compiled either.
        """
        try:
            return run(fn, *args)
        except CaptureError as error:
            if self.on or not (self.changes and self._may_go_on) or is_out_of_memory(error):
                raise
            reason = first_line(error.__cause__ or error)
        logger.warning(
            "iteration %d: kernels are compiled at once, since eager ones cannot be recorded (%s).",
            *(self._iteration + 1, reason.rstrip(".")),
        )
        self._notes[NOTE] = self._iteration
        self.settle(self._iteration, self._notes, fn)
        return run(fn, *args)

    def _turn(self, on: bool) -> None:
        self.on = on
        self._began = (self._iteration, Stopwatch("cpu").start()) if on else None
        for switched in self._functions:
            switched.turn(on)
        for change in self._followers:
            change(on)


class _Switched:
    """A function, compiled or not."""

    def __init__(
        self, fn: Callable[..., Any], compile: Callable[[Callable[..., Any]], Callable[..., Any]], may_go_on: bool
    ) -> None:
        self._plain, self._compile, self._may_go_on = fn, compile, may_go_on
        self._fast: Callable[..., Any] | None = None
        self._now = fn

    def turn(self, on: bool) -> None:
        # made no earlier: even the wrapper of torch.compile imports the compiler
        if on and self._fast is None:
            self._fast = self._compile(self._plain)
        self._now = self._fast if on and self._fast is not None else self._plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._now is self._plain or not self._may_go_on:
            return self._now(*args, **kwargs)
        try:
            return self._now(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:  # before anything has been computed
            name = getattr(self._plain, "__qualname__", type(self._plain).__name__)
            logger.warning("%s is not compiled, since the compiler refuses it: %s", name, first_line(error))
            self._fast = self._now = self._plain
        return self._now(*args, **kwargs)


def _is_recorded(fn: Any) -> bool:
    return not isinstance(fn, Captured) or fn.device.type != "cuda" or fn.captured
