"""The base of the losses of discrete Q-learning: keys, networks, targets, discounts, reduction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictParams, dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import QValueActor
from torchrl.objectives import ValueEstimators

from torchrl_perf.functional.masked import effective_mask, of_agents
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.objectives.checks import entry, refuse, required
from torchrl_perf.objectives.loss_module import COMMON_OPTIONS, OffPolicyKeys, OffPolicyLoss
from torchrl_perf.objectives.td3 import bootstrap_discount
from torchrl_perf.runtime.self_capture import self_capturing

ACTION_SPACES = ("categorical", "one-hot", "one_hot")


class Rows(NamedTuple):
    """Results of a loss for each row of a batch.

    Attributes:
        loss: ``[*]``, with a gradient.
        priority: ``[*]``, without.
        value: ``[*]``, the mean of the distribution of the action taken, without a gradient.
    """

    loss: Tensor
    priority: Tensor
    value: Tensor


@dataclass
class ValueKeys(OffPolicyKeys):
    """Keys of Q-learning.

    Attributes:
        action_value: what a TensorDict module writes as the values (or log-probabilities) of all actions.
        value: of TorchRL's loss; not read.
        advantage: likewise.
        value_target: likewise.
    """

    action_value: NestedKey = "action_value"
    value: NestedKey = "chosen_action_value"
    advantage: NestedKey = "advantage"
    value_target: NestedKey = "value_target"


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
    # where and sum instead of gather: the gradient needs no scatter and fuses into the kernels around it
    return torch.where(taken.unsqueeze(-1), numbers, 0.0).sum(-2)


class DistributionalLoss(OffPolicyLoss):
    """Base of :class:`DeviceC51Loss`, :class:`QuantileDQNLoss` and :class:`DeviceDQNLoss`, which define a row's loss.

    Args:
        value_network: the online network of (distributional) values: a module of tensors; an :class:`EpsilonGreedy` on
            one, whose keys it takes; or a TensorDict module such as TorchRL's ``QValueActor``.
        gamma: discount factor, 0.99 by default.
        double_dqn: choose the next action by the online network (arXiv:1509.06461) instead of the target network.
        delay_value: make targets with a copy of the network.
        in_keys: what a module of tensors reads, at the root and under "next".
        action_key: index (int64) or one-hot actions.
        mask_key: bool ``[*, D]``, True for the actions that are allowed; None for all.
        action_space: ``"categorical"``, ``"one-hot"`` or a spec of these, which the network's number of actions is
            checked with; by default the network's own, where it has one. Either kind of action is read.
        **options: of :class:`OffPolicyLoss`; ``network`` and ``double`` for ``value_network`` and ``double_dqn``.

    Attributes:
        network: the online network.
        target_network: the network that the targets are made of; no gradient reaches it.

    Raises:
        ValueError: for a gamma outside of [0, 1], another action space, and, at a call, another number of actions.
    """

    _AcceptedKeys = ValueKeys
    default_keys = ValueKeys
    tensor_keys: ValueKeys
    value_network: Any
    value_network_params: TensorDictParams
    target_value_network_params: TensorDictParams
    SUPPORTED_VALUE_ESTIMATORS = (ValueEstimators.TD0,)
    deterministic_sampling_mode = ExplorationType.RANDOM
    """Noisy networks (arXiv:1706.10295) draw noise in the loss, without which its scale would get no gradient."""

    def __init__(
        self,
        value_network: Any,
        *,
        double_dqn: bool,
        delay_value: bool = True,
        in_keys: Sequence[NestedKey] = ("observation",),
        action_key: NestedKey = "action",
        mask_key: NestedKey | None = None,
        action_space: str | TensorSpec | None = None,
        **options: Any,
    ) -> None:
        known = ("gamma", *COMMON_OPTIONS)
        refuse(self, {name: value for name, value in options.items() if name not in known})
        super().__init__(**options)
        if isinstance(value_network, EpsilonGreedy):
            policy = value_network
            if policy.network is None:
                raise ValueError(
                    "value_network: expected an EpsilonGreedy on a network, received one that follows a policy. "
                    "Remedy: the policy itself."
                )
            value_network, in_keys, action_key = policy.network, policy.network_keys, policy.action_key
            mask_key, action_space = policy.mask_key, policy.spec if action_space is None else action_space
            self.set_keys(valid=policy.valid_key if self.tensor_keys.valid is None else self.tensor_keys.valid)
        self.double_q, self.delay_value = double_dqn, delay_value
        self.mask_key = mask_key
        self.is_tensordict_module = isinstance(value_network, TensorDictModuleBase)
        if self.is_tensordict_module:
            in_keys = value_network.in_keys
            mask_key = getattr(value_network[-1], "action_mask_key", None) if is_actor(value_network) else None
            self.mask_key = self.mask_key if mask_key is None else mask_key
            # the mask is no input of the network of values
            in_keys = [key for key in in_keys if key != self.mask_key]
        space = getattr(value_network, "spec", None) if action_space is None else action_space
        space = getattr(value_network, "action_space", None) if space is None else space
        self.num_actions = _num_actions(space, action_key)
        self.network_keys = list(in_keys)
        self.set_keys(action=action_key)
        self.add_network("value_network", value_network, delay=delay_value)

    @property
    def network(self) -> Any:
        """The online network."""
        return self.value_network

    @property
    def target_network(self) -> Any:
        """The network that the targets are made of."""
        return self.target_of("value_network")

    @property
    def double_dqn(self) -> bool:
        """Whether the online network chooses the next action."""
        return self.double_q

    def returned_keys(self) -> list[NestedKey]:
        """What :meth:`forward` returns."""
        return ["loss"] if self.reduction == "none" else ["loss", "pred_value"]

    def read_keys(self) -> list[NestedKey]:
        """Keys of a state that the network reads."""
        return self.network_keys

    def rows(self, td: TensorDictBase) -> Rows:
        """Loss, priority and value of each row of a batch ``[*]``."""
        raise NotImplementedError

    def losses(self, td: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Loss with a gradient, priorities ``[*]`` and mean value 0-d, the last two without."""
        rows = self.rows(td)
        return self.reduced(rows.loss, td), rows.priority, self.mean(rows.value, td)

    @dispatch
    @self_capturing
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch of any shape ``[*]``; writes ``td_error [*]``, the priorities, into it.

        Returns:
            0-d ``loss`` and, detached, ``pred_value``, the mean value of the actions taken; without reduction the
            losses of the rows.
        """
        batch = self.prepared(tensordict)
        rows = self.rows(batch)
        loss = self.reduced(rows.loss, batch)
        self.write_priority(tensordict, rows.priority, batch)
        if self.reduction == "none":
            return TensorDict({"loss": loss}, tensordict.batch_size)
        return TensorDict({"loss": loss, "pred_value": self.mean(rows.value, batch)})

    def inputs(self, td: TensorDictBase) -> list[Tensor]:
        """The network's inputs from states or, with ``td["next"]``, next states."""
        return [cast("Tensor", entry(td, key)) for key in self.network_keys]

    def written(self, network: Any, td: TensorDictBase) -> Tensor:
        """The output of a TensorDict module for states or, with ``td["next"]``, next states."""
        inputs = td.select(*self.network_keys)
        if is_actor(network):
            return cast("Tensor", entry(network[0](inputs), self.tensor_keys.action_value))
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            return cast("Tensor", entry(network(inputs), self.tensor_keys.action_value))

    def check_actions(self, values: Tensor, dim: int) -> Tensor:
        """Returns values of actions unchanged, once their number is checked.

        Args:
            values: the network's.
            dim: the dim of the actions.

        Raises:
            ValueError: where there are fewer dims, or another number of actions than in the action space.
        """
        if values.ndim < -dim or (self.num_actions is not None and values.shape[dim] != self.num_actions):
            actions = "D" if self.num_actions is None else self.num_actions
            expected = ["*", actions, *["K"] * (-dim - 1)]
            raise ValueError(
                f"value_network: expected values {expected} of each of the actions, received {list(values.shape)}. "
                "Remedy: as many outputs as the action space has actions."
            )
        return values

    def step(self, td: TensorDictBase, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Reward, discount (0 where the next state is terminal) and whether it is, ``[*]`` each."""
        reward, terminated = self.outcome(td, rows)
        return reward, bootstrap_discount(self, td, reward, terminated), terminated

    def next_mask(self, td: TensorDictBase) -> Tensor | None:
        """``[*, D]`` actions allowed in the next states, or None."""
        return None if self.mask_key is None else td.get(("next", self.mask_key))

    def action(self, td: TensorDictBase) -> Tensor:
        """The actions taken, as they are stored."""
        return cast("Any", entry(td, self.action_key))


def former_names(owner: object, value_network: Any, double_dqn: bool, options: dict[str, Any]) -> tuple[Any, bool]:
    """Network and double Q-learning, also by the names ``network`` and ``double``, which are taken from ``options``."""
    network = options.pop("network", value_network)
    required(owner, value_network=network)
    return network, options.pop("double", double_dqn)


def is_actor(network: Any) -> bool:
    """Whether a module is a sequence of a network of values and a module that acts on them."""
    return isinstance(network, QValueActor)


def of_tensors(network: Any) -> Any:
    """The module of tensors in an :class:`EpsilonGreedy`, in TorchRL's ``QValueActor`` or in one TensorDict module."""
    network = network.network if isinstance(network, EpsilonGreedy) else network
    network = network[0] if is_actor(network) else network
    return network.module if isinstance(network, TensorDictModule) else network


def _num_actions(space: Any, action_key: NestedKey) -> int | None:
    """The number of actions of a space, None where it is not known.

    Raises:
        ValueError: for one that is neither categorical nor one-hot.
    """
    if isinstance(space, Composite):
        space = space[action_key]
    if space is None or (isinstance(space, str) and space in ACTION_SPACES):
        return None
    # in TorchRL the specs of several actions derive from these
    if isinstance(space, Categorical | OneHot) and not isinstance(space, Binary | MultiCategorical | MultiOneHot):
        return int(space.space.n)
    raise ValueError(
        f"action_space: expected 'categorical', 'one-hot' or a spec of these, received {space!r}. Remedy: one action "
        "out of D, or torchrl.objectives.DQNLoss for several in one."
    )
