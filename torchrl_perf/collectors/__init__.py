"""Collectors whose rollouts stay on the device."""

from torchrl_perf.collectors.device_collector import DeviceCollector

__all__ = ["DeviceCollector"]
