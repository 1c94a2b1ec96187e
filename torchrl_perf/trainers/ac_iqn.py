"""AC-IQN, a deterministic policy on a critic of implicit quantiles, with every step of the loop on the device."""

from typing import Any, ClassVar, cast

from torch import nn
from torchrl.data import TensorSpec

from torchrl_perf.modules.quantile import ImplicitQuantileCritic
from torchrl_perf.objectives.ac_iqn import ACIQNLoss
from torchrl_perf.trainers.ac_iqn_config import ACIQNConfig
from torchrl_perf.trainers.ddpg import DeterministicTrainer


class ACIQNTrainer(DeterministicTrainer):
    """Actor-critic with implicit quantiles: IQN (arXiv:1806.06923) for continuous actions, in the manner of DDPG.

    Arguments, attributes and errors are those of :class:`ActorCriticTrainer`. Levels are drawn on the device in each
    update, anew in each replay of a graph. An update that is split for want of memory draws them anew for each part.
    """

    config: ACIQNConfig
    squash: ClassVar[Any] = "atan"

    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """A network of quantiles of the value of observation and action."""
        config = self.config
        return ImplicitQuantileCritic(
            observation.shape[-1],
            action.shape[-1],
            num_cosines=config.num_cosines,
            hidden_size=config.hidden_size,
            activation=config.activation,
            precision=config.precision,
            device=cast("Any", action.device),
        )

    def make_loss(self, actor: nn.Module, critic: nn.Module) -> ACIQNLoss:
        """The losses of AC-IQN."""
        config = self.config
        return ACIQNLoss(
            actor,
            critic,
            gamma=config.gamma,
            kappa=config.kappa,
            num_taus=(config.num_taus, config.num_target_taus),
            num_actor_taus=config.num_actor_taus,
        )
