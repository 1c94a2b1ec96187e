"""What the losses of discrete, distributional Q-learning share: keys, targets, discounts, reduction."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.masked import effective_mask, of_agents
from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.functional.sac import weighted_mean


class Rows(NamedTuple):
    """What a loss says about each row of a batch.

    Attributes:
        loss: ``[*]``, with a gradient.
        priority: ``[*]``, without.
        value: ``[*]``, the mean of the distribution of the action taken, without a gradient.
    """

    loss: Tensor
    priority: Tensor
    value: Tensor


class Step(NamedTuple):
    """The environment's part of a batch.

    Attributes:
        reward: ``[*]``.
        discount: ``[*]``, gamma to the power of the steps, and 0 where the next state is terminal.
        terminated: ``[*]`` bool.
    """

    reward: Tensor
    discount: Tensor
    terminated: Tensor


def step_of(td: TensorDictBase, gamma: float) -> Step:
    """Reads rewards, flags ``[*, 1]`` and, of n-step targets, ``steps_to_next_obs [*, 1]``."""
    following = td.get("next")
    reward = following.get("reward").squeeze(-1)
    terminated = following.get("terminated").squeeze(-1)
    steps = td.get("steps_to_next_obs", None)
    discount = torch.full_like(reward, gamma) if steps is None else (gamma ** steps.squeeze(-1)).to(reward.dtype)
    return Step(reward, discount.masked_fill(terminated, 0.0), terminated)


def weights_of(td: TensorDictBase, like: Tensor) -> Tensor | None:
    """``priority_weight`` of the batch, shaped as ``like [*]``, or None where there is none."""
    weights = td.get("priority_weight", None)
    return weights if weights is None or weights.shape == like.shape else weights.reshape(like.shape)


def checked_gamma(gamma: float) -> float:
    """Returns a discount factor.

    Raises:
        ValueError: outside of [0, 1].
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma: expected a discount factor in [0, 1], received {gamma}.")
    return float(gamma)


def allowed(mask: Tensor, values: Tensor) -> Tensor:
    """A mask that broadcasts to values ``[*, D]``, with action 0 in rows that allow none.

    Args:
        mask: bool ``[*, D]``, or ``[N, D]`` of an env for all its agents, ``values [N, A, D]``.
        values: ``[*, D]``.
    """
    return effective_mask(of_agents(mask, values))


def best_action(values: Tensor, mask: Tensor | None) -> Tensor:
    """``[*]`` int64 index of the greatest of ``[*, D]`` values among the allowed; 0 in a row that allows none."""
    if mask is not None:
        values = values.masked_fill(~allowed(mask, values), -torch.inf)
    return values.argmax(-1)


def of_action(numbers: Tensor, action: Tensor) -> Tensor:
    """``[*, M]`` numbers of one action out of ``[*, D, M]``.

    Args:
        numbers: ``[*, D, M]``.
        action: ``[*]`` or ``[*, 1]`` int64 indices, or ``[*, D]`` one-hot.

    Raises:
        ValueError: for an action of another shape.
    """
    rows, actions = numbers.shape[:-2], numbers.shape[-2]
    if actions == 1:
        return numbers.squeeze(-2)
    if action.shape == (*rows, actions):
        taken = action != 0
    elif action.shape in (rows, (*rows, 1)):
        taken = action.reshape(*rows, 1) == torch.arange(actions, device=action.device)
    else:
        raise ValueError(
            f"action: expected indices {list(rows)} or one-hot {[*rows, actions]}, received {list(action.shape)}. "
            "Remedy: check action_key, and the batch dims of network and action."
        )
    # where and sum, not gather: its gradient needs no scatter and becomes part of the kernels around it
    return torch.where(taken.unsqueeze(-1), numbers, 0.0).sum(-2)


class DistributionalLoss(nn.Module):
    """Base of :class:`DeviceC51Loss` and :class:`QuantileDQNLoss`; they say what a row's loss is.

    Args:
        network: the online network of distributional values.
        gamma: discount factor.
        double: choose the next action by the online network (arXiv:1509.06461) instead of the target network.
        in_keys: what the network reads, at the root and under "next".
        action_key: index (int64) or one-hot actions.
        mask_key: bool ``[*, D]``, True for the actions that are allowed; None for all.

    Attributes:
        network: the online network.
        target_network: its copy that the targets are made of; no gradient reaches it.

    Raises:
        ValueError: for a gamma outside of [0, 1].
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
    ) -> None:
        super().__init__()
        self.gamma, self.double_q = checked_gamma(gamma), double
        self.in_keys, self.action_key, self.mask_key = list(in_keys), action_key, mask_key
        self.network = network
        self.target_network = copy.deepcopy(network).requires_grad_(False)
        self._pairs = (list(self.target_network.parameters()), list(self.network.parameters()))

    def rows(self, td: TensorDictBase) -> Rows:
        """Loss, priority and value of each row of a batch ``[*]``."""
        raise NotImplementedError

    def losses(self, td: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Loss 0-d with a gradient, priorities ``[*]`` and mean value 0-d, the last two without."""
        rows = self.rows(td)
        return weighted_mean(rows.loss, weights_of(td, rows.loss)), rows.priority, rows.value.mean()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch of any shape ``[*]``; writes ``td_error [*]``, the priorities, into it.

        Returns:
            0-d ``loss`` and, detached, ``pred_value``, the mean value of the actions taken.
        """
        loss, priority, value = self.losses(tensordict)
        tensordict.set("td_error", priority)
        return TensorDict({"loss": loss, "pred_value": value})

    def update_targets_(self, tau: float | Tensor) -> None:
        """Moves the target network towards the online one by ``tau``, in one call; 1 copies it."""
        polyak_update_(*self._pairs, tau)

    def inputs(self, td: TensorDictBase) -> list[Tensor]:
        """What the network reads, of states or (with ``td["next"]``) next states."""
        return [cast("Tensor", td.get(key)) for key in self.in_keys]

    def next_mask(self, td: TensorDictBase) -> Tensor | None:
        """``[*, D]`` actions allowed in the next states, or None."""
        return None if self.mask_key is None else td.get(("next", self.mask_key))

    def action(self, td: TensorDictBase) -> Tensor:
        """The actions taken, as they are stored."""
        return cast("Any", td.get(self.action_key))
