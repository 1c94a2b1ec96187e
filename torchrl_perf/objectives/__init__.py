"""Losses that do not wait for the host."""

from torchrl_perf.moved import moved_from as _moved_from
from torchrl_perf.objectives.ac_iqn import ACIQNLoss
from torchrl_perf.objectives.c51 import DeviceC51Loss
from torchrl_perf.objectives.dqn import DeviceDQNLoss
from torchrl_perf.objectives.hybrid_sac import HybridSACLoss
from torchrl_perf.objectives.icm import ICMLoss
from torchrl_perf.objectives.options import OptionLoss
from torchrl_perf.objectives.ppo import DeviceClipPPOLoss, DeviceKLPENPPOLoss
from torchrl_perf.objectives.quantile import QuantileDQNLoss
from torchrl_perf.objectives.sac import DeviceSACLoss
from torchrl_perf.objectives.target_updates import DeviceHardUpdate, DeviceSoftUpdate
from torchrl_perf.objectives.td3 import DeviceTD3Loss

__all__ = [
    "ACIQNLoss",
    "DeviceC51Loss",
    "DeviceClipPPOLoss",
    "DeviceDQNLoss",
    "DeviceHardUpdate",
    "DeviceKLPENPPOLoss",
    "DeviceSACLoss",
    "DeviceSoftUpdate",
    "DeviceTD3Loss",
    "HybridSACLoss",
    "ICMLoss",
    "OptionLoss",
    "QuantileDQNLoss",
]

__getattr__ = _moved_from(__name__)
