"""Action selection of marine before its rewrite: each observation to the host, an agent asked, an array back.

The agent is one for NumPy observations: it makes a tensor on the device, runs its network on a batch of one, and brings
the result to the host.
"""

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class SampleAgent:
    """An agent that acts on one observation at a time.

    Args:
        network: ``[1, O]`` -> ``[1, D]`` action values, or the action itself.
        device: of the network.
        epsilon: probability of a random action; None for continuous actions, whose network makes its own noise.
    """

    def __init__(self, network: Callable[[Tensor], Tensor], device: torch.device, epsilon: float | None) -> None:
        self.network, self.device, self.epsilon = network, device, epsilon

    def act(self, observation: np.ndarray) -> int | np.ndarray:
        """The action for one observation ``[O]``."""
        state = torch.from_numpy(observation).float().unsqueeze(0).to(self.device)
        with torch.no_grad():
            out = self.network(state)
        if self.epsilon is None:
            return out.cpu().numpy()[0]
        values = out.cpu().numpy()
        if random.random() > self.epsilon:
            return int(np.argmax(values))
        return random.choice(range(values.shape[-1]))


class SampleWrapper:
    """A policy on a batch that asks its agent for each row.

    Args:
        agent: the agent.
    """

    def __init__(self, agent: SampleAgent) -> None:
        self.agent = agent

    def __call__(self, observations: Tensor) -> Tensor:
        """Actions ``[N]`` int64 or ``[N, D]`` float of observations ``[N, O]``, on their device."""
        actions = []
        for index in range(len(observations)):
            row = observations[index].cpu().numpy()
            actions.append(self.agent.act(row))
        return torch.tensor(np.array(actions), device=observations.device)
