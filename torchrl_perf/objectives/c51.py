"""The loss of C51 and Rainbow on the device."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import DistributionalQValueActor

from torchrl_perf.functional.losses.distributional import categorical_projection, check_support
from torchrl_perf.functional.wide import widened
from torchrl_perf.objectives.checks import entry
from torchrl_perf.objectives.value_loss import (
    DistributionalLoss,
    Rows,
    best_action,
    former_names,
    of_action,
    of_tensors,
)


class DeviceC51Loss(DistributionalLoss):
    """Categorical distributional Q-learning (C51, arXiv:1707.06887; Rainbow, arXiv:1710.02298) for any batch shape.

    The cross-entropy of the distribution of the action taken with the projected target. TorchRL's
    ``DistributionalDQNLoss``, whose arguments it has, computes the same on the CPU, for batches ``[B]`` with B > 1, and
    always with double Q-learning. Nothing here waits for the host.

    Keys read: ``in_keys`` at the root and under "next", ``action``, ("next", "reward") and ("next", "terminated")
    ``[*, 1]``, ("next", ``mask_key``) if given; where present ``priority_weight [*]`` and ``steps_to_next_obs [*, 1]``,
    the steps of an n-step target. Written by :meth:`forward`: ``td_error [*]``, the cross-entropy of each row.

    Args:
        value_network: has ``support [M]`` and ``logits(*inputs) -> [*, D, M]``, such as a ``CategoricalMLP``; an
            :class:`EpsilonGreedy` or TorchRL's ``QValueActor`` on one; or TorchRL's ``DistributionalQValueActor``.
        gamma: discount factor.
        double_dqn: choose the next action by the online network instead of the target network.
        delay_value: make targets with a copy of the network.
        in_keys: what the network reads.
        action_key: index (int64) or one-hot actions.
        mask_key: bool ``[*, D]``, True for the allowed actions.
        reward_bounds: least and greatest reward of one step, to check that the support can represent all returns; None
            does not check.
        horizon: longest episode in steps for that check; None is without end.
        **options: ``action_space``, ``priority_key``, ``reduction``, ``use_prioritized_weights`` and ``valid_key``, as
            for :class:`DistributionalLoss`; ``network`` and ``double`` for ``value_network`` and ``double_dqn``.

    Raises:
        ValueError: for a network of another kind, a gamma outside of [0, 1], and a support that is too narrow.
    """

    def __init__(
        self,
        value_network: nn.Module | None = None,
        *,
        gamma: float = 0.99,
        double_dqn: bool = True,
        delay_value: bool = True,
        in_keys: Sequence[NestedKey] = ("observation",),
        action_key: NestedKey = "action",
        mask_key: NestedKey | None = None,
        reward_bounds: tuple[float, float] | None = None,
        horizon: int | None = None,
        **options: Any,
    ) -> None:
        value_network, double_dqn = former_names(self, value_network, double_dqn, options)
        support = support_of(value_network)
        if reward_bounds is not None:
            # once, at construction
            v_min, v_max = float(support[0]), float(support[-1])
            check_support(v_min, v_max, reward_bounds, gamma, horizon)
        super().__init__(
            value_network,
            gamma=gamma,
            double_dqn=double_dqn,
            delay_value=delay_value,
            in_keys=in_keys,
            action_key=action_key,
            mask_key=mask_key,
            **options,
        )

    def logits(self, network: Any, td: TensorDictBase) -> Tensor:
        """``[*, D, M]`` of states, or (with ``td["next"]``) next states.

        Raises:
            ValueError: for another number of atoms or actions.
        """
        if isinstance(network, DistributionalQValueActor):
            logits = widened(self.written(network, td)).transpose(-1, -2)
        else:
            logits = widened(of_tensors(network).logits(*self.inputs(td)))
        atoms = self.support.shape[0]
        if logits.ndim < 2 or logits.shape[-1] != atoms:
            raise ValueError(
                f"value_network: expected logits [*, D, {atoms}], one for each atom of the support, received "
                f"{list(logits.shape)}. Remedy: as many outputs as actions times atoms."
            )
        return self.check_actions(logits, -2)

    @property
    def support(self) -> Tensor:
        """``[M]`` the atoms."""
        return widened(support_of(self.value_network))

    def rows(self, td: TensorDictBase) -> Rows:
        """Cross-entropy (as loss and priority) and mean value of each row of a batch ``[*]``."""
        logits = self.logits(self.network, td)
        log_probs = of_action(logits, self.action(td)).log_softmax(-1)
        loss = -(self.targets(td, log_probs.shape[:-1]) * log_probs).sum(-1)
        value = (log_probs.detach().exp() * self.support).sum(-1)
        return Rows(loss, loss.detach(), value)

    @torch.no_grad()
    def targets(self, td: TensorDictBase, rows: Sequence[int] | None = None) -> Tensor:
        """``[*, M]`` probabilities to learn, without a gradient, of rows ``[*]``, by default those of the batch."""
        support, following = self.support, cast("TensorDictBase", entry(td, "next"))
        logits = self.logits(self.target_network, following)
        rows = logits.shape[:-2] if rows is None else rows
        reward, discount, terminated = self.step(td, rows)
        choosing = self.logits(self.network, following) if self.double_q else logits
        action = best_action((choosing.softmax(-1) * support).sum(-1), self.next_mask(td))
        probs = of_action(logits, action).softmax(-1)
        # what the networks say of a terminal state is not looked at, NaN or not
        probs = probs.masked_fill(terminated.unsqueeze(-1), 1 / support.shape[0])
        return categorical_projection(probs, reward, discount, support)


def support_of(network: Any) -> Tensor:
    """The atoms ``[M]`` of a network.

    Raises:
        ValueError: for a network without, or of another kind.
    """
    if isinstance(network, DistributionalQValueActor):
        return cast("Tensor", network[-1].support)
    network = of_tensors(network)
    support = getattr(network, "support", None)
    if not (isinstance(support, Tensor) and hasattr(network, "logits")):
        raise ValueError(
            f"network: expected one with a support [M] and logits(*inputs) -> [*, D, M], received "
            f"{type(network).__name__}. Remedy: CategoricalMLP, or TorchRL's DistributionalQValueActor."
        )
    return support
