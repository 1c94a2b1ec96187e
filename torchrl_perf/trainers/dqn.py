"""Deep Q-learning (arXiv:1312.5602) with every step of the loop on the device."""

import copy
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_perf.functional.losses.dqn import action_value, q_loss, q_targets
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.mlp import FusedMLP
from torchrl_perf.modules.values.q_networks import DuelingMLP
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.off_policy.value_based import ValueAlgorithm, ValueConfig, epsilon_greedy


@dataclass(frozen=True)
class DQNConfig(ValueConfig):
    """Every choice of a DQN run (arXiv:1312.5602), with double Q-learning, duelling, n-step, prioritised replay.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "dqn"
    presets_in: ClassVar[str] = "trainers.dqn:DQN_PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:DQN"

    loss: Literal["huber", "l2"] = "huber"
    """Loss of a temporal difference: quadratic up to 1 and linear beyond, or its square."""


DQN_PRESETS: dict[str, DQNConfig] = {
    # The whole run stays in the buffer: without its early failures a good policy unlearns what they taught. A horizon
    # of 50 steps is enough to balance. Seeds 0 to 2 end at 500.
    "CartPole": DQNConfig(
        num_envs=64,
        num_steps=4,
        gamma=0.98,
        capacity=300_000,
        updates_per_iteration=32,
        minibatch_size=128,
        learning_starts=1_000,
        n_step=5,
        anneal_learning_rate=True,
        target_interval=256,
        eps_end=0.03,
        eps_frames=40_000,
        hidden_size=128,
        log_interval=20,
    ),
}
"""Settings for each task, by env name. They solve it within a minute on one CPU core."""


class QLoss:
    """The temporal differences of Q-learning: what is learnt is the value of the action taken.

    ``y = r + gamma^n max_a Q_target(s', a)``, or with ``double`` the value that ``Q_target`` gives to the action that
    ``Q`` prefers (arXiv:1509.06461); ``r`` alone where the next state is terminal.

    Keys read: the policy's ``network_keys`` and ``action_key``, ("next", "reward") and ("next", "terminated")
    ``[B, 1]``; ``steps_to_next_obs`` with n-step returns, ``priority_weight`` where there is one, and below "next" the
    policy's ``mask_key``.

    Args:
        network: maps the policy's inputs to values ``[B, D]``.
        policy: whose keys are read.
        config: gives gamma, n, double and the kind of loss.

    Attributes:
        target_network: the delayed copy of the network, without gradients.
    """

    def __init__(self, network: nn.Module, policy: EpsilonGreedy, config: DQNConfig) -> None:
        self.q_network, self.policy, self.config = network, policy, config
        self.target_network = copy.deepcopy(policy.network).requires_grad_(False)

    def losses(self, td: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Loss 0-d with gradient, temporal differences ``[B]``, mean value of the actions taken 0-d."""
        config, policy = self.config, self.policy
        inputs = [td.get(key) for key in policy.network_keys]
        following = td.get("next")
        next_inputs = [following.get(key) for key in policy.network_keys]
        discount = config.gamma
        if config.n_step > 1:
            discount = config.gamma ** td.get("steps_to_next_obs").squeeze(-1)
        with torch.no_grad():
            target = q_targets(
                following.get("reward").squeeze(-1),
                following.get("terminated").squeeze(-1),
                discount,
                self.target_network(*next_inputs),
                online_values=self.q_network(*next_inputs) if config.double else None,
                action_mask=None if policy.mask_key is None else following.get(policy.mask_key),
            )
        value = action_value(self.q_network(*inputs), td.get(policy.action_key))
        loss = q_loss(value, target, config.loss, td.get("priority_weight", None))
        return loss, (value - target).detach(), value.detach().mean()


class DQN(ValueAlgorithm):
    """Deep Q-learning: double Q-learning, n-step returns, prioritised replay, duelling networks, as the config says."""

    config: DQNConfig

    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """Epsilon-greedy on a perceptron, duelling or not."""
        return make_q_policy(env, self.config)

    def make_loss(self, network: nn.Module, policy: EpsilonGreedy) -> QLoss:
        """Temporal differences, with a copy of the network for the targets."""
        return QLoss(network, policy, self.config)


class DQNTrainer(OffPolicyTrainer):
    """The loop of :class:`OffPolicyTrainer` on :class:`DQN`.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs] and discrete actions; by default the task that the config names.
        collector: collects ``[N, T]`` batches with ``policy``, such as a ``HostCollector``.
        policy: an :class:`EpsilonGreedy` on a network of your own; by default :func:`make_q_policy`. Where only a
            collector is given, its policy.

    Raises:
        ValueError: at construction, for continuous actions, and for parts that do not fit each other.
    """

    algorithm_class = DQN


def make_q_policy(env: EnvBase, config: DQNConfig) -> EpsilonGreedy:
    """Epsilon-greedy on a perceptron, duelling or not: reads ``observation``, writes ``action``.

    Raises:
        ValueError: for continuous actions.
    """
    return epsilon_greedy(env, config, DuelingMLP if config.dueling else FusedMLP)
