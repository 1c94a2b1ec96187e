"""The checks of a machine before a run, all of them."""

from typing import Any

from torchrl_perf.runtime.doctor.checks import Check, run_checks
from torchrl_perf.runtime.doctor.device import device_probes
from torchrl_perf.runtime.doctor.host import host_probes
from torchrl_perf.runtime.doctor.software import software_probes

__all__ = ["check_machine"]


def check_machine(run_dir: str = "runs", device: Any = "cuda") -> list[Check]:
    """Look at the software, the GPU and the host that a run would have.

    Never raises. On CUDA it makes a context, captures a tiny graph and pins a block of memory; all are let go again.

    Args:
        run_dir: folder that runs would be written to; need not exist, and is not made.
        device: CUDA device to look at; where there is no CUDA its checks do not apply.

    Returns:
        The checks, software first.
    """
    return run_checks({**software_probes(), **device_probes(device), **host_probes(run_dir)})
