"""Deep Q-learning (arXiv:1312.5602) with every step of the loop on the device."""

import copy

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_perf.functional.dqn import action_value, q_loss, q_targets
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.mlp import FusedMLP
from torchrl_perf.modules.q_networks import DuelingMLP
from torchrl_perf.trainers.dqn_config import DQNConfig
from torchrl_perf.trainers.value_based import ValueTrainer, epsilon_greedy


class DQNTrainer(ValueTrainer):
    """DQN: double Q-learning, n-step returns, prioritised replay, duelling networks, as the config says.

    Arguments, attributes and errors are those of :class:`ValueTrainer`; the default policy is :func:`make_q_policy`.
    """

    config: DQNConfig

    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """:func:`make_q_policy`."""
        return make_q_policy(env, self.config)

    def make_target(self, policy: EpsilonGreedy) -> nn.Module:
        """A copy of the online network."""
        return copy.deepcopy(policy.network).requires_grad_(False)

    def sample_losses(self, sample: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Loss 0-d with gradient, temporal differences ``[B]``, mean value of the actions taken 0-d."""
        config, policy = self.config, self.policy
        inputs = [sample.get(key) for key in policy.network_keys]
        following = sample.get("next")
        next_inputs = [following.get(key) for key in policy.network_keys]
        discount = config.gamma
        if config.n_step > 1:
            discount = config.gamma ** sample.get("steps_to_next_obs").squeeze(-1)
        with torch.no_grad():
            target = q_targets(
                following.get("reward").squeeze(-1),
                following.get("terminated").squeeze(-1),
                discount,
                self.target_network(*next_inputs),
                online_values=self.q_network(*next_inputs) if config.double else None,
                action_mask=None if policy.mask_key is None else following.get(policy.mask_key),
            )
        value = action_value(self.q_network(*inputs), sample.get(policy.action_key))
        loss = q_loss(value, target, config.loss, sample.get("priority_weight", None))
        return loss, (value - target).detach(), value.detach().mean()


def make_q_policy(env: EnvBase, config: DQNConfig) -> EpsilonGreedy:
    """Epsilon-greedy on a perceptron, duelling or not: reads ``observation``, writes ``action``.

    Raises:
        ValueError: for continuous actions.
    """
    return epsilon_greedy(env, config, DuelingMLP if config.dueling else FusedMLP)
