"""Generalised advantages of one episode, as durotaxis had them before and after its fourth optimisation.

``delta_t = r_t + gamma V_(t+1) - V_t``, ``A_t = delta_t + gamma lambda A_(t+1)``; an episode that ended has 0 behind
its last value. Advantages are normalised by the biased standard deviation, with nothing added to it.
"""

import torch
from torch import Tensor


def by_list(gamma: float, lmbda: float, values: Tensor, next_values: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Before: backwards over the steps, each result put in front of a Python list.

    Args:
        gamma: discount.
        lmbda: decay of the trace.
        values: ``[T]``.
        next_values: ``[T]``, 0 at the end of a terminated episode.
        rewards: ``[T]``.

    Returns:
        Advantages and returns, ``[T]``.
    """
    advantages: list[Tensor] = []
    returns: list[Tensor] = []
    gae = torch.zeros((), device=values.device)
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] - values[t]
        gae = delta + gamma * lmbda * gae
        advantages.insert(0, gae)
        returns.insert(0, gae + values[t])
    return torch.stack(advantages), torch.stack(returns)


def by_steps(gamma: float, lmbda: float, values: Tensor, next_values: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """After: the same loop, each result written into tensors made beforehand."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    gae = torch.zeros((), device=values.device)
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + gamma * next_values[t] - values[t]
        gae = delta + gamma * lmbda * gae
        advantages[t] = gae
        returns[t] = gae + values[t]
    return advantages, returns


def by_floats(
    gamma: float, lmbda: float, values: Tensor, next_values: Tensor, rewards: Tensor
) -> tuple[Tensor, Tensor]:
    """What neither is: one read of each tensor, plain floats, one tensor back. Three waits in all."""
    value, following, reward = values.tolist(), next_values.tolist(), rewards.tolist()
    advantages, gae = [0.0] * len(reward), 0.0
    for t in range(len(reward) - 1, -1, -1):
        gae = reward[t] + gamma * following[t] - value[t] + gamma * lmbda * gae
        advantages[t] = gae
    out = torch.tensor(advantages, dtype=values.dtype, device=values.device)
    return out, out + values


def normalized(advantages: Tensor) -> Tensor:
    """``(A - mean) / std`` with the biased deviation and nothing added to it: NaN for an episode of one step."""
    return (advantages - advantages.mean()) / advantages.std(unbiased=False)
