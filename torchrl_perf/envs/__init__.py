"""Batched environments in tensors: the auto-reset base and Gymnasium's classic-control tasks and toy tasks."""

from torchrl_perf.envs.classic_control import Acrobot, CartPole, MountainCar, MountainCarContinuous, Pendulum
from torchrl_perf.envs.device_env import DeviceEnv
from torchrl_perf.envs.toy import Ferry, HybridTarget

__all__ = [
    "Acrobot",
    "CartPole",
    "DeviceEnv",
    "Ferry",
    "HybridTarget",
    "MountainCar",
    "MountainCarContinuous",
    "Pendulum",
]
