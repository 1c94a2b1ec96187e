"""The losses of AC-IQN: a deterministic actor on a critic of quantiles at any level."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.distributional import check_kappa, quantile_huber_loss
from torchrl_perf.functional.sac import weighted_mean
from torchrl_perf.objectives.quantile import checked_counts
from torchrl_perf.objectives.td3 import DeterministicPolicyLoss
from torchrl_perf.objectives.value_loss import step_of, weights_of


class ACIQNLoss(DeterministicPolicyLoss):
    """Actor-critic with implicit quantiles: IQN (arXiv:1806.06923) for continuous actions, in the manner of DDPG.

    The critic learns ``Z_tau(s, a)`` by quantile regression on ``r + gamma Z'_tau'(s', mu'(s'))``, with target actor
    ``mu'`` and target critic ``Z'``; the actor raises the mean over the levels of ``Z_tau(s, mu(s))``, a gradient that
    reaches the actor alone. Nothing waits for the host.

    Keys read: the actor's ``in_keys`` and ``critic_keys``, at the root and under "next", ``action``, ("next", "reward")
    and ("next", "terminated") ``[*, 1]``; where present ``priority_weight [*]`` and ``steps_to_next_obs [*, 1]``.
    Written by :meth:`forward`: ``td_error [*]``, the absolute difference of the mean of targets and of quantiles.

    Args:
        actor: a TensorDict module that writes the action first, such as a ``DeterministicActor`` with ``"atan"``.
        critic: a network such as an ``ImplicitQuantileCritic``: ``sample(*observations, action, num_taus=...)`` gives
            quantiles ``[*, K]`` and levels, ``critic(*observations, action, num_taus=...)`` means ``[*, 1]``.
        gamma: discount factor.
        kappa: of the Huber loss, in the unit of returns; 0 is the pinball loss.
        num_taus: K of the quantiles of the action taken, and of the targets.
        num_actor_taus: K of the mean that the actor raises.
        critic_keys: the observations that the critic reads; None for the actor's ``in_keys``.

    Raises:
        ValueError: for a critic of another kind, and options out of range.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        *,
        gamma: float = 0.99,
        kappa: float = 1.0,
        num_taus: tuple[int, int] = (8, 8),
        num_actor_taus: int = 32,
        critic_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        if not hasattr(critic, "sample"):
            raise ValueError(
                "critic: expected a network with sample(*observations, action, num_taus), received "
                f"{type(critic).__name__}. Remedy: ImplicitQuantileCritic."
            )
        super().__init__(actor, critic, gamma=gamma)
        self.kappa, self.num_taus = check_kappa(kappa), checked_counts(num_taus)
        self.num_actor_taus = checked_counts((num_actor_taus, 1))[0]
        keys = getattr(actor, "network_keys", actor.in_keys) if critic_keys is None else critic_keys
        self.critic_keys = list(cast("Sequence[NestedKey]", keys))

    def _inputs(self, td: TensorDictBase, action: Tensor, *, following: bool = False) -> list[Tensor]:
        keys: list[Any] = [("next", key) if following else key for key in self.critic_keys]
        return [*[cast("Tensor", td.get(key)) for key in keys], action]

    def critic_losses(self, td: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """The critic's loss 0-d, the priority of each row ``[*]`` and the mean value 0-d, the last two detached."""
        targets = self.targets(td)
        inputs = self._inputs(td, cast("Tensor", td.get(self.action_key)))
        quantiles, taus = cast("Any", self.critic).sample(*inputs, num_taus=self.num_taus[0])
        loss = quantile_huber_loss(quantiles, targets, taus, self.kappa)
        value = quantiles.detach().mean(-1)
        return weighted_mean(loss, weights_of(td, loss)), (targets.mean(-1) - value).abs(), value.mean()

    @torch.no_grad()
    def targets(self, td: TensorDictBase) -> Tensor:
        """``[*, K']`` samples of the target distribution, without a gradient."""
        reward, discount, terminated = step_of(td, self.gamma)
        inputs = self._inputs(td, self.act(self.target_actor, td, following=True), following=True)
        following, _ = cast("Any", self.target_critic).sample(*inputs, num_taus=self.num_taus[1])
        # what the networks say of a terminal state is not looked at, NaN or not
        following = following.masked_fill(terminated.unsqueeze(-1), 0.0)
        return reward.unsqueeze(-1) + discount.unsqueeze(-1) * following

    def policy_value(self, critic: Any, td: TensorDictBase, action: Tensor) -> Tensor:
        """``[*]`` the mean over fresh levels."""
        return critic(*self._inputs(td, action), num_taus=self.num_actor_taus).squeeze(-1)
