"""Where a process runs: by what ranks know which of them are on one host, and whether one is still there."""

import contextlib
import os
import socket
from pathlib import Path
from typing import NamedTuple

__all__ = ["Place", "began", "own_place"]


class Place(NamedTuple):
    """Where a rank runs."""

    host: str
    pid: int
    started: str
    """When its process began, which another one of the same number did not; empty where the host does not tell."""
    kernel: str
    """Of which the number of the process is: host names may be alike."""


def own_place() -> Place:
    """Where this process runs."""
    kernel = ""
    with contextlib.suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return Place(socket.gethostname(), os.getpid(), began(os.getpid()) if kernel else "", kernel)


def began(pid: int) -> str:
    """When a process of this host began, in the kernel's ticks; empty for one that is not there, and for a corpse."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
