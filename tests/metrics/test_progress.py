"""The progress line: formatting, rewriting on a terminal, plain lines elsewhere."""

import io
import math

import pytest

from torchrl_perf.metrics import ProgressLine, format_progress
from torchrl_perf.metrics.progress import format_count, format_duration


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00 k"),
        (12_345, "12.3 k"),
        (999_600, "1.00 M"),
        (1_200_000, "1.20 M"),
        (28_100_000, "28.1 M"),
        (123_400_000, "123 M"),
        (2.5e9, "2.50 G"),
        (-1500, "-1.50 k"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_counts(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (6.2, "0:07"), (59.5, "1:00"), (3723, "1:02:03"), (-3, "0:00"), (math.inf, "-")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_line():
    line = format_progress(1_200_000, 10_000_000, mean_return=475.0, steps_per_second=1.2e6)
    assert line == "1.20 M / 10.0 M steps    12 %   return 475.0   1.20 M/s   0:08 left"


def test_line_before_the_first_episode_and_at_the_end():
    start = format_progress(0, 1000, mean_return=math.nan, steps_per_second=0.0)
    assert start == "0 / 1.00 k steps     0 %   return -   0/s   - left"
    assert " 99 %" in format_progress(999, 1000, mean_return=1.0, steps_per_second=1.0)
    assert "100 %" in format_progress(1001, 1000, mean_return=1.0, steps_per_second=1.0)
    assert "0:00 left" in format_progress(1001, 1000, mean_return=1.0, steps_per_second=1.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_line_is_rewritten_and_its_tail_wiped():
    stream = Terminal()
    progress = ProgressLine(1000, stream)
    progress.update(500, mean_return=-1234.5, steps_per_second=10.0)
    progress.update(1000, mean_return=1.0, steps_per_second=10.0)
    progress.close()
    progress.close()
    _, first, second = stream.getvalue().split("\r")
    assert stream.getvalue().count("\n") == 1
    assert len(second.rstrip("\n")) == len(first)


def test_plain_lines_elsewhere():
    stream = io.StringIO()
    progress = ProgressLine(1000, stream)
    for step in (500, 1000):
        progress.update(step, mean_return=1.0, steps_per_second=10.0)
    progress.close()
    lines = stream.getvalue().split("\n")
    assert len(lines) == 3
    assert lines[-1] == ""
    assert "\r" not in stream.getvalue()
