"""Policy modules and distributions without host waits."""

from torchrl_perf.modules.actor import DeviceActor
from torchrl_perf.modules.deterministic import DeterministicActor
from torchrl_perf.modules.distributions import GumbelCategorical
from torchrl_perf.modules.encoders.cnn import ConvLayer, ConvNet
from torchrl_perf.modules.encoders.joined import JoinedInputs
from torchrl_perf.modules.encoders.node_encoder import NodeEncoder
from torchrl_perf.modules.encoders.set_encoder import SetEncoder
from torchrl_perf.modules.encoders.window_encoder import WindowEncoder
from torchrl_perf.modules.ensemble import EnsembleMLP, EnsembleQ
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.hybrid import BoundedNormal, DeviceMaskedCategorical, DiagonalNormal, HybridDistribution
from torchrl_perf.modules.hybrid_actor import EnsembleHybridQ, HybridActor, hybrid_features
from torchrl_perf.modules.icem import ICEMPlanner, ICEMSettings
from torchrl_perf.modules.icm import ICM
from torchrl_perf.modules.memory.recurrent import LRU, DeviceGRU, DeviceLSTM, MinGRU
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.modules.mlp import FusedMLP
from torchrl_perf.modules.multi_categorical import IndependentCategoricals
from torchrl_perf.modules.noise import GaussianNoise, OUNoise
from torchrl_perf.modules.noisy import NoisyLinear
from torchrl_perf.modules.normalization import (
    DiscountedReturnNormalization,
    EmpiricalNormalization,
    NormalizedCritic,
)
from torchrl_perf.modules.option_actor import OptionActor, OptionConditioned, OptionNormal, OptionPolicy
from torchrl_perf.modules.option_set import OptionSet, TimeHazard
from torchrl_perf.modules.options import OptionChoice, OptionController
from torchrl_perf.modules.squashed_normal import SquashedNormal, SquashedNormalHead
from torchrl_perf.modules.values.categorical_q import CategoricalMLP
from torchrl_perf.modules.values.component_values import ComponentValues
from torchrl_perf.modules.values.conv_q import ConvQMap
from torchrl_perf.modules.values.q_networks import DuelingMLP
from torchrl_perf.modules.values.quantile import ImplicitQuantileCritic, ImplicitQuantileMLP, QuantileMLP
from torchrl_perf.moved import moved_from as _moved_from

__all__ = [
    "ICM",
    "LRU",
    "BoundedNormal",
    "CategoricalMLP",
    "ComponentValues",
    "ConvLayer",
    "ConvNet",
    "ConvQMap",
    "DeterministicActor",
    "DeviceActor",
    "DeviceGRU",
    "DeviceLSTM",
    "DeviceMaskedCategorical",
    "DiagonalNormal",
    "DiscountedReturnNormalization",
    "DuelingMLP",
    "EmpiricalNormalization",
    "EnsembleHybridQ",
    "EnsembleMLP",
    "EnsembleQ",
    "EpsilonGreedy",
    "FusedMLP",
    "GaussianNoise",
    "GumbelCategorical",
    "HybridActor",
    "HybridDistribution",
    "ICEMPlanner",
    "ICEMSettings",
    "ImplicitQuantileCritic",
    "ImplicitQuantileMLP",
    "IndependentCategoricals",
    "JoinedInputs",
    "MinGRU",
    "MixedSequential",
    "NodeEncoder",
    "NoisyLinear",
    "NormalizedCritic",
    "OUNoise",
    "OptionActor",
    "OptionChoice",
    "OptionConditioned",
    "OptionController",
    "OptionNormal",
    "OptionPolicy",
    "OptionSet",
    "QuantileMLP",
    "SetEncoder",
    "SquashedNormal",
    "SquashedNormalHead",
    "TimeHazard",
    "WindowEncoder",
    "hybrid_features",
]

__getattr__ = _moved_from(__name__)
