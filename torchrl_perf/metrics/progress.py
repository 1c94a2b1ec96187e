"""A progress line in the terminal."""

from __future__ import annotations

import math
import sys
from typing import TextIO

from torchrl_perf.streams import say

_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_count(value: float) -> str:
    """Write a number with three significant digits and a unit.

    Args:
        value: any number.

    Returns:
        For example ``"950"``, ``"12.3 k"``, ``"1.20 M"``; ``"-"`` if the value is not finite.
    """
    if not math.isfinite(value):
        return "-"
    for scale, unit in _UNITS:
        # 999.5 of a unit would round up to four digits.
        if abs(value) >= 0.9995 * scale:
            scaled = value / scale
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f} {unit}"
    return f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Write a time span as ``m:ss`` or ``h:mm:ss``, rounded up to whole seconds.

    Args:
        seconds: time in seconds.

    Returns:
        For example ``"0:07"`` or ``"1:02:03"``; ``"-"`` if it is not finite.
    """
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(math.ceil(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def format_progress(step: int, total: int, *, mean_return: float, steps_per_second: float) -> str:
    """Write the progress of a run as one line.

    Args:
        step: environment steps so far.
        total: environment steps of the whole run.
        mean_return: mean return of the latest finished episodes; NaN (none finished yet) is written as ``-``.
        steps_per_second: current speed in environment steps per second.

    Returns:
        For example ``"1.20 M / 10.0 M steps   12 %   return 475.0   1.20 M/s   0:08 left"``.
    """
    percent = 100 if step >= total else int(100 * step / total)
    left = (total - step) / steps_per_second if steps_per_second > 0 else math.inf
    score = f"{mean_return:.1f}" if math.isfinite(mean_return) else "-"
    return (
        f"{format_count(step)} / {format_count(total)} steps   {percent:3d} %   return {score}   "
        f"{format_count(steps_per_second)}/s   {format_duration(left)} left"
    )


class ProgressLine:
    """Shows ``format_progress`` while a run lasts: one line rewritten in place on a terminal, plain lines elsewhere.

    If the stream is closed or full, the run goes on and nothing more is shown.

    Args:
        total: environment steps of the whole run.
        stream: where to write; standard error by default, so that standard output stays clean for results.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total = total
        self.stream = sys.stderr if stream is None else stream
        try:
            self._rewrites = self.stream is not None and self.stream.isatty()
        except ValueError:  # it is closed
            self._rewrites = False
        self._width = 0

    def update(self, step: int, *, mean_return: float, steps_per_second: float) -> None:
        """Show the state of the run.

        Args:
            step: environment steps so far.
            mean_return: mean return of the latest finished episodes, NaN if none.
            steps_per_second: current speed.
        """
        line = format_progress(step, self.total, mean_return=mean_return, steps_per_second=steps_per_second)
        if self._rewrites:
            # Padding wipes the end of a longer line that was there before.
            say("\r" + line.ljust(self._width), self.stream, end="")
            self._width = len(line)
        else:
            say(line, self.stream)

    def close(self) -> None:
        """Leave the last line on the screen and move below it; more calls do nothing."""
        if self._width:
            say("", self.stream)
            self._width = 0
