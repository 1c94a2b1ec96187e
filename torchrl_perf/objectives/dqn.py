"""The loss of deep Q-learning on the device."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.data import TensorSpec
from torchrl.objectives import ValueEstimators

from torchrl_perf.functional.wide import widened
from torchrl_perf.objectives.checks import entry
from torchrl_perf.objectives.value_loss import DistributionalLoss, Rows, best_action, former_names, of_action

_DISTANCES = {"l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss, "l1": F.l1_loss}


class DeviceDQNLoss(DistributionalLoss):
    """Deep Q-learning (arXiv:1312.5602) for any batch shape, double (arXiv:1509.06461) if ``double_dqn``.

    The counterpart of ``torchrl.objectives.DQNLoss``, with its arguments, keys and equations. A masked action is never
    the next action, even if the network itself does not mask. Nothing waits for the host.

    Keys read: what the network reads, at the root and under "next", ``action``, ("next", "reward") and ("next",
    "terminated") ``[*, 1]``, ("next", ``mask_key``) if given; where present ``priority_weight [*]`` and
    ``steps_to_next_obs [*, 1]``. Written by :meth:`forward`: ``td_error [*]``, the absolute temporal difference
    (TorchRL writes its square, ``[*, 1]``).

    Args:
        value_network: TorchRL's ``QValueActor``, an :class:`~torchrl_perf.modules.EpsilonGreedy`, another TensorDict
            module that writes ``action_value [*, D]``, or a module of tensors that returns them.
        loss_function: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
        delay_value: make targets with a copy of the network.
        double_dqn: choose the next action by the online network.
        gamma: discount factor, 0.99 by default, as ``make_value_estimator(gamma=...)``.
        action_space: ``"categorical"``, ``"one-hot"`` or a spec; by default the network's.
        in_keys: what a module of tensors reads.
        action_key: index (int64) or one-hot actions.
        mask_key: bool ``[*, D]``, True for the allowed actions.
        **options: ``priority_key``, ``reduction``, ``use_prioritized_weights`` and ``valid_key``, as for
            :class:`DistributionalLoss`.

    Raises:
        ValueError: for an unknown loss function, another action space, ``double_dqn`` without ``delay_value``.
    """

    SUPPORTED_VALUE_ESTIMATORS = (ValueEstimators.TD0, ValueEstimators.TD1, ValueEstimators.TDLambda)

    def __init__(
        self,
        value_network: nn.Module | None = None,
        *,
        loss_function: str | None = "l2",
        delay_value: bool = True,
        double_dqn: bool = False,
        gamma: float | None = None,
        action_space: str | TensorSpec | None = None,
        in_keys: Sequence[NestedKey] = ("observation",),
        action_key: NestedKey = "action",
        mask_key: NestedKey | None = None,
        **options: Any,
    ) -> None:
        value_network, double_dqn = former_names(self, value_network, double_dqn, options)
        if loss_function not in _DISTANCES:
            raise ValueError(
                f"loss_function: expected one of {sorted(_DISTANCES)}, received {loss_function!r}. Remedy: one of "
                "these."
            )
        if double_dqn and not delay_value:
            raise ValueError("double_dqn: expected False with delay_value=False, received True. Remedy: delay_value.")
        keys: dict[str, Any] = {"in_keys": in_keys, "action_key": action_key, "mask_key": mask_key}
        options |= {"delay_value": delay_value, "action_space": action_space}
        super().__init__(value_network, gamma=gamma, double_dqn=double_dqn, **keys, **options)
        self.loss_function = loss_function

    def values(self, network: Any, td: TensorDictBase) -> Tensor:
        """``[*, D]`` values of states, or (with ``td["next"]``) next states."""
        found = self.written(network, td) if self.is_tensordict_module else network(*self.inputs(td))
        return self.check_actions(widened(cast("Tensor", found)), -1)

    def rows(self, td: TensorDictBase) -> Rows:
        """Loss, absolute temporal difference and value of each row of a batch ``[*]``."""
        value = of_action(self.values(self.network, td).unsqueeze(-1), self.action(td)).squeeze(-1)
        target = self.targets(td, value.shape)
        loss = _DISTANCES[cast("str", self.loss_function)](value, target, reduction="none")
        return Rows(loss, (value.detach() - target).abs(), value.detach())

    @torch.no_grad()
    def targets(self, td: TensorDictBase, rows: Sequence[int] | None = None) -> Tensor:
        """``[*]`` targets of rows ``[*]``, by default those of the batch, without a gradient."""
        following = cast("TensorDictBase", entry(td, "next"))
        values = self.values(self.target_network, following)
        rows = values.shape[:-1] if rows is None else rows
        choosing = self.values(self.network, following) if self.double_q else values
        action = best_action(choosing, self.next_mask(td))
        next_value = of_action(values.unsqueeze(-1), action).squeeze(-1)
        if self.lmbda is not None:
            return self.returns(td, next_value, *self.outcome(td, rows))
        reward, discount, terminated = self.step(td, rows)
        return reward + discount * next_value.masked_fill(terminated, 0.0)
