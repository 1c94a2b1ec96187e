"""Collectors: rollouts that stay on the device, and of gymnasium's vector envs, which step on the host.

What needs gymnasium is imported at its first use: importing gymnasium changes the warning filters of the process.
"""

from typing import TYPE_CHECKING, Any

from torchrl_perf.collectors.device_collector import DeviceCollector
from torchrl_perf.collectors.host_faults import HostEnvError, ignore_interrupts

if TYPE_CHECKING:
    from torchrl_perf.collectors.host_collector import HostCollector
    from torchrl_perf.collectors.host_spaces import HostSpecs, host_specs

__all__ = ["DeviceCollector", "HostCollector", "HostEnvError", "HostSpecs", "host_specs", "ignore_interrupts"]

_LAZY = {"HostCollector": "host_collector", "HostSpecs": "host_spaces", "host_specs": "host_spaces"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
