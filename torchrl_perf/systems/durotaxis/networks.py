"""Actor and critic of a colony, each with an encoder of nodes and graph, and heads."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.data import TensorSpec
from torchrl.modules import ValueOperator

from torchrl_perf.envs.durotaxis import Durotaxis
from torchrl_perf.modules import ComponentValues, FusedMLP, HybridActor, NodeEncoder
from torchrl_perf.modules.hybrid_actor import action_leaves, part_features
from torchrl_perf.systems.durotaxis.config import DurotaxisConfig

COLONY_KEYS: tuple[NestedKey, ...] = ("nodes", "node_mask", "graph")
"""What the encoder reads: ``[*, M, F]`` float, ``[*, M]`` bool, ``[*, G]`` float."""

LOG_SCALE_RANGE = (-4.0, 1.0)
"""Range for the normals before squashing: exp(-1.5) at the start, and never so narrow that ratios degenerate."""


class GraphNetwork(nn.Module):
    """A head on the embedding of the whole graph.

    Args:
        encoder: of nodes and graph.
        head: maps ``[*, encoder.out_features]``.
        slots: how many of the M slots, from the first, are read; a colony whose episode goes on fills no more.
    """

    def __init__(self, encoder: NodeEncoder, head: nn.Module, slots: int) -> None:
        super().__init__()
        self.encoder, self.head, self.slots = encoder, head, slots

    def forward(self, nodes: Tensor, mask: Tensor, graph: Tensor) -> Tensor:
        """``[*, M, F]``, ``[*, M]`` bool and ``[*, G]`` -> what the head gives for ``[*, out_features]``."""
        return self.head(self.encoder.graph_embedding(nodes[..., : self.slots, :], mask[..., : self.slots], graph))


class PartsNetwork(nn.Module):
    """A head for each part of an action: on the embeddings of the nodes, or on that of the graph.

    A head on nodes sees the graph's embedding beside the node's.

    Args:
        encoder: of nodes and graph.
        heads: one for each part, in order.
        per_node: for each part, whether its head is on nodes.
        slots: how many of the M slots are read, as for :class:`GraphNetwork`; the others have features 0.
    """

    def __init__(self, encoder: NodeEncoder, heads: Sequence[nn.Module], per_node: Sequence[bool], slots: int) -> None:
        super().__init__()
        self.encoder, self.heads, self.per_node = encoder, nn.ModuleList(heads), tuple(per_node)
        self.slots = slots

    def forward(self, nodes: Tensor, mask: Tensor, graph: Tensor) -> tuple[Tensor, ...]:
        """``[*, M, F]``, ``[*, M]`` bool and ``[*, G]`` -> for each part ``[*, M, features]`` or ``[*, features]``."""
        each, whole = self.encoder(nodes[..., : self.slots, :], mask[..., : self.slots], graph)
        beside = torch.cat([each, whole.unsqueeze(-2).expand_as(each)], -1)
        rest = (0, 0, 0, nodes.shape[-2] - each.shape[-2])
        parts = zip(self.heads, self.per_node, strict=True)
        return tuple(F.pad(head(beside), rest) if on_nodes else head(whole) for head, on_nodes in parts)


def make_node_encoder(env: Any, config: DurotaxisConfig) -> NodeEncoder:
    """An encoder for the env's nodes and graph, with the sizes that the config has."""
    spec = env.observation_spec
    return NodeEncoder(
        spec["nodes"].shape[-1],
        spec["graph"].shape[-1],
        width=config.encoder_width,
        num_layers=config.encoder_layers,
        num_heads=config.encoder_heads,
        groups=config.simplex_groups,
        temperature=config.simplex_temperature,
        precision=config.precision,
        device=env.device,
    )


def make_colony_actor(env: Any, config: DurotaxisConfig, *, slots: int | None = None) -> HybridActor:
    """A policy for the env's action spec: reads ``COLONY_KEYS``, writes the action and its log-probabilities.

    Parts with a dim of nodes between the batch and their own are chosen for each node, by a head on its embedding, and
    nodes that do not exist count nothing; the others for the colony as a whole.

    Args:
        env: a :class:`Durotaxis`; or with ``slots`` what has the specs of one.
        config: gives the sizes.
        slots: how many nodes are read; by default as many as the env's settings allow.
    """
    spec, slots = env.full_action_spec, env.settings.critical_nodes if slots is None else slots
    encoder = make_node_encoder(env, config)
    leaves = action_leaves(spec)
    per_node = [_is_per_node(leaf, env) for leaf in leaves.values()]
    heads = [
        _head(encoder.out_features * (2 if on_nodes else 1), part_features(leaf), config, env.device)
        for leaf, on_nodes in zip(leaves.values(), per_node, strict=True)
    ]
    network = PartsNetwork(encoder, heads, per_node, slots)
    if not any(per_node):
        network = GraphNetwork(encoder, _Joined(heads), slots)
    return HybridActor(
        network,
        spec=spec,
        in_keys=COLONY_KEYS,
        valid_key="node_mask" if any(per_node) else None,
        log_scale_range=LOG_SCALE_RANGE,
    )


def make_colony_critic(env: Durotaxis, config: DurotaxisConfig, names: Sequence[str]) -> ValueOperator:
    """A value for each of the named components: reads ``COLONY_KEYS``, writes ``state_value [*, len(names)]``."""
    encoder = make_node_encoder(env, config)
    head = ComponentValues(
        encoder.out_features,
        names,
        hidden_size=config.hidden_size,
        activation=config.activation,
        precision=config.precision,
        device=env.device,
    )
    return ValueOperator(GraphNetwork(encoder, head, env.settings.critical_nodes), in_keys=list(COLONY_KEYS))


class _Joined(nn.Module):
    """Features of all parts, one after the other in the last dim."""

    def __init__(self, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


def _head(size: int, features: int, config: DurotaxisConfig, device: Any) -> FusedMLP:
    return FusedMLP(
        size,
        features,
        hidden_size=config.hidden_size,
        activation=config.activation,
        precision=config.precision,
        output_gain=0.01,
        device=device,
    )


def _is_per_node(leaf: TensorSpec, env: Any) -> bool:
    """Whether a part has an action for each node."""
    own = 0 if hasattr(leaf.space, "n") else 1  # a choice is a scalar, a displacement a vector
    between = leaf.shape[env.batch_dims : len(leaf.shape) - own]
    nodes = cast("torch.Size", env.observation_spec["node_mask"].shape)[env.batch_dims :]
    if between and between != nodes:
        raise ValueError(
            f"action_spec: expected parts for the whole colony or for each of its {list(nodes)} nodes, received "
            f"{list(leaf.shape)}. Remedy: pass actor=."
        )
    return bool(between)
