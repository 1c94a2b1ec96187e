"""The machine card: the hardware and software that a figure was measured with."""

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torchrl_perf.runtime.nvml import GpuReader, visible_id
from torchrl_perf.runtime.redact import redact_command

__all__ = ["machine_card"]

PACKAGES = ("torch", "torchrl", "tensordict", "triton", "gymnasium", "numpy", "jax", "torchrl_perf")


def machine_card() -> dict[str, Any]:
    """Describe the machine, the software and the command, ready for ``json.dumps``.

    Never raises and imports none of the packages it names; unknown entries are None.

    Returns:
        command, commit, dirty (uncommitted changes), date (UTC, ISO 8601), gpu, gpus (number), gpu_memory_gib,
        power_limit_w, driver, cuda, cpu, cores (usable by this process), ram_gib, os, python, packages (name to
        version), tf32 (matmul precision and the two flags), threads.
    """
    return {
        "command": " ".join(redact_command(sys.argv)) or None,
        # for a copy without git history, CI systems give the commit in the environment
        "commit": _or_none(_commit),
        "dirty": _or_none(_dirty),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **_gpu(),
        "cuda": torch.version.cuda,
        "cpu": _or_none(_cpu_model),
        "cores": _or_none(_cores),
        "ram_gib": _or_none(lambda: round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)),
        "os": _or_none(platform.platform),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "tf32": _tf32(),
        "threads": _or_none(torch.get_num_threads),
    }


def _commit() -> str | None:
    return _run("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD") or os.environ.get("GIT_COMMIT")


def _or_none(probe: Callable[[], Any]) -> Any:
    """Return the result of a probe, or None if it fails in any way: a card with a gap is better than none."""
    with suppress(Exception):
        return probe()
    return None


def _run(*command: str) -> str | None:
    """Return the trimmed output of a command, or None if it fails, prints nothing or takes longer than 10 s."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def _dirty() -> bool | None:
    folder = str(Path(__file__).parent)
    if _run("git", "-C", folder, "rev-parse", "HEAD") is None:
        return None
    return _run("git", "-C", folder, "status", "--porcelain") is not None


def _gpu() -> dict[str, Any]:
    card: dict[str, Any] = dict.fromkeys(("gpu", "gpus", "gpu_memory_gib", "power_limit_w", "driver"))
    with suppress(Exception):
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            card["gpu"] = properties.name
            card["gpus"] = torch.cuda.device_count()
            card["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
    with suppress(Exception):
        card.update(_nvml() or _nvidia_smi() or {})
    return card


def _nvml() -> dict[str, Any] | None:
    with GpuReader("cuda") as reader:
        facts = reader.facts()
    return {name: facts.get(name) for name in ("power_limit_w", "driver")} if facts else None


def _nvidia_smi() -> dict[str, Any] | None:
    query = ("--query-gpu=power.limit,driver_version", "--format=csv,noheader,nounits")
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    line = _run("nvidia-smi", f"--id={visible_id(index)}", *query)
    if line is None:
        return None
    power, driver = (part.strip() for part in line.splitlines()[0].split(","))
    return {"power_limit_w": _or_none(lambda: float(power)), "driver": driver}


def _cpu_model() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return _run("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or None


def _cores() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count()


def _version(name: str) -> str | None:
    with suppress(Exception):
        return importlib.metadata.version(name)
    return None


def _tf32() -> dict[str, Any]:
    return {
        "matmul_precision": _or_none(torch.get_float32_matmul_precision),
        "matmul": _or_none(lambda: torch.backends.cuda.matmul.allow_tf32),
        "cudnn": _or_none(lambda: torch.backends.cudnn.allow_tf32),
    }
