"""The host waits of a whole script and the steps of its loop, counted while it runs as it is."""

import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from multiprocessing.process import BaseProcess
from types import ModuleType, TracebackType
from typing import Any, Self

from torchrl_perf.runtime.waits.audit_report import AuditReport, WaitRow
from torchrl_perf.runtime.waits.interception import Heard, Interception, replace
from torchrl_perf.runtime.waits.loop_marks import Counts, LoopMarks, on_import
from torchrl_perf.runtime.waits.sites import Place, Places

__all__ = ["ScriptAudit"]


@dataclass
class _Tally:
    """What is counted of one place."""

    place: Place
    waits: bool
    first_mark: int  # how far the loop was when it happened first
    count: int = 0
    warm: int = 0  # of the warm-up of captured functions, not in count
    seconds: float = 0.0
    snapshots: dict[str, tuple[int, float]] = field(default_factory=dict)


class ScriptAudit:
    """Context that audits the process: counts waits by place and the steps of the loop.

    Args:
        script: path of the script, whose folder is taken for its own code.
        cuda: True measures CUDA, False counts on CPU tensors.
        max_steps: see ``LoopMarks``.
        max_iterations: see ``LoopMarks``.
    """

    def __init__(
        self, script: str, *, cuda: bool, max_steps: int | None = None, max_iterations: int | None = None
    ) -> None:
        self._cuda = cuda
        self._places = Places(script, cuda=cuda)
        self._tallies: dict[int, _Tally] = {}
        self._bases: dict[str, Counts] = {}
        self._lock = threading.Lock()
        self._marks = LoopMarks(self._first, max_steps=max_steps, max_iterations=max_iterations)
        self._hearing = Interception(self._hear, cuda=cuda)
        self._processes = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._stack = stack
            replace(stack, BaseProcess, "start", self._counted_start)
            stack.enter_context(self._hearing)
            stack.enter_context(on_import({"tensordict.base": [self._wrap_tensordict]}))
            stack.enter_context(self._marks)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _wrap_tensordict(self, module: ModuleType) -> None:
        replace(self._stack, module.TensorDictBase, "cpu", self._hearing.counted_copy)

    def _hear(self, heard: Heard) -> None:
        place = self._places.find(heard.op, sys._getframe(1))
        if place is None:
            return
        with self._lock:
            tally = self._tallies.get(id(place))
            if tally is None:
                waits = heard.waits and not place.planned
                tally = self._tallies[id(place)] = _Tally(place, waits, self._marks.marks)
            if self._marks.warming:
                tally.warm += 1
                return
            tally.count += 1
            tally.seconds += heard.seconds

    def _first(self, kind: str) -> None:
        """Remember how things stood when the loop began; an env that is checked first does not begin it."""
        self._hearing.rearm()
        with self._lock:
            self._bases[kind] = self._marks.counts
            for tally in self._tallies.values():
                tally.snapshots[kind] = tally.count, tally.seconds

    def _counted_start(self, original: Any) -> Any:
        @wraps(original)
        def start(process: Any) -> Any:
            self._processes += 1
            return original(process)

        return start

    def report(self, seconds: float = 0.0) -> AuditReport:
        """What has been counted so far.

        Args:
            seconds: wall time of the script.
        """
        with self._lock:
            total, marks = self._marks.counts, self._marks.marks
            begin = next((kind for kind in ("iterations", "env_steps", "optimizer_steps") if kind in self._bases), "")
            base = self._bases.get(begin, Counts())
            counts = Counts(*(now - then for now, then in zip(total, base, strict=True)))
            ends = marks >= 2 and counts.iterations != 1
            rows = [self._row(tally, begin, ends and tally.first_mark == marks) for tally in self._tallies.values()]
        rows.sort(key=lambda row: (-row.seconds, -row.count, -row.before, -row.after))
        return AuditReport(tuple(rows), counts, self._cuda, self._processes, seconds)

    @staticmethod
    def _row(tally: _Tally, begin: str, after: bool) -> WaitRow:
        before, earlier = tally.snapshots.get(begin, (0, 0.0))
        if not begin:  # no loop was seen: all of it is the run
            before, after = 0, False
        count = tally.count - before
        return WaitRow(
            tally.place,
            tally.waits,
            count=0 if after else count,
            before=before + tally.warm,
            after=count if after else 0,
            seconds=0.0 if after else tally.seconds - earlier,
        )
