"""A colony of nodes on a stiffness gradient."""

from torchrl_perf.envs.durotaxis.durotaxis import Durotaxis
from torchrl_perf.envs.durotaxis.features import GRAPH_FEATURES, NODE_FEATURES
from torchrl_perf.envs.durotaxis.settings import ColonyCurriculum, ColonySettings

__all__ = ["GRAPH_FEATURES", "NODE_FEATURES", "ColonyCurriculum", "ColonySettings", "Durotaxis"]
