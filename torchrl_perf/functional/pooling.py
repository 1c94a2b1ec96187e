"""Sums over sets of objects, some of which are padding: in any order, of any number, 0 included.

An empty set pools to 0. Padding is ignored, NaN included, and gets no gradient.
"""

import torch
from torch import Tensor

from torchrl_perf.functional.wide import computed_wide


@computed_wide
def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the objects that exist.

    Args:
        values: ``[*, M, F]`` float.
        mask: ``[*, M]`` bool, True for the objects that exist.

    Returns:
        ``[*, F]``, 0 for an empty set.
    """
    total = values.masked_fill(~mask.unsqueeze(-1), 0.0).sum(-2)
    return total / mask.sum(-1, keepdim=True).clamp_min(1).to(total.dtype)


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """The greatest of each feature over the objects that exist.

    Args:
        values: ``[*, M, F]`` float.
        mask: ``[*, M]`` bool, True for the objects that exist.

    Returns:
        ``[*, F]``, 0 for an empty set. Objects that tie share the gradient, so that it does not depend on their order.
    """
    greatest = values.masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(-2)
    return greatest.masked_fill(~mask.any(-1, keepdim=True), 0.0)


@computed_wide
def masked_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """``softmax(q k / sqrt(E))``-weighted mean of the objects that exist (arXiv:1706.03762), one query for each set.

    Args:
        query: ``[*, H, E]``, H heads.
        keys: ``[*, M, H, E]``.
        values: ``[*, M, H, V]``.
        mask: ``[*, M]`` bool, True for the objects that exist.

    Returns:
        ``[*, H, V]``, 0 for an empty set.
    """
    absent = ~mask.unsqueeze(-1)
    keys, values = (part.masked_fill(absent.unsqueeze(-1), 0.0) for part in (keys, values))
    scores = (query.unsqueeze(-3) * keys).sum(-1) / query.shape[-1] ** 0.5
    # finite, so that an empty set has finite weights; its values are 0
    scores = scores.masked_fill(absent, torch.finfo(scores.dtype).min)
    return (scores.softmax(-2).unsqueeze(-1) * values).sum(-3)
