"""The sum tree of prioritised sampling as tensor functions: pack, write, sum, draw (Schaul et al., arXiv:1511.05952).

The leaves of a tree are int64 words: the low half holds the bits of a float32 weight (never negative), the high half a
ticket that is zero except within one write. A maximum over words therefore keeps the last of several writes to one
slot, in whatever order they arrive, and bits of weights compare as the weights do. ``FAN_OUT`` leaves make one node of
the first level; nodes are float64 sums and float32 minima, always computed from their children, so nothing drifts.

These functions need the first level only and are the reference of :mod:`torchrl_perf.kernels.priority_tree`.
"""

import torch
from torch import Tensor

__all__ = [
    "FAN_OUT",
    "LARGEST_PRIORITY",
    "LEAST_PRIORITY",
    "draw_leaves",
    "importance_weight",
    "leaf_weights",
    "node_values",
    "priority_weight",
    "refresh_nodes_",
    "row_age",
    "uniform_rows",
    "write_leaves_",
]

FAN_OUT = 64
"""Children of a node."""

LARGEST_PRIORITY = 2.0**64
"""Priorities above are this one, and so is infinity."""

LEAST_PRIORITY = 1e-6
"""Trainers add it to the error, so that a row without error is still drawn now and then."""

_TINY = torch.finfo(torch.float32).tiny
_HUGE = torch.finfo(torch.float32).max
_BELOW_ONE = 1.0 - 2.0**-53
_WEIGHT_BITS = 0x7FFFFFFF


def leaf_weights(words: Tensor) -> Tensor:
    """The weights inside the words, ``[num_leaves]`` float32, a view that may be written through.

    Args:
        words: ``[num_leaves]`` int64, contiguous.
    """
    return words.view(torch.float32)[::2]  # the low half comes first on every machine that torch supports


def priority_weight(priority: Tensor, alpha: float | Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """``p ** alpha`` of usable priorities, and which ones are usable.

    NaN and negative numbers are not usable. A priority of 0 has weight 0 whatever alpha is; a positive one is raised by
    ``eps``, bounded by ``LARGEST_PRIORITY``, and its weight stays a positive normal float32.

    Args:
        priority: ``[*]``; converted to float32.
        alpha: exponent, at least 0; a float or 0-d.
        eps: added to positive priorities.

    Returns:
        Weights ``[*]`` float32 (0 where not usable) and ``[*]`` bool.
    """
    priority = priority.to(torch.float32)
    alpha = alpha.to(torch.float32) if isinstance(alpha, Tensor) else alpha
    usable = priority >= 0
    bounded = (priority + eps).clamp(_TINY, LARGEST_PRIORITY)
    weight = bounded.pow(alpha).clamp(_TINY, _HUGE)
    return torch.where(priority > 0, weight, 0.0), usable


def write_leaves_(words: Tensor, index: Tensor, weight: Tensor, keep: Tensor | None = None) -> None:
    """Write weights; the last of several kept weights for one slot wins. Nodes are not refreshed.

    Args:
        words: ``[num_leaves]`` int64, written.
        index: ``[B]`` int64 slots, in range where kept.
        weight: ``[B]`` or 0-d, finite, not negative; converted to float32.
        keep: ``[B]`` bool, rows to write; None for all.
    """
    bits = weight.to(torch.float32).view(torch.int32).to(torch.int64)
    ticket = torch.arange(1, index.shape[0] + 1, device=index.device) << 32
    word = ticket | bits
    if keep is not None:
        word = torch.where(keep, word, 0)  # loses against every stored word
        index = torch.where(keep, index, 0)
    words.scatter_reduce_(0, index, word, "amax")
    words.scatter_(0, index, words.index_select(0, index) & _WEIGHT_BITS)


def node_values(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and smallest positive weight of nodes.

    Args:
        weights: ``[*, FAN_OUT]`` float32 weights of the children.

    Returns:
        Sums ``[*]`` float64 and minima ``[*]`` float32, infinity where no child is positive.
    """
    return weights.sum(-1, dtype=torch.float64), torch.where(weights > 0, weights, torch.inf).amin(-1)


def refresh_nodes_(words: Tensor, sums: Tensor, minima: Tensor, index: Tensor | None = None) -> None:
    """Recompute the nodes of the first level above the given leaves, or all of them.

    Args:
        words: ``[num_leaves]`` int64.
        sums: ``[num_leaves / FAN_OUT]`` float64, written.
        minima: ``[num_leaves / FAN_OUT]`` float32, written.
        index: ``[B]`` int64 slots; None, or more slots than nodes, for all nodes.
    """
    weights = leaf_weights(words).view(-1, FAN_OUT)
    if index is None or index.shape[0] >= weights.shape[0]:
        total, minimum = node_values(weights)
        sums.copy_(total)
        minima.copy_(minimum)
        return
    node = index // FAN_OUT
    total, minimum = node_values(words.view(-1, FAN_OUT).index_select(0, node).view(torch.float32)[:, ::2])
    sums.scatter_(0, node, total)
    minima.scatter_(0, node, minimum)


def draw_leaves(words: Tensor, sums: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw slots with a probability in proportion to their weights, in float64 throughout.

    The slot is the first whose running sum of weights exceeds ``uniform * total``, so that one of weight 0 is never
    drawn, unless all are 0.

    Args:
        words: ``[num_leaves]`` int64.
        sums: ``[num_leaves / FAN_OUT]`` float64 sums of the first level.
        uniform: ``[B]`` in [0, 1); float64, so that each slot of a large tree can be told apart.

    Returns:
        Slots ``[B]`` int64, their weights ``[B]`` float32, and the total, 0-d float64.
    """
    uniform = uniform.to(torch.float64)
    if uniform.shape[0] * FAN_OUT >= words.shape[0]:  # all leaves are fewer than those below the drawn nodes
        leaves = leaf_weights(words)
        running = leaves.cumsum(0, dtype=torch.float64)
        mass = torch.minimum(uniform * running[-1], running[-1] * _BELOW_ONE)
        slot = torch.searchsorted(running, mass, right=True).clamp_(max=words.shape[0] - 1)
        return slot, leaves.index_select(0, slot), running[-1]
    running = sums.cumsum(0)
    total = running[-1]
    mass = torch.minimum(uniform * total, total * _BELOW_ONE)
    node = torch.searchsorted(running, mass, right=True).clamp_(max=sums.shape[0] - 1)
    rest = mass - (running - sums).index_select(0, node)
    weights = words.view(-1, FAN_OUT).index_select(0, node).view(torch.float32)[:, ::2]
    inner = weights.cumsum(-1, dtype=torch.float64)
    rest = torch.minimum(rest.clamp_(min=0.0).unsqueeze(-1), inner[:, -1:] * _BELOW_ONE)
    child = torch.searchsorted(inner, rest, right=True).clamp_(max=FAN_OUT - 1)
    weight = weights.gather(-1, child).squeeze(-1)
    return node * FAN_OUT + child.squeeze(-1), weight, total


def importance_weight(weight: Tensor, minimum: Tensor, beta: float | Tensor) -> Tensor:
    """``(weight / minimum) ** -beta``: importance weights divided by their largest (arXiv:1511.05952, section 3.4).

    Args:
        weight: ``[B]`` float32, positive.
        minimum: smallest positive weight of the tree, 0-d float32.
        beta: exponent in [0, 1]; a float or 0-d float32.

    Returns:
        ``[B]`` float32 in [0, 1].
    """
    beta = beta.to(torch.float32) if isinstance(beta, Tensor) else beta
    return (weight.to(torch.float32) / minimum).clamp(max=_HUGE).pow(-beta)


def row_age(slot: Tensor, cursor: Tensor, steps: int, num_streams: int) -> tuple[Tensor, Tensor]:
    """Age and generation of rows of a ring.

    Args:
        slot: ``[*]`` int64, ``time_slot * num_streams + stream``.
        cursor: time rows written since the start, 0-d int64.
        steps: time rows of the ring.
        num_streams: streams of a time row.

    Returns:
        Time rows written after the row (``[*]`` int64, at least ``steps`` where the ring is empty), and how often its
        slot had been written before it (-1 for never).
    """
    since = (cursor - 1 + steps) - torch.div(slot, num_streams, rounding_mode="floor")
    generation = torch.div(since, steps, rounding_mode="floor") - 1
    return since - (generation + 1) * steps, generation


def uniform_rows(uniform: Tensor, cursor: Tensor, length: Tensor, steps: int, num_streams: int) -> Tensor:
    """Slots drawn uniformly among the newest ``length`` time rows of a ring.

    Args:
        uniform: ``[B]`` in [0, 1); float64, so that each row of a large ring can be told apart.
        cursor: time rows written since the start, 0-d int64.
        length: valid time rows, 0-d int64.
        steps: time rows of the ring.
        num_streams: streams of a time row.

    Returns:
        ``[B]`` int64 slots; of an empty ring some slot in range.
    """
    count = length * num_streams
    row = torch.minimum((uniform.to(torch.float64) * count).to(torch.int64), count - 1).clamp_(min=0)
    # The slots of a ring are in the order of time except for one jump: rotate instead of splitting time and stream.
    return (row + (cursor - length) * num_streams) % (steps * num_streams)
