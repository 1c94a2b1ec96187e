"""Replay on the device: a ring of packed rows, samplers and the buffer around them, for TorchRL's ``ReplayBuffer``."""

from torchrl_perf.replay.buffer import DeviceReplayBuffer
from torchrl_perf.replay.epoch import DeviceSamplerWithoutReplacement
from torchrl_perf.replay.factory import make_replay_buffer
from torchrl_perf.replay.option_replay import OptionReplay
from torchrl_perf.replay.prioritized import DevicePrioritizedSampler
from torchrl_perf.replay.priority_tree import PriorityTree
from torchrl_perf.replay.random import DeviceRandomSampler
from torchrl_perf.replay.recent_window import BoundedHistory, RecentWindow
from torchrl_perf.replay.ring import Ring
from torchrl_perf.replay.slices import DeviceSliceSampler
from torchrl_perf.replay.storage import DeviceStorage
from torchrl_perf.replay.writer import DeviceWriter

__all__ = [
    "BoundedHistory",
    "DevicePrioritizedSampler",
    "DeviceRandomSampler",
    "DeviceReplayBuffer",
    "DeviceSamplerWithoutReplacement",
    "DeviceSliceSampler",
    "DeviceStorage",
    "DeviceWriter",
    "OptionReplay",
    "PriorityTree",
    "RecentWindow",
    "Ring",
    "make_replay_buffer",
]
