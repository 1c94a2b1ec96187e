"""The k smallest of each row, where each row has its own k."""

import torch
from torch import Tensor

PAIRWISE = 256
"""Most entries that are compared pair by pair where that is compiled for CUDA."""


def leftmost_k(key: Tensor, alive: Tensor, k: Tensor | int) -> Tensor:
    """The ``k`` entries with the smallest key among the living ones of each row; equal keys are taken by index.

    ``topk`` takes one k for all rows, a threshold at the k-th key takes all of a tie, and a partition takes any of it.
    Here the selection is the first k of ``sorted(living, key=...)`` exactly: the entries are sorted once, stably, and
    the living ones are counted in that order. Compiled for CUDA, up to 256 entries are compared pair by pair instead,
    which becomes a part of the kernels around it; the compiler takes minutes for a sort. Nothing waits for the host.

    Args:
        key: ``[*, N]``, any dtype that sorts: the position of each entry, its age, minus its score. NaN comes last,
            after infinity. What the dead entries hold is not looked at.
        alive: ``[*, N]`` bool, the entries to choose from.
        k: ``[*]`` integers, or one for all rows; 0 and less select none, the number alive and more select all of them.

    Returns:
        ``[*, N]`` bool, True for the selected entries.

    Raises:
        ValueError: for ``alive`` of another shape or dtype, or ``k`` of another shape or a floating-point dtype.
    """
    if alive.shape != key.shape or alive.dtype != torch.bool:
        raise ValueError(
            f"alive: expected bool {list(key.shape)}, the shape of key, received {alive.dtype} {list(alive.shape)}."
        )
    if isinstance(k, Tensor):
        if k.is_floating_point() or k.shape not in (key.shape[:-1], torch.Size(())):
            raise ValueError(
                f"k: expected integers {list(key.shape[:-1])}, one for each row of key, received {k.dtype} "
                f"{list(k.shape)}. Remedy: k.floor().long() for a fraction, squeeze(-1) for a trailing dim."
            )
        k = k.unsqueeze(-1)
    if key.is_cuda and key.shape[-1] <= PAIRWISE and torch.compiler.is_compiling():
        return alive & (rank_by_counting(key, alive) < k)
    order = key.argsort(dim=-1, stable=True)
    sorted_alive = alive.gather(-1, order)
    taken = sorted_alive & (sorted_alive.cumsum(-1) <= k)
    return torch.zeros_like(alive).scatter(-1, order, taken)


def rank_by_counting(key: Tensor, alive: Tensor) -> Tensor:
    """How many living entries come before each, in the order of :func:`leftmost_k`, from all pairs.

    Args:
        key: ``[*, N]``, any dtype that sorts.
        alive: ``[*, N]`` bool.

    Returns:
        ``[*, N]`` int64; that of a dead entry is the number of living ones before its place.
    """
    index = torch.arange(key.shape[-1], device=key.device)
    own, other = key.unsqueeze(-1), key.unsqueeze(-2)
    unordered, other_unordered = own.isnan(), other.isnan()
    same = (own == other) | (unordered & other_unordered)
    before = (other < own) | (unordered & ~other_unordered) | (same & (index < index.unsqueeze(-1)))
    return (before & alive.unsqueeze(-2)).sum(-1)
