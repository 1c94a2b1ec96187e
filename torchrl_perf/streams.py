"""Standard output and error of a process that trains: their failure never ends a run."""

import contextlib
import os
import sys
from typing import TextIO

__all__ = ["keep_standard_files", "say"]


def say(text: str, stream: TextIO | None = None, *, end: str = "\n") -> bool:
    """Write a line at once; a stream that is closed, full or gone is not used again.

    Args:
        text: what to write.
        stream: where; standard error by default.
        end: what follows it.

    Returns:
        Whether it was written.
    """
    stream = sys.stderr if stream is None else stream
    if stream is None:  # closed before the process began
        return False
    try:
        stream.write(text + end)
        stream.flush()
    except (OSError, ValueError):
        _leave(stream)
        return False
    return True


def keep_standard_files() -> None:
    """Open the null device in the place of standard files that the process was started without.

    Otherwise the next file that is opened, such as a checkpoint, would get their number, and receive what libraries
    print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _leave(stream: TextIO) -> None:
    """Discard the buffer of a stream, which would fail again when the process ends and change its exit code."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
