"""Batched environments in tensors: the auto-reset bases, Gymnasium's classic-control tasks and toy tasks."""

from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.envs.auto_reset import AutoResetEnv
from torchrl_perf.envs.classic_control import Acrobot, CartPole, MountainCar, MountainCarContinuous, Pendulum
from torchrl_perf.envs.device_env import DeviceEnv
from torchrl_perf.envs.durotaxis import ColonyCurriculum, ColonySettings, Durotaxis
from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape
from torchrl_perf.envs.latent_field import LatentField
from torchrl_perf.envs.marine import Curriculum, MarineNavigation, scenario_set, scripted_action
from torchrl_perf.envs.market import MarketSettings, OptionMarket, RegimeSettings
from torchrl_perf.envs.partly_observed import (
    NoisyStatelessCartPole,
    NoisyStatelessPendulum,
    RepeatFirst,
    RepeatPrevious,
    StatelessCartPole,
    StatelessPendulum,
    TMaze,
)
from torchrl_perf.envs.registry import EnvEntry, register
from torchrl_perf.envs.simulator import SimulatorEnv
from torchrl_perf.envs.structured_env import EnvSpecs, StructuredEnv, Transition
from torchrl_perf.envs.toy import Ferry, HybridTarget
from torchrl_perf.envs.vmas import DeviceVmasEnv

__all__ = [
    "Acrobot",
    "AgentStreams",
    "AutoResetEnv",
    "CartPole",
    "ColonyCurriculum",
    "ColonySettings",
    "Curriculum",
    "DeviceEnv",
    "DeviceVmasEnv",
    "Durotaxis",
    "EnvEntry",
    "EnvSpecs",
    "Ferry",
    "FuelBreaks",
    "HybridTarget",
    "Landscape",
    "LatentField",
    "MarineNavigation",
    "MarketSettings",
    "MountainCar",
    "MountainCarContinuous",
    "NoisyStatelessCartPole",
    "NoisyStatelessPendulum",
    "OptionMarket",
    "Pendulum",
    "RegimeSettings",
    "RepeatFirst",
    "RepeatPrevious",
    "SimulatorEnv",
    "StatelessCartPole",
    "StatelessPendulum",
    "StructuredEnv",
    "TMaze",
    "Transition",
    "register",
    "scenario_set",
    "scripted_action",
]
