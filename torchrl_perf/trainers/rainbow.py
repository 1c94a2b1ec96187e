"""Rainbow (arXiv:1710.02298) with every step of the loop on the device."""

import functools
from typing import Any

from torch import nn
from torchrl.envs import EnvBase

from torchrl_perf.functional.distributional import check_support
from torchrl_perf.modules.categorical_q import CategoricalMLP
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.objectives.c51 import DeviceC51Loss
from torchrl_perf.trainers.rainbow_config import REWARD_BOUNDS, RainbowConfig
from torchrl_perf.trainers.value_based import DistributionalTrainer, epsilon_greedy


class RainbowTrainer(DistributionalTrainer):
    """C51 with double Q-learning, duelling and noisy networks, n-step returns and prioritised replay, as configured.

    Arguments, attributes and errors are those of :class:`ValueTrainer`; the default policy is
    :func:`make_rainbow_policy`. The priority of a row is its cross-entropy. Atoms that cannot represent the returns of
    the package's task that the config names are refused.
    """

    config: RainbowConfig

    def make_env(self) -> EnvBase:
        """The task that the config names.

        Raises:
            ValueError: where the atoms cannot represent the task's returns.
        """
        config = self.config
        if config.env in REWARD_BOUNDS:
            check_support(config.v_min, config.v_max, REWARD_BOUNDS[config.env], config.gamma)
        return super().make_env()

    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """:func:`make_rainbow_policy`."""
        return make_rainbow_policy(env, self.config)

    def make_loss(self, network: nn.Module, **keys: Any) -> DeviceC51Loss:
        """The cross-entropy loss of a network."""
        return DeviceC51Loss(network, gamma=self.config.gamma, double_dqn=self.config.double, **keys)


def make_rainbow_policy(env: EnvBase, config: RainbowConfig) -> EpsilonGreedy:
    """Greedy on the means of a categorical network with noise: reads ``observation``, writes ``action``.

    Raises:
        ValueError: for continuous actions.
    """
    options: dict[str, Any] = {"num_atoms": config.num_atoms, "v_min": config.v_min, "v_max": config.v_max}
    options |= {"dueling": config.dueling, "noisy": None if config.noisy == "none" else config.noisy}
    return epsilon_greedy(env, config, functools.partial(CategoricalMLP, **options))
