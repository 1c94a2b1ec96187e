"""Learning the quantiles of action values, IQN and QR-DQN, with every step of the loop on the device."""

import functools
from typing import Any

from torch import nn
from torchrl.envs import EnvBase

from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.quantile import ImplicitQuantileMLP, QuantileMLP
from torchrl_perf.objectives.quantile import QuantileDQNLoss
from torchrl_perf.trainers.iqn_config import IQNConfig, QRDQNConfig
from torchrl_perf.trainers.value_based import DistributionalTrainer, epsilon_greedy


class IQNTrainer(DistributionalTrainer):
    """IQN (arXiv:1806.06923), and with a :class:`QRDQNConfig` QR-DQN (arXiv:1710.10044).

    Arguments, attributes and errors are those of :class:`ValueTrainer`; the default policy is
    :func:`make_quantile_policy`. Levels are drawn on the device in each update, anew in each replay of a graph. An
    update that is split for want of memory draws them anew for each part.
    """

    config: IQNConfig | QRDQNConfig

    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """:func:`make_quantile_policy`."""
        return make_quantile_policy(env, self.config)

    def make_loss(self, network: nn.Module, **keys: Any) -> QuantileDQNLoss:
        """The quantile loss of a network."""
        config = self.config
        taus = (config.num_taus, config.num_target_taus) if isinstance(config, IQNConfig) else (1, 1)
        return QuantileDQNLoss(
            network,
            gamma=config.gamma,
            double_dqn=config.double,
            kappa=config.kappa,
            num_taus=taus,
            greedy=config.greedy,
            **keys,
        )


def make_quantile_policy(env: EnvBase, config: IQNConfig | QRDQNConfig) -> EpsilonGreedy:
    """Epsilon-greedy on the means of quantiles, or on a risk: reads ``observation``, writes ``action``.

    Raises:
        ValueError: for continuous actions.
    """
    options: dict[str, Any] = {"dueling": config.dueling, "risk": config.distortion}
    if isinstance(config, IQNConfig):
        options |= {"num_cosines": config.num_cosines, "num_action_taus": config.num_action_taus}
        return epsilon_greedy(env, config, functools.partial(ImplicitQuantileMLP, **options))
    options["num_quantiles"] = config.num_quantiles
    return epsilon_greedy(env, config, functools.partial(QuantileMLP, **options))
