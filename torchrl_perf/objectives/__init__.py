"""Losses that do not wait for the host."""

from torchrl_perf.objectives.ppo import DeviceClipPPOLoss

__all__ = ["DeviceClipPPOLoss"]
