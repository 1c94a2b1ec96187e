"""The losses of AC-IQN: a deterministic actor on a critic of quantiles at any level."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.objectives import ValueEstimators

from torchrl_perf.functional.losses.distributional import check_kappa, quantile_huber_loss
from torchrl_perf.functional.wide import widened
from torchrl_perf.objectives.checks import refuse, required
from torchrl_perf.objectives.loss_module import COMMON_OPTIONS
from torchrl_perf.objectives.quantile import checked_counts
from torchrl_perf.objectives.td3 import DeterministicPolicyLoss, bootstrap_discount


class ACIQNLoss(DeterministicPolicyLoss):
    """Actor-critic with implicit quantiles: IQN (arXiv:1806.06923) for continuous actions, in the manner of DDPG.

    The critic learns ``Z_tau(s, a)`` by quantile regression on ``r + gamma Z'_tau'(s', mu'(s'))``, with target actor
    ``mu'`` and target critic ``Z'``; the actor raises the mean over the levels of ``Z_tau(s, mu(s))``, a gradient that
    reaches the actor alone. Nothing waits for the host.

    Keys read: the actor's ``in_keys`` and ``critic_keys``, at the root and under "next", ``action``, ("next", "reward")
    and ("next", "terminated") ``[*, 1]``; where present ``priority_weight [*]`` and ``steps_to_next_obs [*, 1]``.
    Written by :meth:`forward`: ``td_error [*]``, the absolute difference of the mean of targets and of quantiles.

    Args:
        actor_network: a TensorDict module that writes the action, such as a ``DeterministicActor`` with ``"atan"``.
        qvalue_network: a network such as an ``ImplicitQuantileCritic``: ``sample(*observations, action, num_taus=...)``
            gives quantiles ``[*, K]`` and levels, ``critic(*observations, action, num_taus=...)`` means ``[*, 1]``.
        gamma: discount factor, 0.99 by default, as ``make_value_estimator(gamma=...)``.
        kappa: of the Huber loss, in the unit of returns; 0 is the pinball loss.
        num_taus: K of the quantiles of the action taken, and of the targets.
        num_actor_taus: K of the mean that the actor raises.
        dropped_target_taus: so many quantiles more are drawn for a target, and the largest left out, in each row: a
            single critic then overestimates less, in the manner of truncated quantile critics (arXiv:2005.04269).
        critic_keys: the observations that the critic reads; None for the actor's ``in_keys``.
        delay_actor: make targets with a copy of the actor.
        delay_qvalue: make targets with a copy of the critic.
        **options: ``reduction``, ``use_prioritized_weights``, ``priority_key`` and ``valid_key``, as for
            :class:`DeviceTD3Loss`; ``actor`` and ``critic`` for ``actor_network`` and ``qvalue_network``.

    Raises:
        ValueError: for a critic of another kind, and options out of range.
    """

    SUPPORTED_VALUE_ESTIMATORS = (ValueEstimators.TD0,)

    def __init__(
        self,
        actor_network: nn.Module | None = None,
        qvalue_network: nn.Module | None = None,
        *,
        gamma: float | None = None,
        kappa: float = 1.0,
        num_taus: tuple[int, int] = (8, 8),
        num_actor_taus: int = 32,
        dropped_target_taus: int = 0,
        critic_keys: Sequence[NestedKey] | None = None,
        delay_qvalue: bool = True,
        **options: Any,
    ) -> None:
        actor, critic = options.pop("actor", actor_network), options.pop("critic", qvalue_network)
        known = ("delay_actor", "separate_losses", *COMMON_OPTIONS)
        refuse(self, {name: value for name, value in options.items() if name not in known})
        required(self, actor_network=actor, qvalue_network=critic)
        if not hasattr(critic, "sample"):
            raise ValueError(
                "critic: expected a network with sample(*observations, action, num_taus), received "
                f"{type(critic).__name__}. Remedy: ImplicitQuantileCritic."
            )
        if options.get("separate_losses"):
            raise ValueError(
                "separate_losses: expected False, since quantiles are drawn by another method of the critic, received "
                "True. Remedy: networks that share no parameters."
            )
        super().__init__(actor, gamma=gamma, **options)
        self.kappa, self.num_taus = check_kappa(kappa), checked_counts(num_taus)
        self.num_actor_taus = checked_counts((num_actor_taus, 1))[0]
        if type(dropped_target_taus) is not int or dropped_target_taus < 0:
            raise ValueError(
                f"dropped_target_taus: expected 0 or a positive integer, received {dropped_target_taus!r}. Remedy: 0 "
                "keeps all."
            )
        self.dropped_target_taus = dropped_target_taus
        keys = getattr(actor, "network_keys", actor.in_keys) if critic_keys is None else critic_keys
        self.critic_keys = list(cast("Sequence[NestedKey]", keys))
        self.add_network("qvalue_network", critic, delay=delay_qvalue)

    def read_keys(self) -> list[NestedKey]:
        """What actor and critic read of a state."""
        return list(dict.fromkeys([*self.actor_network.in_keys, *self.critic_keys]))

    def _inputs(self, td: TensorDictBase, action: Tensor, *, following: bool = False) -> list[Tensor]:
        keys: list[Any] = [("next", key) if following else key for key in self.critic_keys]
        return [*[cast("Tensor", td.get(key)) for key in keys], action]

    def critic_losses(self, td: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """The critic's loss 0-d, the priority of each row ``[*]`` and the mean value 0-d, the last two detached."""
        targets = self.targets(td)
        inputs = self._inputs(td, cast("Tensor", td.get(self.action_key)))
        quantiles, taus = cast("Any", self.critic).sample(*inputs, num_taus=self.num_taus[0])
        quantiles = widened(quantiles)
        if quantiles.shape[:-1] != td.batch_size:
            raise ValueError(
                f"critic: expected quantiles {[*td.batch_size, 'K']}, received {list(quantiles.shape)}. Remedy: one "
                "distribution for each row of the batch."
            )
        loss = quantile_huber_loss(quantiles, targets, widened(taus), self.kappa)
        value = quantiles.detach().mean(-1)
        return self.reduced(loss, td), (targets.mean(-1) - value).abs(), self.mean(value, td)

    @torch.no_grad()
    def targets(self, td: TensorDictBase) -> Tensor:
        """``[*, K']`` samples of the target distribution, without a gradient."""
        reward, terminated = self.outcome(td, td.batch_size)
        discount = bootstrap_discount(self, td, reward, terminated)
        inputs = self._inputs(td, self.act(self.target_actor, td, following=True), following=True)
        drawn = self.num_taus[1] + self.dropped_target_taus
        following, _ = cast("Any", self.target_critic).sample(*inputs, num_taus=drawn)
        if self.dropped_target_taus:
            following = following.sort(-1).values[..., : self.num_taus[1]]
        # values of a terminal state are ignored, NaN or not
        following = widened(following).masked_fill(terminated.unsqueeze(-1), 0.0)
        return reward.unsqueeze(-1) + discount.unsqueeze(-1) * following

    def policy_value(self, critic: Any, td: TensorDictBase, action: Tensor) -> Tensor:
        """``[*]`` the mean over fresh levels."""
        return widened(critic(*self._inputs(td, action), num_taus=self.num_actor_taus)).squeeze(-1)
