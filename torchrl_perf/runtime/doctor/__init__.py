"""All checks of a machine before a run."""

from typing import Any

from torchrl_perf.runtime.doctor.checks import Check, run_checks
from torchrl_perf.runtime.doctor.device import device_probes
from torchrl_perf.runtime.doctor.host import host_probes
from torchrl_perf.runtime.doctor.software import software_probes

__all__ = ["Check", "check_machine", "device_probes", "host_probes", "run_checks", "software_probes"]


def check_machine(run_dir: str = "runs", device: Any = "cuda") -> list[Check]:
    """Check the software, the GPU and the host that a run would use.

    Never raises. On CUDA it makes a context, captures a tiny graph and pins a block of memory, and releases them.

    Args:
        run_dir: folder that runs would be written to; need not exist, and is not made.
        device: CUDA device to look at; where there is no CUDA its checks do not apply.

    Returns:
        The checks, software first.
    """
    return run_checks({**software_probes(), **device_probes(device), **host_probes(run_dir)})
