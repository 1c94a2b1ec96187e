"""Checks of the host: cores and threads, memory, disk, and where the metrics will go."""

import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from torchrl_perf.runtime.cgroup import cpu_quota, memory_left
from torchrl_perf.runtime.doctor.checks import Finding
from torchrl_perf.runtime.wandb_key import has_wandb_key

__all__ = ["host_probes"]

GIB = 2**30
LITTLE_DISK_GIB, NO_DISK_GIB = 5.0, 0.5
LITTLE_RAM_GIB = 4.0


def host_probes(run_dir: str) -> dict[str, Callable[[], Finding]]:
    """The checks of this module, by name."""
    return {
        "CPU": _cpu,
        "memory": _memory,
        "disk": partial(_disk, run_dir),
        "W&B": _wandb,
    }


def usable_cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than its quota; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _cpu() -> Finding:
    import torch

    cores, threads, setting = usable_cores(), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    found = f"{cores} usable cores, {threads} torch threads, OMP_NUM_THREADS {setting or 'not set'}"
    if threads > cores:
        remedy = f"OMP_NUM_THREADS={cores} at most: threads that wait for a core slow a run several times."
        return Finding("warn", f"{found}.", remedy)
    if setting is None:
        # `torchrl-perf train` takes one thread by itself; a script of one's own does not.
        return Finding("ok", f"{found}; `torchrl-perf train` then takes 1, a script of your own takes all.")
    return Finding("ok", f"{found}.")


def _memory() -> Finding:
    fields: dict[str, float] = {}
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = float(value.split()[0]) * 1024 / GIB
    if "MemAvailable" not in fields:
        return Finding("n/a", "this system does not say how much memory is free.")
    available, left = fields["MemAvailable"], memory_left()
    found = f"{available:.1f} of {fields.get('MemTotal', math.nan):.1f} GiB available."
    if left is not None and left / GIB < available:  # beyond its limit a container's or job's processes are killed
        available = left / GIB
        found = f"{found.removesuffix('.')}, {available:.1f} GiB of them to this container or job."
    if available < LITTLE_RAM_GIB:
        return Finding("warn", found, "end other programs, or a smaller replay buffer and num_envs.")
    return Finding("ok", found)


def _disk(run_dir: str) -> Finding:
    """Space and permission at the run folder, or at the nearest folder above it that exists."""
    wanted = Path(run_dir).expanduser().absolute()
    place = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    if not place.is_dir():
        return Finding("fail", f"{place} is a file, expected a folder for runs.", "another --run-dir.")
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding("fail", f"{place} cannot be written to.", f"another --run-dir, or permissions of {place}.")
    free = shutil.disk_usage(place).free / GIB
    found = f"{free:.1f} GiB free at {place}."
    if free < NO_DISK_GIB:
        return Finding("fail", found, "free some space, or another --run-dir: checkpoints would not be written.")
    if free < LITTLE_DISK_GIB:
        return Finding("warn", found, "free some space, or a smaller keep_checkpoints.")
    return Finding("ok", found)


def _wandb() -> Finding:
    """What W&B would do here; the key itself is never read into the report."""
    import importlib.util

    if importlib.util.find_spec("wandb") is None:
        return Finding("warn", "wandb is not installed; --logger csv and tensorboard work.", "pip install wandb")
    mode, has_key = os.environ.get("WANDB_MODE"), has_wandb_key()
    key = "a key is set" if has_key else "no key"
    if mode is None:
        return Finding("ok", f"online, {key}." if has_key else f"offline, {key}; `wandb sync` can send runs later.")
    if mode not in ("online", "offline", "disabled", "shared", "dryrun", "run"):
        return Finding("warn", f"WANDB_MODE={mode!r} is no mode of W&B.", "online, offline or disabled.")
    if mode in ("online", "run", "shared") and not has_key:
        return Finding("warn", f"WANDB_MODE={mode}, {key}.", "`wandb login`, or WANDB_MODE=offline.")
    return Finding("ok", f"WANDB_MODE={mode}, {key}.")
