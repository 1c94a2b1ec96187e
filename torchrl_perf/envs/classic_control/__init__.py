"""Gymnasium's five classic-control tasks, each for any number of envs on any device."""

from torchrl_perf.envs.classic_control.acrobot import Acrobot
from torchrl_perf.envs.classic_control.cartpole import CartPole
from torchrl_perf.envs.classic_control.mountain_car import MountainCar
from torchrl_perf.envs.classic_control.mountain_car_continuous import MountainCarContinuous
from torchrl_perf.envs.classic_control.pendulum import Pendulum

__all__ = ["Acrobot", "CartPole", "MountainCar", "MountainCarContinuous", "Pendulum"]
