"""Orders in which cells are drawn one after the other, and their probabilities.

Dimension key: ``K`` breaks, ``H``, ``W`` cells.
"""

import math

import torch
from torch import Tensor

__all__ = ["draw_orders", "order_log_prob"]

LEAST = 1e-9


def draw_orders(scores: Tensor, count: int) -> Tensor:
    """Draw ``count`` different cells one after the other, each in proportion to ``exp(score)`` among those left.

    Cells with the greatest score plus Gumbel noise are such a draw (arXiv:1903.06059).

    Args:
        scores: ``[*, H W]``; cells that may not be drawn have a very low one.
        count: K.

    Returns:
        Cells int64 ``[*, K]``, in the order in which they were drawn.
    """
    noise = -(-(torch.rand_like(scores).clamp_min(LEAST).log())).clamp_min(LEAST).log()
    return (scores + noise).topk(count, -1).indices


def order_log_prob(scores: Tensor, order: Tensor) -> Tensor:
    """Log-probability ``[*]`` with which :func:`draw_orders` draws the cells ``order`` [*, K] in this order.

    It is that of Plackett (1975) and Luce (1959): ``sum_k (s_k - log sum_{j not drawn before k} exp(s_j))``.
    """
    drawn = scores.gather(-1, order)
    rest = scores.scatter(-1, order, -math.inf).logsumexp(-1, keepdim=True)
    left = torch.logaddexp(drawn.flip(-1).logcumsumexp(-1).flip(-1), rest)
    return (drawn - left).sum(-1)
