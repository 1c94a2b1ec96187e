"""Entropy and divergence of normal actions estimated from samples, which durotaxis compares its closed forms with."""

import torch
from torch import Tensor
from torch.distributions import Normal


def entropy(loc: Tensor, scale: Tensor, samples: int) -> Tensor:
    """``-mean log N(x)`` over samples, ``[B]`` of ``[B, D]``; differentiable, which it is not with plain samples."""
    dist = Normal(loc, scale, validate_args=False)
    return -dist.log_prob(dist.rsample(torch.Size([samples]))).sum(-1).mean(0)


def divergence(loc: Tensor, scale: Tensor, other_loc: Tensor, other_scale: Tensor, samples: int) -> Tensor:
    """``mean [log p(x) - log q(x)]`` over samples of p, ``[B]``."""
    dist, other = Normal(loc, scale, validate_args=False), Normal(other_loc, other_scale, validate_args=False)
    x = dist.sample(torch.Size([samples]))
    return (dist.log_prob(x) - other.log_prob(x)).sum(-1).mean(0)
