"""Collectors: rollouts that stay on the device, and of gymnasium's vector envs, which step on the host."""

from torchrl_perf.collectors.device_collector import DeviceCollector
from torchrl_perf.collectors.host_collector import HostCollector
from torchrl_perf.collectors.host_faults import HostEnvError, ignore_interrupts
from torchrl_perf.collectors.host_spaces import HostSpecs, host_specs

__all__ = ["DeviceCollector", "HostCollector", "HostEnvError", "HostSpecs", "host_specs", "ignore_interrupts"]
