"""Entropy and divergence of any distribution of actions: closed form where there is one, else sampled as in TorchRL."""

import torch
from tensordict.nn import CompositeDistribution
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Distribution, kl_divergence
from torchrl.modules.distributions.utils import has_analytic_entropy, has_analytic_kl, sample_and_log_prob

from torchrl_perf.functional.losses.hybrid import sum_to
from torchrl_perf.modules.hybrid import HybridDistribution


def entropies(dist: Distribution, samples: int) -> tuple[Tensor, dict[NestedKey, Tensor]]:
    """Entropy ``[*]`` of an action, and of each part of a composite one under TorchRL's name for it.

    A distribution without a closed form (``TanhNormal``, :class:`~torchrl_perf.modules.SquashedNormal`) is estimated by
    ``-log p`` of ``samples`` draws, reparametrised where that is possible, so that a gradient flows. Whether there is
    one is decided by the class; whether the number is finite is not asked, which would be a host wait.

    Args:
        dist: batch ``[*]``; parts may have dims beyond it (nodes), whose entropies are added.
        samples: number of draws.
    """
    if not isinstance(dist, CompositeDistribution):
        return _entropy(dist, samples), {}
    dims = len(dist.batch_shape)
    parts = {entropy_name(key): sum_to(_entropy(part, samples), dims) for key, part in dist.dists.items()}
    return HybridDistribution.joined(parts, dims), parts


def divergence(old: Distribution, new: Distribution, samples: int) -> Tensor:
    """``KL(old || new)`` ``[*]``, of a composite action the sum over its parts and nodes.

    Pairs without a registered closed form are estimated from ``samples`` draws of the old one.

    Args:
        old: batch ``[*]``.
        new: the same.
        samples: number of draws.

    Raises:
        ValueError: for composites of different parts.
    """
    if not isinstance(old, CompositeDistribution) or not isinstance(new, CompositeDistribution):
        return _divergence(old, new, samples)
    if list(old.dists) != list(new.dists):
        raise ValueError(f"expected the parts {list(old.dists)} of the old policy, received {list(new.dists)}.")
    parts = {key: _divergence(part, new.dists[key], samples) for key, part in old.dists.items()}
    return HybridDistribution.joined(parts, len(old.batch_shape))


def entropy_name(key: NestedKey) -> NestedKey:
    """The key of a part's entropy, as TorchRL names it: ``"push_entropy"`` for the part ``"push"``."""
    return f"{key}_entropy" if isinstance(key, str) else (*key[:-1], f"{key[-1]}_entropy")


def _entropy(dist: Distribution, samples: int) -> Tensor:
    if has_analytic_entropy(dist):
        return dist.entropy()
    return -sample_and_log_prob(dist, (samples,), reparameterize=dist.has_rsample)[1].mean(0)


def _divergence(old: Distribution, new: Distribution, samples: int) -> Tensor:
    if has_analytic_kl(old, new):
        return kl_divergence(old, new)
    with torch.no_grad():
        drawn, log_prob = sample_and_log_prob(old, (samples,))
    return (log_prob - new.log_prob(drawn)).mean(0)
