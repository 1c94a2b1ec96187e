"""Batched environments in tensors: the auto-reset base and Gymnasium's classic-control tasks."""

from torchrl_perf.envs.classic_control import Acrobot, CartPole, MountainCar, MountainCarContinuous, Pendulum
from torchrl_perf.envs.device_env import DeviceEnv

__all__ = ["Acrobot", "CartPole", "DeviceEnv", "MountainCar", "MountainCarContinuous", "Pendulum"]
