"""Cores and memory that the container or job of this process may use, by its control group."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["cpu_quota", "memory_left"]

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NO_LIMIT = 2**60  # version 1 writes a number beyond it where there is no limit


def cpu_quota() -> float | None:
    """Cores that the group and those above it allow, by version 2 or 1; None without a quota."""
    quotas = []
    for folder in _folders(""):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas += [] if quota == "max" else [int(quota) / int(period)]
    for folder in _folders("cpu"):
        with suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            quotas += [quota_us / int((folder / "cpu.cfs_period_us").read_text())] if quota_us > 0 else []
    return min(quotas, default=None)


def memory_left() -> int | None:
    """Bytes that the group and those above it may still use, by version 2 or 1; None without a limit.

    File pages that the kernel can drop at any time count as free.
    """
    files = ("memory.max", "memory.current", "inactive_file")
    left = [_left(folder, *files) for folder in _folders("")]
    files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    left += [_left(folder, *files) for folder in _folders("memory")]
    return min((count for count in left if count is not None), default=None)


def _left(folder: Path, limit_file: str, used_file: str, droppable: str) -> int | None:
    with suppress(OSError, ValueError):
        limit = int((folder / limit_file).read_text())  # "max" without one
        if limit >= NO_LIMIT:
            return None
        used = int((folder / used_file).read_text())
        lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        dropped = next((int(value) for name, value in lines if name == droppable), 0)
        return max(0, limit - used + dropped)
    return None


def _folders(controller: str) -> Iterator[Path]:
    """The folder of the process's group and those above it.

    Args:
        controller: of version 1, such as "memory"; "" is version 2.
    """
    try:
        lines = [line.split(":", 2) for line in MEMBERSHIP.read_text().splitlines()]
    except OSError:
        return
    base = ROOT / controller if controller else ROOT
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controller in controllers.split(","):
            # in a container the path may be the host's, of which only the root is visible here
            folder = base / path.strip().lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each == base or base in each.parents)
