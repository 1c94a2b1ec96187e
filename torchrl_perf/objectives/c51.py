"""The loss of C51 and Rainbow on the device."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.distributional import categorical_projection, check_support
from torchrl_perf.objectives.value_loss import DistributionalLoss, Rows, best_action, of_action, step_of


class CategoricalNetwork(Protocol):
    """What the loss asks of a network, such as :class:`~torchrl_perf.modules.CategoricalMLP`."""

    support: Tensor

    def logits(self, *inputs: Tensor) -> Tensor:
        """``[*, D, M]`` log-probabilities of the atoms, up to a constant for each action."""
        ...


class DeviceC51Loss(DistributionalLoss):
    """Categorical distributional Q-learning (C51, arXiv:1707.06887; Rainbow, arXiv:1710.02298) for any batch shape.

    The cross-entropy of the distribution of the action taken with the projected target. TorchRL's
    ``DistributionalDQNLoss`` computes the same on the CPU, for batches ``[B]`` with B > 1, and always with double
    Q-learning. Nothing here waits for the host.

    Keys read: ``in_keys`` at the root and under "next", ``action``, ("next", "reward") and ("next", "terminated")
    ``[*, 1]``, ("next", ``mask_key``) if given; where present ``priority_weight [*]`` and ``steps_to_next_obs [*, 1]``,
    the steps of an n-step target. Written by :meth:`forward`: ``td_error [*]``, the cross-entropy of each row.

    Args:
        network: has ``support [M]`` and ``logits(*inputs) -> [*, D, M]``, such as a ``CategoricalMLP``.
        gamma: discount factor.
        double: choose the next action by the online network instead of the target network.
        in_keys: what the network reads.
        action_key: index (int64) or one-hot actions.
        mask_key: bool ``[*, D]``, True for the allowed actions.
        reward_bounds: least and greatest reward of one step, to check that the support can represent all returns; None
            does not check.
        horizon: longest episode in steps for that check; None is without end.

    Raises:
        ValueError: for a network of another kind, a gamma outside of [0, 1], and a support that is too narrow.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        gamma: float = 0.99,
        double: bool = True,
        in_keys: Sequence[NestedKey] = ("observation",),
        action_key: NestedKey = "action",
        mask_key: NestedKey | None = None,
        reward_bounds: tuple[float, float] | None = None,
        horizon: int | None = None,
    ) -> None:
        support = getattr(network, "support", None)
        if not (isinstance(support, Tensor) and hasattr(network, "logits")):
            raise ValueError(
                f"network: expected one with a support [M] and logits(*inputs) -> [*, D, M], received "
                f"{type(network).__name__}. Remedy: CategoricalMLP."
            )
        if reward_bounds is not None:
            # once, at construction
            v_min, v_max = float(support[0]), float(support[-1])
            check_support(v_min, v_max, reward_bounds, gamma, horizon)
        super().__init__(network, gamma=gamma, double=double, in_keys=in_keys, action_key=action_key, mask_key=mask_key)

    def rows(self, td: TensorDictBase) -> Rows:
        """Cross-entropy (as loss and priority) and mean value of each row of a batch ``[*]``."""
        network = cast("CategoricalNetwork", self.network)
        log_probs = of_action(network.logits(*self.inputs(td)), self.action(td)).log_softmax(-1)
        loss = -(self.targets(td) * log_probs).sum(-1)
        value = (log_probs.detach().exp() * network.support).sum(-1)
        return Rows(loss, loss.detach(), value)

    @torch.no_grad()
    def targets(self, td: TensorDictBase) -> Tensor:
        """``[*, M]`` probabilities to learn, without a gradient."""
        support = cast("Any", self.network).support
        reward, discount, terminated = step_of(td, self.gamma)
        inputs = self.inputs(cast("TensorDictBase", td.get("next")))
        logits = cast("Any", self.target_network).logits(*inputs)
        choosing = cast("Any", self.network).logits(*inputs) if self.double_q else logits
        action = best_action((choosing.softmax(-1) * support).sum(-1), self.next_mask(td))
        following = of_action(logits, action).softmax(-1)
        # what the networks say of a terminal state is not looked at, NaN or not
        following = following.masked_fill(terminated.unsqueeze(-1), 1 / support.shape[0])
        return categorical_projection(following, reward, discount, support)
