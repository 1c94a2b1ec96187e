"""Losses that do not wait for the host."""

from torchrl_perf.objectives.ppo import DeviceClipPPOLoss
from torchrl_perf.objectives.sac import DeviceSACLoss

__all__ = [
    "DeviceClipPPOLoss",
    "DeviceSACLoss",
]
