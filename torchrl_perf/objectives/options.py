"""The loss of a policy over options."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.losses.options import masked_mean, masked_standardize, smdp_target
from torchrl_perf.functional.losses.ppo import clipped_surrogate
from torchrl_perf.functional.masked import masked_entropy, masked_expectation
from torchrl_perf.modules.option_set import ACTIVE_KEY, AVAILABLE_KEY, LOG_PROB_KEY
from torchrl_perf.modules.options import OptionController
from torchrl_perf.objectives.checks import column, entry, refuse
from torchrl_perf.objectives.loss_module import OffPolicyKeys, OffPolicyLoss

_OPTIONS = ("use_prioritized_weights", "priority_key", "valid_key", "reduction")


@dataclass
class OptionKeys(OffPolicyKeys):
    """Keys of transitions between choices of options, besides those of the controller.

    Attributes:
        gamma: ``gamma ** n`` of an option of n steps ``[*, 1]``.
        mask: bool ``[*]``, False for rows that are no transitions, where present.
    """

    gamma: NestedKey = "gamma"
    mask: NestedKey = "mask"


class OptionLoss(OffPolicyLoss):
    """Actor-critic loss of an :class:`~torchrl_perf.modules.OptionController` on semi-Markov transitions.

    A choice of an option is an action that takes n steps (Sutton, Precup and Singh, 1999). With its discounted reward R
    the target is ``y = R + gamma^n V(s')``, without the second term where the option ended in a terminal state, and
    ``V(s') = sum_o pi(o | s') Q(s', o)`` over the options that are available in s'. The policy's loss is
    ``-mean(log pi(o | s) A)`` with ``A = y - V(s)``, standardised over the batch; or, with ``clip``, PPO's surrogate
    with the ratio to the probability of the choice when it was made (arXiv:1707.06347), which makes up for the age of
    replayed transitions. The baseline is the value of the state: that of the option chosen, ``Q(s, o)``, would leave
    nothing to learn from once it is right, since ``E[y | s, o] = Q(s, o)`` for each option.

    Keys read, as :class:`~torchrl_perf.transforms.OptionSegments` writes them: what the controller's networks and rules
    read, at the root and under "next"; "active_option" int64 ``[*]``, "option_log_prob" ``[*]``, "option_available"
    bool ``[*, O]``, "gamma" ``[*, 1]`` (``gamma ** n``), ("next", "reward") ``[*, 1]`` (R) and ("next", "terminated")
    bool ``[*, 1]``; where present "priority_weight" ``[*]``, and "mask" bool ``[*]``, False for rows that are no
    transitions: they count for nothing, NaN or not, but their root observations have to be finite. Written: "td_error"
    ``[*]``, ``|y - Q(s, o)|``, 0 outside of the mask.

    Args:
        controller: holds the selector and the rules.
        value: maps the controller's inputs to option values ``[*, O]``, or to the state's value ``[*, 1]``.
        clip: epsilon of the ratio clip; None for the plain policy gradient, of transitions from the present policy.
        value_coeff: weight of the value's loss, a mean of squares.
        entropy_coeff: weight of the entropy of the choice.
        normalize_advantage: standardise the advantage over the transitions of the batch.
        delay_value: take V(s') from a copy of the value network, which :meth:`update_targets_` and TorchRL's
            ``SoftUpdate`` move.
        **options: ``use_prioritized_weights``, ``priority_key`` and ``valid_key``, as for :class:`DeviceSACLoss`.
            There is no ``gamma``, which is in the transitions, and no ``reduction`` but the mean.

    Raises:
        ValueError: for a clip outside (0, 1), negative weights, another reduction.
    """

    _AcceptedKeys = OptionKeys
    default_keys = OptionKeys
    tensor_keys: OptionKeys
    actor_network: Any
    value_network: Any
    actor_network_params: TensorDictParams
    value_network_params: TensorDictParams
    target_value_network_params: TensorDictParams
    SUPPORTED_VALUE_ESTIMATORS = ()

    def __init__(
        self,
        controller: OptionController,
        value: nn.Module,
        *,
        clip: float | None = 0.2,
        value_coeff: float = 1.0,
        entropy_coeff: float = 0.01,
        normalize_advantage: bool = True,
        delay_value: bool = False,
        **options: Any,
    ) -> None:
        refuse(self, {name: options[name] for name in options if name not in _OPTIONS})
        super().__init__(**options)
        if self.reduction != "mean":
            raise ValueError(
                f"reduction: expected 'mean', over the transitions of the batch, received {self.reduction!r}. Remedy: "
                "leave it out."
            )
        if clip is not None and not 0 < clip < 1:
            raise ValueError(f"clip: expected epsilon in (0, 1) or None, received {clip}.")
        if value_coeff < 0 or entropy_coeff < 0:
            raise ValueError(f"coefficients: expected none below 0, received {value_coeff} and {entropy_coeff}.")
        self.add_network("actor_network", controller, delay=False)
        self.add_network("value_network", value, delay=delay_value)
        self.delay_value = delay_value
        self.clip_range = None if clip is None else (math.log1p(-clip), math.log1p(clip))
        self.value_coeff, self.entropy_coeff = value_coeff, entropy_coeff
        self.normalize_advantage = normalize_advantage

    @property
    def controller(self) -> OptionController:
        """The policy over options."""
        return self.actor_network

    @property
    def value(self) -> Any:
        """The network of values."""
        return self.value_network

    @property
    def target_value(self) -> Any:
        """The copy that V(s') is taken from, None where it is the network itself."""
        return self.target_of("value_network") if self.delay_value else None

    def returned_keys(self) -> list[NestedKey]:
        """What :meth:`forward` returns."""
        losses = ["loss_option_policy", "loss_option_value", "loss_option_entropy"]
        return [*losses, "option_entropy", "option_value", "option_clip_fraction", "option_kl"]

    def read_keys(self) -> list[NestedKey]:
        """What the controller and its rules read of a state."""
        return list(self.controller.network_keys)

    def action_keys(self) -> list[NestedKey]:
        """The choice, when it was made."""
        return [ACTIVE_KEY, LOG_PROB_KEY, AVAILABLE_KEY, self.tensor_keys.gamma]

    def values(self, network: nn.Module, tensordict: TensorDictBase) -> Tensor:
        """What a value network says of the states ``[*]``: ``[*, O]``, or ``[*, 1]``."""
        return network(*[tensordict.get(key) for key in self.controller.network_keys])

    def target(self, tensordict: TensorDictBase) -> Tensor:
        """``y [*]``, without a gradient."""
        keys, following = self.tensor_keys, tensordict.get("next")
        rows = tensordict.get(ACTIVE_KEY).shape
        with torch.no_grad():
            values = self.values(self.target_of("value_network"), following)
            available = self.controller.available(following)
            next_value = _state_value(self.controller.log_probs(following, available), values)
        return smdp_target(
            column(entry(following, keys.reward), rows, keys.reward),
            column(entry(tensordict, keys.gamma), rows, keys.gamma),
            column(entry(following, keys.terminated), rows, keys.terminated),
            next_value,
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The losses of transitions ``[*]``; writes "td_error".

        Returns:
            0-d ``loss_option_policy``, ``loss_option_value``, ``loss_option_entropy``, and, detached,
            ``option_entropy``, ``option_value``, ``option_clip_fraction`` and ``option_kl``, an estimate of the
            divergence from the policy that made the choices. All are 0 where the mask has no row.
        """
        option, keys = tensordict.get(ACTIVE_KEY), self.tensor_keys
        mask = tensordict.get(keys.mask, None)
        mask = torch.ones_like(option, dtype=torch.bool) if mask is None else column(mask, option.shape, keys.mask)
        valid = self.valid(tensordict, option.shape)
        mask = mask if valid is None else mask & valid
        weights = self.weights(tensordict, option.shape)
        weights = mask if weights is None else torch.where(mask, weights, 0.0)

        log_probs = self.controller.log_probs(tensordict, tensordict.get(AVAILABLE_KEY))
        values = self.values(self.value, tensordict)
        target = self.target(tensordict)
        predicted = values.squeeze(-1) if values.shape[-1] == 1 else _chosen(values, option)
        advantage = target - _state_value(log_probs, values).detach()
        if self.normalize_advantage:
            advantage = masked_standardize(advantage, mask)

        # a row outside of the mask may name an option that is not available there
        log_prob = torch.where(mask, _chosen(log_probs, option), 0.0)
        log_ratio = log_prob - torch.where(mask, tensordict.get(LOG_PROB_KEY), 0.0)
        if self.clip_range is None:
            gain, clipped = log_prob * advantage, torch.zeros_like(mask)
        else:
            gain, clipped = clipped_surrogate(log_ratio, advantage, *self.clip_range)
        entropy = masked_mean(masked_entropy(log_probs), weights)
        error = torch.where(mask, predicted - target, 0.0)
        tensordict.set(keys.priority, error.detach().abs())
        moved = log_ratio.detach()
        return TensorDict(
            {
                "loss_option_policy": -masked_mean(gain, weights),
                "loss_option_value": self.value_coeff * masked_mean(error.square(), weights),
                "loss_option_entropy": -self.entropy_coeff * entropy,
                "option_entropy": entropy.detach(),
                "option_value": masked_mean(predicted.detach(), weights),
                "option_clip_fraction": masked_mean(clipped.to(gain.dtype), weights),
                "option_kl": masked_mean(moved.exp() - 1 - moved, weights),
            }
        )


def _chosen(values: Tensor, option: Tensor) -> Tensor:
    return values.gather(-1, option.unsqueeze(-1)).squeeze(-1)


def _state_value(log_probs: Tensor, values: Tensor) -> Tensor:
    """``[*]``: the mean of option values ``[*, O]`` under the policy, or the state's value ``[*, 1]`` itself."""
    return cast("Tensor", values.squeeze(-1) if values.shape[-1] == 1 else masked_expectation(log_probs, values))
