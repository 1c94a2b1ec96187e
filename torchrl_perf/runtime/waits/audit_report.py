"""The report of a script's audit: where it waited, how often and how long, and what to write instead."""

import os
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from torchrl_perf.runtime.waits.loop_marks import Counts
from torchrl_perf.runtime.waits.sites import Place

__all__ = ["SCHEMA_VERSION", "AuditReport", "WaitRow", "to_json", "to_text"]

SCHEMA_VERSION = 1
"""Version of what ``to_json`` returns; rises when a key changes its meaning or goes."""


@dataclass(frozen=True)
class WaitRow:
    """One operation at one pair of lines.

    Attributes:
        place: the lines, the operation, and what to write instead.
        waits: whether it counts as a wait; an asynchronous copy and a planned one do not.
        count: how often in the loop.
        before: how often before the first step of the loop, or while a captured function warmed up.
        after: how often after its last step, where it had never happened before.
        seconds: how long the host was blocked in the loop; 0 on CPU tensors.
    """

    place: Place
    waits: bool
    count: int
    before: int
    after: int
    seconds: float


@dataclass(frozen=True)
class AuditReport:
    """What a script waited for.

    Attributes:
        rows: by count, or by time where it was measured; largest first.
        counts: steps of the loop.
        cuda: whether CUDA was measured; otherwise CPU tensors stood in for it.
        processes: number of child processes that the script started, whose waits are not seen.
        seconds: wall time of the script.
    """

    rows: tuple[WaitRow, ...]
    counts: Counts
    cuda: bool
    processes: int
    seconds: float

    @property
    def total(self) -> int:
        """Number of waits in the loop; asynchronous copies are none."""
        return sum(row.count for row in self.rows if row.waits)

    @property
    def step_unit(self) -> str:
        """What a step is here: "env step", in a script without envs "optimizer step", in one without either "run"."""
        if self.counts.env_steps:
            return "env step"
        return "optimizer step" if self.counts.optimizer_steps else "run"

    @property
    def iteration_unit(self) -> str:
        """What an iteration is here: "iteration" of a collector or captured function, else "optimizer step", "run"."""
        if self.counts.iterations:
            return "iteration"
        return "optimizer step" if self.counts.optimizer_steps else "run"

    @property
    def steps(self) -> int:
        """Number of steps, at least 1."""
        return self.counts.env_steps or self.counts.optimizer_steps or 1

    @property
    def iterations(self) -> int:
        """Number of iterations, at least 1."""
        return self.counts.iterations or self.counts.optimizer_steps or 1

    @property
    def per_step(self) -> float:
        """Waits of the loop for each step."""
        return self.total / self.steps


def to_json(report: AuditReport) -> dict[str, Any]:
    """The report as plain data, see ``SCHEMA_VERSION``.

    Returns:
        ``version``, ``device``, ``stand_in``, ``seconds``, ``processes``, ``step`` and ``iteration`` (unit and
        number), ``counts``, ``waits`` (in the loop, before, after, per step, per iteration, seconds) and ``rows``.
    """
    rows = [
        {
            **asdict(row.place),
            "waits": row.waits,
            "count": row.count,
            "per_step": row.count / report.steps,
            "per_iteration": row.count / report.iterations,
            "before": row.before,
            "after": row.after,
            "seconds": row.seconds if report.cuda else None,
        }
        for row in report.rows
    ]
    waiting = [row for row in report.rows if row.waits]
    return {
        "version": SCHEMA_VERSION,
        "device": "cuda" if report.cuda else "cpu",
        "stand_in": not report.cuda,
        "seconds": report.seconds,
        "processes": report.processes,
        "step": {"unit": report.step_unit, "number": report.steps},
        "iteration": {"unit": report.iteration_unit, "number": report.iterations},
        "counts": report.counts._asdict(),
        "waits": {
            "loop": report.total,
            "before": sum(row.before for row in waiting),
            "after": sum(row.after for row in waiting),
            "per_step": report.per_step,
            "per_iteration": report.total / report.iterations,
            "seconds": sum(row.seconds for row in waiting) if report.cuda else None,
        },
        "rows": rows,
    }


def to_text(report: AuditReport, top: int = 20) -> str:
    """The report as a table: a line of the script, and the library's lines beneath it.

    Args:
        report: what to show.
        top: number of rows to show, the largest.
    """
    lines = _header(report)
    loop = [row for row in report.rows if row.count]
    shown = loop[:top]
    by_line: dict[tuple[str, int], list[WaitRow]] = defaultdict(list)
    for row in shown:
        by_line[row.place.file, row.place.line].append(row)
    for (file, line), rows in by_line.items():
        source = rows[0].place.source
        lines += ["", f"{_short(file)}:{line}  {source}"]
        for row in rows:
            lines += _row_lines(report, row)
    if len(loop) > len(shown):
        lines += ["", f"... and {len(loop) - len(shown)} rows more; --top {len(loop)} shows all."]
    return "\n".join(lines)


def _header(report: AuditReport) -> list[str]:
    if report.cuda:
        seconds = sum(row.seconds for row in report.rows if row.waits)
        lines = [f"measured on CUDA: the host was blocked for {seconds:.2f} s of {report.seconds:.1f} s"]
    else:
        missing = "times, copies but by cpu(), and what is computed from copies,"
        lines = [f"counted on CPU tensors as a stand-in for CUDA: {missing} need a GPU"]
    counts = report.counts
    lines.append(
        f"{counts.iterations} iterations, {counts.env_steps} env steps, {counts.optimizer_steps} optimizer steps; "
        f"below, a step is one {report.step_unit}, an iteration one {report.iteration_unit}"
        f"below, a step is one {report.step_unit}, an iteration one {report.iteration_unit}"
    )
    if report.processes:
        lines.append(f"{report.processes} child processes were started; what they wait for is not seen")
    waiting = [row for row in report.rows if row.waits]
    before, after = sum(row.before for row in waiting), sum(row.after for row in waiting)
    lines.append(
        f"{report.total} host waits in the loop: {report.per_step:.2f} per step, "
        f"{report.total / report.iterations:.2f} per iteration ({before} before it, {after} after it)"
    )
    return lines


_LABELS = {"_local_scalar_dense": "item/bool/int/float"}


def _row_lines(report: AuditReport, row: WaitRow) -> list[str]:
    place = row.place
    op = _LABELS.get(place.op, place.op)
    if not row.waits:
        op += " (planned, once an interval)" if place.planned else " (asynchronous)"
    text = f"  {row.count:>8}  {row.count / report.steps:>8.2f}/step  {row.count / report.iterations:>9.2f}/iter"
    if report.cuda:
        text += f"  {1e3 * row.seconds:>9.1f} ms"
    lines = [f"{text}  {op}"]
    if (place.library_file, place.library_line) != (place.file, place.line):
        lines.append(f"            in {_short(place.library_file)}:{place.library_line}  {place.library_source}")
    name = f" [{place.replacement}]" if place.replacement else ""
    lines.append(f"            -> {place.remedy}{name}")
    return lines


def _short(file: str) -> str:
    """A path below the packages' or the current folder, where it is below one."""
    for marker in ("site-packages", "dist-packages"):
        _, found, rest = file.rpartition(marker + os.sep)
        if found:
            return rest
    path = os.path.relpath(file) if os.path.isabs(file) else file
    return file if path.startswith("..") else path
