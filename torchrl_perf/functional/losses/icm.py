"""The three numbers of an intrinsic curiosity module (ICM, arXiv:1705.05363)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.functional.wide import computed_wide


@computed_wide
def forward_error(predicted: Tensor, features: Tensor) -> Tensor:
    """``1/2 ||phi^(s') - phi(s')||^2`` of each transition (eq. 5).

    Args:
        predicted: ``[*, F]`` predicted features of the next state.
        features: ``[*, F]`` its features.

    Returns:
        ``[*]``.
    """
    return (predicted - features).square().sum(-1) / 2


@computed_wide
def intrinsic_reward(predicted: Tensor, features: Tensor, eta: float | Tensor) -> Tensor:
    """``eta/2 ||phi^(s') - phi(s')||^2`` (eq. 6): how much a transition surprises; without a gradient.

    Args:
        predicted: ``[*, F]`` predicted features of the next state.
        features: ``[*, F]`` its features.
        eta: scale.

    Returns:
        ``[*, 1]``, as a reward is.
    """
    return (eta * forward_error(predicted, features)).unsqueeze(-1).detach()


@computed_wide
def inverse_error(predicted: Tensor, action: Tensor, *, discrete: bool) -> Tensor:
    """How badly the action is guessed from the features of the two states around it (eq. 3).

    Args:
        predicted: ``[*, D]``: logits of discrete actions, or a continuous action.
        action: ``[*]`` int64 indices of discrete actions, or ``[*, D]``.
        discrete: whether the actions are discrete.

    Returns:
        ``[*]``: cross-entropy in nats, or half the squared distance.
    """
    if not discrete:
        return forward_error(predicted, action)
    rows = F.cross_entropy(predicted.reshape(-1, predicted.shape[-1]), action.reshape(-1), reduction="none")
    return rows.view(action.shape)


def inverse_accuracy(predicted: Tensor, action: Tensor) -> Tensor:
    """Share of discrete actions that are guessed right.

    Args:
        predicted: ``[*, D]`` logits.
        action: ``[*]`` int64 indices.

    Returns:
        0-d float32 in [0, 1].
    """
    return (predicted.argmax(-1) == action).to(torch.float32).mean()
