"""How the monitor shows a run: the lines of a snapshot, as plain text or as a panel of rich."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.panel import Panel

__all__ = ["Line", "as_panel", "as_text", "bar", "describe", "sparkline"]

LABEL_WIDTH = 14
BAR_WIDTH = 20
LEAST_WIDTH_OF_BARS = 80
SPARKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow", "failed": "red", "killed": "red"}


class Line(NamedTuple):
    """One line of the screen."""

    label: str
    """What it is about."""
    text: str
    """What there is to say."""
    share: float | None = None
    """From 0 to 1, drawn as a bar."""
    curve: Sequence[float] = ()
    """Values over the latest rows, drawn as a sparkline."""
    is_alarm: bool = False
    """Whether it is a reason to look closer."""


def describe(snapshot: dict[str, Any]) -> list[Line]:
    """The lines that describe a snapshot; unknown values are left out.

    Args:
        snapshot: as the monitor makes it, and prints it with ``--json``.
    """
    return [*_progress(snapshot), *_phases(snapshot), *_gpu(snapshot), *_memory(snapshot), *_safety(snapshot)]


def _progress(snapshot: dict[str, Any]) -> list[Line]:
    step, total, left = snapshot["step"], snapshot["total_steps"], snapshot["seconds_left"]
    if step is None:
        lines = [Line("steps", "no row yet")]
    else:
        text = f"{step:,.0f}" + (f" of {total:,.0f}" if total else "")
        text += f", {duration(left)} left" if left is not None and snapshot["state"] in ("running", "unknown") else ""
        lines = [Line("steps", text, min(step / total, 1.0) if total else None)]
    curves = snapshot["curves"]
    for label, key, digits in (("steps/s", "steps_per_second", 0), ("experiences/s", "experiences_per_second", 0),
                               ("return", "mean_return", 1)):  # fmt: skip
        if snapshot[key] is not None:
            lines.append(Line(label, f"{snapshot[key]:,.{digits}f}", curve=curves.get(key, ())))
    return lines


def _phases(snapshot: dict[str, Any]) -> list[Line]:
    shares = sorted(snapshot["phases"].items(), key=lambda pair: (pair[0] == "other", -pair[1]))
    return [Line("time" if index == 0 else "", f"{name} {share:.0%}", min(share, 1.0))
            for index, (name, share) in enumerate(shares)]  # fmt: skip


def _gpu(snapshot: dict[str, Any]) -> list[Line]:
    gpu = snapshot["gpu"]
    parts = [f"{gpu['utilization']:.0f} %"] if "utilization" in gpu else []
    parts += [f"{gpu['temperature_c']:.0f} °C"] if "temperature_c" in gpu else []
    parts += [f"{gpu['power_w']:.0f} W"] if "power_w" in gpu else []
    lines = [Line("GPU", ", ".join(parts), gpu["utilization"] / 100 if "utilization" in gpu else None)] if parts else []
    if "memory_used_mib" in gpu:
        used, total = gpu["memory_used_mib"], gpu.get("memory_total_mib")
        text = f"{used:,.0f}" + (f" of {total:,.0f} MiB" if total else " MiB")
        lines.append(Line("VRAM", text, used / total if total else None))
    return lines


def _memory(snapshot: dict[str, Any]) -> list[Line]:
    memory = snapshot["memory"]
    names = {
        "allocated_mib": "allocated",
        "reserved_mib": "reserved",
        "peak_mib": "peak",
        "rss_mib": "process",
        "heap_mib": "heap",
    }
    parts = [f"{word} {memory[name]:,.0f}" for name, word in names.items() if name in memory]
    return [Line("memory", f"{', '.join(parts)} MiB")] if parts else []


def _safety(snapshot: dict[str, Any]) -> list[Line]:
    name, age = snapshot["checkpoint"], snapshot["checkpoint_age"]
    lines = [Line("checkpoint", "none yet" if name is None else f"{name}, {duration(age)} ago")]
    if snapshot["row_age"] is not None:
        lines.append(Line("last row", f"{duration(snapshot['row_age'])} ago"))
    if snapshot["nonfinite"]:
        counts = ", ".join(f"{count:,.0f} in {key}" for key, count in snapshot["nonfinite"].items())
        lines.append(Line("not finite", counts, is_alarm=True))
    if snapshot["first_bad_iteration"] is not None:
        lines.append(Line("first bad", f"in iteration {snapshot['first_bad_iteration']:.0f}", is_alarm=True))
    return lines


def duration(seconds: float) -> str:
    """A time span in whole seconds, such as ``0:01:07`` or ``2 days, 3:00:00``."""
    return str(timedelta(seconds=round(max(0.0, seconds))))


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of small columns, from the lowest to the highest; level where all are alike."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return SPARKS[len(SPARKS) // 2] * len(values)
    return "".join(SPARKS[round((value - low) / (high - low) * (len(SPARKS) - 1))] for value in values)


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A share from 0 to 1 as a bar of ``width`` characters."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)


def _drawing(line: Line) -> str:
    return bar(line.share) if line.share is not None else sparkline(line.curve[-BAR_WIDTH:])


def title(snapshot: dict[str, Any]) -> str:
    """Name, state and process of the run."""
    process = f", process {snapshot['pid']}" if snapshot["pid"] is not None and snapshot["state"] == "running" else ""
    return f"{snapshot['name']}: {snapshot['state']}{process}"


def as_text(snapshot: dict[str, Any]) -> str:
    """The snapshot as plain lines, a heading first."""
    lines = describe(snapshot)
    width = max(len(line.text) for line in lines)
    rows = [f"  {line.label:<{LABEL_WIDTH}}{line.text:<{width}}  {_drawing(line)}".rstrip() for line in lines]
    return "\n".join([title(snapshot), *rows])


def as_panel(snapshot: dict[str, Any], width: int = 100) -> Panel:
    """The snapshot as a panel of rich.

    Args:
        snapshot: as the monitor makes it.
        width: columns of the terminal; a narrow one gets no bars.
    """
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), expand=False)
    table.add_column(min_width=LABEL_WIDTH, no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True)
    for line in describe(snapshot):
        cells = [Text(line.label, "dim"), Text(line.text, "bold red" if line.is_alarm else "")]
        table.add_row(*cells, *([Text(_drawing(line), "cyan")] if width >= LEAST_WIDTH_OF_BARS else []))
    # Text, not markup: a folder may have brackets in its name.
    heading = Text(title(snapshot), STATE_STYLES.get(snapshot["state"], ""))
    return Panel(table, title=heading, title_align="left", expand=False)
