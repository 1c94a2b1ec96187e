"""The loss of QR-DQN and IQN on the device."""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.losses.distributional import check_kappa, quantile_huber_loss
from torchrl_perf.functional.wide import widened
from torchrl_perf.objectives.checks import entry
from torchrl_perf.objectives.value_loss import (
    DistributionalLoss,
    Rows,
    allowed,
    best_action,
    former_names,
    of_action,
    of_tensors,
)

Greedy = Literal["mean", "per_quantile"]


class QuantileDQNLoss(DistributionalLoss):
    """Quantile regression Q-learning for any batch shape: QR-DQN (arXiv:1710.10044) or IQN (arXiv:1806.06923).

    Which of the two it is depends on the network: a :class:`~torchrl_perf.modules.QuantileMLP` has fixed levels, an
    :class:`~torchrl_perf.modules.ImplicitQuantileMLP` draws them. Every quantile of the action taken is compared with
    every target quantile. Nothing waits for the host.

    Keys read: ``in_keys`` at the root and under "next", ``action``, ("next", "reward") and ("next", "terminated")
    ``[*, 1]``, ("next", ``mask_key``) if given; where present ``priority_weight [*]`` and ``steps_to_next_obs [*, 1]``.
    Written by :meth:`forward`: ``td_error [*]``, the absolute difference of the mean of targets and of quantiles.

    Args:
        value_network: has ``sample(*inputs, num_taus=...) -> (quantiles [*, D, K], taus)`` and ``means(*inputs) -> [*,
            D]``; or an :class:`EpsilonGreedy` or TorchRL's ``QValueActor`` on such a network. The targets are those of
            a risk-neutral policy, whatever risk the network acts on.
        gamma: discount factor.
        double_dqn: choose the next action by the means of the online network instead of the target network.
        delay_value: make targets with a copy of the network.
        kappa: of the Huber loss, in the unit of returns; 0 is the pinball loss.
        num_taus: K of the quantiles of the action taken, and of the targets; fixed levels have their own.
        greedy: ``"mean"``: one next action, the best by the mean of its quantiles, as in the paper; ``"per_quantile"``:
            for each target quantile the greatest over the actions, which overestimates.
        in_keys: what the network reads.
        action_key: index (int64) or one-hot actions.
        mask_key: bool ``[*, D]``, True for the allowed actions.
        **options: ``action_space``, ``priority_key``, ``reduction``, ``use_prioritized_weights`` and ``valid_key``, as
            for :class:`DistributionalLoss`; ``network`` and ``double`` for ``value_network`` and ``double_dqn``.

    Raises:
        ValueError: for a network of another kind, options out of range, and ``"per_quantile"`` with ``double_dqn``.
    """

    def __init__(
        self,
        value_network: nn.Module | None = None,
        *,
        gamma: float = 0.99,
        double_dqn: bool = False,
        kappa: float = 1.0,
        num_taus: tuple[int, int] = (8, 8),
        greedy: Greedy = "mean",
        in_keys: Sequence[NestedKey] = ("observation",),
        action_key: NestedKey = "action",
        mask_key: NestedKey | None = None,
        **options: Any,
    ) -> None:
        value_network, double_dqn = former_names(self, value_network, double_dqn, options)
        network = of_tensors(value_network)
        if not (hasattr(network, "sample") and hasattr(network, "means")):
            raise ValueError(
                "network: expected one with sample(*inputs, num_taus) and means(*inputs), received "
                f"{type(network).__name__}. Remedy: QuantileMLP for QR-DQN, ImplicitQuantileMLP for IQN."
            )
        if greedy not in ("mean", "per_quantile"):
            raise ValueError(f"greedy: expected 'mean' or 'per_quantile', received {greedy!r}.")
        if greedy == "per_quantile" and double_dqn:
            raise ValueError("double: expected False with greedy='per_quantile', which takes no argmax, received True.")
        keys: dict[str, Any] = {"in_keys": in_keys, "action_key": action_key, "mask_key": mask_key}
        super().__init__(value_network, gamma=gamma, double_dqn=double_dqn, **keys, **options)
        self.num_taus = checked_counts(num_taus)
        self.kappa, self.greedy = check_kappa(kappa), greedy

    def rows(self, td: TensorDictBase) -> Rows:
        """Quantile Huber loss, absolute difference of means, and mean value of each row of a batch ``[*]``."""
        quantiles, taus = of_tensors(self.network).sample(*self.inputs(td), num_taus=self.num_taus[0])
        quantiles = of_action(self.check_actions(widened(quantiles), -2), self.action(td))
        targets = self.targets(td, quantiles.shape[:-1])
        loss = quantile_huber_loss(quantiles, targets, widened(taus), self.kappa)
        value = quantiles.detach().mean(-1)
        return Rows(loss, (targets.mean(-1) - value).abs(), value)

    @torch.no_grad()
    def targets(self, td: TensorDictBase, rows: Sequence[int] | None = None) -> Tensor:
        """``[*, K']`` samples or quantiles of the target distribution, without a gradient, of rows ``[*]``."""
        inputs = self.inputs(cast("TensorDictBase", entry(td, "next")))
        quantiles, _ = of_tensors(self.target_network).sample(*inputs, num_taus=self.num_taus[1])
        quantiles = widened(quantiles)
        reward, discount, terminated = self.step(td, quantiles.shape[:-2] if rows is None else rows)
        mask = self.next_mask(td)
        if self.greedy == "per_quantile":
            following = _greatest(quantiles, mask)
        else:
            means = widened(of_tensors(self.network).means(*inputs)) if self.double_q else quantiles.mean(-1)
            following = of_action(quantiles, best_action(means, mask))
        # what the network says of a terminal state is not looked at, NaN or not
        following = following.masked_fill(terminated.unsqueeze(-1), 0.0)
        return reward.unsqueeze(-1) + discount.unsqueeze(-1) * following


def checked_counts(num_taus: tuple[int, int]) -> tuple[int, int]:
    """Returns the numbers of predicted and of target quantiles.

    Raises:
        ValueError: for one below 1.
    """
    predicted, target = num_taus
    if min(predicted, target) < 1:
        raise ValueError(f"num_taus: expected at least one quantile and one target, received {num_taus}.")
    return predicted, target


def _greatest(quantiles: Tensor, mask: Tensor | None) -> Tensor:
    """``[*, K]`` the greatest over the allowed actions, for each level of its own."""
    if mask is not None:
        quantiles = quantiles.masked_fill(~allowed(mask, quantiles[..., 0]).unsqueeze(-1), -torch.inf)
    return quantiles.amax(-2)
