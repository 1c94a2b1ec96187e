"""Robots on MuJoCo Warp: any MuJoCo model, and Gymnasium's tasks of version 5, inside the captured iteration."""

from torchrl_perf.envs.mujoco.env import MuJoCoEnv
from torchrl_perf.envs.mujoco.gymnasium_task import GymnasiumTask
from torchrl_perf.envs.mujoco.locomotion import Ant, HalfCheetah, Hopper, Humanoid, HumanoidStandup, Swimmer, Walker2d
from torchrl_perf.envs.mujoco.manipulation import InvertedDoublePendulum, InvertedPendulum, Pusher, Reacher
from torchrl_perf.envs.mujoco.models import PhysicsSettings

__all__ = [
    "Ant",
    "GymnasiumTask",
    "HalfCheetah",
    "Hopper",
    "Humanoid",
    "HumanoidStandup",
    "InvertedDoublePendulum",
    "InvertedPendulum",
    "MuJoCoEnv",
    "PhysicsSettings",
    "Pusher",
    "Reacher",
    "Swimmer",
    "Walker2d",
]
