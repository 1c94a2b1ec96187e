"""The named parts of one step's reward, as durotaxis had them before and after its second optimisation.

One env at a time, in floats.
"""

from typing import Any

NAMES = (
    "total_reward",
    "graph_reward",
    "spawn_reward",
    "delete_reward",
    "deletion_efficiency_reward",
    "edge_reward",
    "centroid_reward",
    "milestone_reward",
    "node_rewards",
    "total_node_reward",
    "survival_reward",
    "empty_graph_recovery_penalty",
    "termination_reward",
    "num_nodes",
)
SCALARS = tuple(name for name in NAMES if name != "node_rewards")


def template() -> dict[str, Any]:
    """What :func:`from_template` copies: all names, with the list that each shallow copy then shares."""
    return {name: [] if name == "node_rewards" else 0.0 for name in NAMES}


def literal(values: tuple[float, ...]) -> dict[str, Any]:
    """Before: a new dict of 14 entries; ``values`` are those of :data:`SCALARS`."""
    total, graph, spawn, delete, efficiency, edge, centroid, milestone, node, survival, recovery, end, count = values
    return {
        "total_reward": total,
        "graph_reward": graph,
        "spawn_reward": spawn,
        "delete_reward": delete,
        "deletion_efficiency_reward": efficiency,
        "edge_reward": edge,
        "centroid_reward": centroid,
        "milestone_reward": milestone,
        "node_rewards": [],
        "total_node_reward": node,
        "survival_reward": survival,
        "empty_graph_recovery_penalty": recovery,
        "termination_reward": end,
        "num_nodes": count,
    }


def from_template(base: dict[str, Any], values: tuple[float, ...]) -> dict[str, Any]:
    """After: a shallow copy of a template, whose entries are then all written again."""
    total, graph, spawn, delete, efficiency, edge, centroid, milestone, node, survival, recovery, end, count = values
    out = dict(base)
    out["total_reward"] = total
    out["graph_reward"] = graph
    out["spawn_reward"] = spawn
    out["delete_reward"] = delete
    out["deletion_efficiency_reward"] = efficiency
    out["edge_reward"] = edge
    out["centroid_reward"] = centroid
    out["milestone_reward"] = milestone
    out["total_node_reward"] = node
    out["survival_reward"] = survival
    out["empty_graph_recovery_penalty"] = recovery
    out["termination_reward"] = end
    out["num_nodes"] = count
    return out
