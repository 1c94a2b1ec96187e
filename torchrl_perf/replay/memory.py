"""Memory of a storage: checked and announced before it is allocated."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from torchrl_perf.runtime.cgroup import memory_left

logger = logging.getLogger("torchrl_perf")

UNITS = ("B", "kB", "MB", "GB", "TB")


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on ``device`` now: free memory, and unused memory of torch's allocator.

    On a CPU, at most what the process's container or job may still use.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    left = memory_left()
    return free if left is None else min(free, left)


def readable(count: float) -> str:
    """``count`` bytes with a unit: ``readable(3.1e9)`` is "3.10 GB"."""
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} {UNITS[-1]}"


def reserve(needed: int, device: torch.device, what: str, remedy: str) -> None:
    """Refuse an allocation that cannot fit, and announce one that can (logger "torchrl_perf", level info).

    Args:
        needed: bytes that are about to be allocated.
        device: where.
        what: beginning of the message ("DeviceStorage: 1000000 rows").
        remedy: how to need less; the message adds "or another device".

    Raises:
        ValueError: with the bytes needed and the bytes available.
    """
    free = available_bytes(device)
    if needed > free:
        raise ValueError(
            f"{what}: expected {readable(needed)} ({needed} bytes) free on {device}, received {readable(free)} "
            f"({free} bytes). Remedy: {remedy}, or another device."
        )
    logger.info("%s take %s on %s (%s free)", what, readable(needed), device, readable(free))
