"""The losses of DDPG and TD3, in parts that a compiled update can call separately."""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams, dispatch
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Bounded, Composite, TensorSpec

from torchrl_perf.functional.losses.sac import critic_rows
from torchrl_perf.functional.wide import widened
from torchrl_perf.objectives.checks import refuse, required
from torchrl_perf.objectives.loss_module import OffPolicyKeys, OffPolicyLoss
from torchrl_perf.objectives.sac import (
    VALUE_KEY,
    check_critic,
    check_loss_function,
    state_action_values,
    without_gradient,
    without_shared,
)
from torchrl_perf.runtime.self_capture import self_capturing

Bounds = tuple[float | Tensor, float | Tensor]


@dataclass
class PolicyGradientKeys(OffPolicyKeys):
    """Keys of losses with a deterministic actor.

    Attributes:
        state_action_value: what the critics write.
    """

    state_action_value: NestedKey = VALUE_KEY


class DeterministicPolicyLoss(OffPolicyLoss):
    """Base of :class:`DeviceTD3Loss` and :class:`ACIQNLoss`: a deterministic actor, a critic, and targets of both.

    :meth:`forward` gives all losses from the same parameters; :meth:`critic_losses` and :meth:`actor_losses` are its
    parts, with which the critic can be updated before the actor.

    Args:
        actor: a TensorDict module that writes the action first, such as a ``DeterministicActor``.
        delay_actor: make targets with a copy of the actor.
        separate_losses: let no gradient of the critic's loss reach parameters that it shares with the actor.
        **options: of :class:`OffPolicyLoss`.

    Attributes:
        target_actor: the actor that the targets are made of; no gradient reaches it.
        target_critic: likewise the critic.

    Raises:
        ValueError: as :class:`OffPolicyLoss`, and for an actor that writes nothing.
    """

    _AcceptedKeys = PolicyGradientKeys
    default_keys = PolicyGradientKeys
    tensor_keys: PolicyGradientKeys
    actor_network: Any
    qvalue_network: Any
    actor_network_params: TensorDictParams
    qvalue_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams

    def __init__(
        self, actor: nn.Module, *, delay_actor: bool = True, separate_losses: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        if not getattr(actor, "out_keys", None):
            raise ValueError(
                f"actor: expected a TensorDict module that writes the action, received {type(actor).__name__}. Remedy: "
                "DeterministicActor, or a TensorDictModule."
            )
        keys = cast("list[NestedKey]", actor.out_keys)
        self.set_keys(action="action" if "action" in keys else keys[0])
        self.delay_actor, self.separate_losses = delay_actor, separate_losses
        self.add_network("actor_network", actor, delay=delay_actor)

    @property
    def target_actor(self) -> Any:
        """The actor that the targets are made of."""
        return self.target_of("actor_network")

    @property
    def value_key(self) -> NestedKey:
        """What the critics write."""
        return self.tensor_keys.state_action_value

    def returned_keys(self) -> list[NestedKey]:
        """What :meth:`forward` returns."""
        losses: list[NestedKey] = ["loss_actor", "loss_qvalue"]
        return losses if self.reduction == "none" else [*losses, "pred_value"]

    def online_critic(self) -> Any:
        """The critic; its gradient reaches parameters shared with the actor only if losses are not separate."""
        return without_shared(self, "qvalue_network") if self.separate_losses else self.critic

    def act(self, actor: Any, td: TensorDictBase, *, following: bool = False) -> Tensor:
        """``[*, D]`` actions of the batch's states, or with ``following`` its next states."""
        inputs = {key: td.get(("next", key) if following else key) for key in self.actor.in_keys}
        return actor(TensorDict(inputs, td.batch_size, device=td.device)).get(self.action_key)

    def critic_losses(self, td: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """The critic's loss, the priority of each row ``[*]`` and the mean value 0-d, the last two detached."""
        raise NotImplementedError

    def policy_value(self, critic: Any, td: TensorDictBase, action: Tensor) -> Tensor:
        """``[*]`` value of an action of each state, which the actor maximises.

        Args:
            critic: the critic, or a function that calls it with other parameters.
            td: the batch.
            action: ``[*, D]``.
        """
        raise NotImplementedError

    def actor_losses(self, td: TensorDictBase, *, detached: bool = False) -> Tensor:
        """``-Q(s, mu(s))``, 0-d.

        Args:
            td: the batch ``[*]``.
            detached: let no gradient reach the critic's parameters. It is cheaper to freeze them, or to differentiate
                only the actor's.
        """
        critic = without_gradient(self.critic) if detached else self.critic
        return -self.reduced(self.policy_value(critic, td, self.act(self.actor, td)), td)

    def value_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """TorchRL's name for the critics' loss alone, of a batch ``[*]``, which is not written to.

        Returns:
            The loss, and detached "td_error" ``[1, *]``, which stands for TorchRL's ``[K, *]`` of each critic, and
            "pred_value"; for optimisers that step one after the other (TorchRL's ``TD3OptimizationStepper``).
        """
        batch, rows = self.prepared(tensordict), tensordict.clone(False)
        loss, priority, value = self.critic_losses(batch)
        self.write_priority(rows, priority, batch)
        return loss, {"td_error": rows.get(self.tensor_keys.priority).unsqueeze(0), "pred_value": value}

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """TorchRL's name for the actor's loss alone, of a batch ``[*]``, and nothing besides."""
        return self.actor_losses(self.prepared(tensordict), detached=True), {}

    @dispatch
    @self_capturing
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """All losses of a batch ``[*]`` from the same parameters; writes ``td_error [*]`` into it.

        Returns:
            0-d ``loss_qvalue``, ``loss_actor`` and, detached, ``pred_value``, which is left out where the losses are
            not reduced. The gradient of ``loss_actor`` does not reach the critic, so that the sum of the losses can be
            differentiated.
        """
        batch = self.prepared(tensordict)
        loss_qvalue, priority, value = self.critic_losses(batch)
        loss_actor = self.actor_losses(batch, detached=True)
        self.write_priority(tensordict, priority, batch)
        losses = {"loss_qvalue": loss_qvalue, "loss_actor": loss_actor}
        if self.reduction == "none":
            return TensorDict(losses, tensordict.batch_size)
        return TensorDict(losses | {"pred_value": value})


class DeviceTD3Loss(DeterministicPolicyLoss):
    """TD3 (arXiv:1802.09477), and with one critic and ``policy_noise=0`` DDPG (arXiv:1509.02971).

    The counterpart of TorchRL's ``TD3Loss``, with its arguments, keys and equations. The least of the K critics makes
    the target; the actor maximises the first. The trainer decides how often the actor is updated. Nothing waits for the
    host.

    Keys read: the networks' ``in_keys``, at the root and under "next", ``action``, ("next", "reward") and ("next",
    "terminated") ``[*, 1]``; where present ``priority_weight [*]`` and ``steps_to_next_obs [*, 1]``. Written by
    :meth:`forward`: ``td_error [*]``, the largest absolute difference of the critics (TorchRL writes its square).

    Args:
        actor_network: a TensorDict module that writes the action, such as a ``DeterministicActor``.
        qvalue_network: a TensorDict module that reads observations and the action and writes ``state_action_value``:
            ``[*, 1]`` of one critic, which is copied to twins, or ``[*, K]`` of an ensemble, or a list of critics; as
            for :class:`DeviceSACLoss`.
        action_spec: the action's spec, whose bounds the target action keeps.
        bounds: least and greatest action, in place of ``action_spec``; by default those of the actor, ``low [D]`` and
            ``high [D]``.
        num_qvalue_nets: number of critics; ``"auto"`` is that of an ensemble or a list, and otherwise 2. None takes
            the network as it is.
        policy_noise: standard deviation of the noise on the target action.
        noise_clip: largest such noise.
        loss_function: of the critics, ``"l2"`` or ``"smooth_l1"``.
        delay_actor: make targets with a copy of the actor.
        delay_qvalue: make targets with copies of the critics.
        gamma: discount factor, 0.99 by default, as ``make_value_estimator(gamma=...)``.
        priority_key: as ``set_keys(priority=...)``.
        separate_losses: let no gradient of the critics' loss reach parameters that they share with the actor.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        deactivate_vmap: call twins one after the other.
        use_prioritized_weights: ``"auto"``, True or False.
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the rows that count.
        target_noise: in place of ``policy_noise``: the noise and its clip as shares of half the width of the actor's
            bounds, so that one number suits all tasks.
        **former: ``actor`` and ``critic`` for ``actor_network`` and ``qvalue_network``.

    Raises:
        ValueError: for an unknown loss function, a gamma outside of [0, 1], negative noise, a critic without the action
            among its ``in_keys``, both or unfit bounds, and noise on the actions of an actor without any.
    """

    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self,
        actor_network: nn.Module | None = None,
        qvalue_network: Any = None,
        *,
        action_spec: TensorSpec | None = None,
        bounds: Bounds | None = None,
        num_qvalue_nets: int | Literal["auto"] | None = "auto",
        policy_noise: float = 0.2,
        noise_clip: float = 0.5,
        loss_function: str = "smooth_l1",
        delay_actor: bool = True,
        delay_qvalue: bool = True,
        gamma: float | None = None,
        priority_key: NestedKey | None = None,
        separate_losses: bool = False,
        reduction: str | None = None,
        deactivate_vmap: bool = False,
        use_prioritized_weights: str | bool = "auto",
        valid_key: NestedKey | None = None,
        capture: bool = True,
        target_noise: float | None = None,
        **former: Any,
    ) -> None:
        actor, critic = former.pop("actor", actor_network), former.pop("critic", qvalue_network)
        refuse(self, former)
        required(self, actor_network=actor, qvalue_network=critic)
        super().__init__(
            actor,
            delay_actor=delay_actor,
            separate_losses=separate_losses,
            gamma=gamma,
            reduction=reduction,
            use_prioritized_weights=use_prioritized_weights,
            priority_key=priority_key,
            valid_key=valid_key,
            capture=capture,
        )
        check_loss_function(loss_function)
        self.relative_noise = target_noise is not None
        self.target_noise = policy_noise if target_noise is None else target_noise
        if min(self.target_noise, noise_clip) < 0:
            raise ValueError(
                f"noise: expected at least 0, received {self.target_noise} clipped at {noise_clip}. Remedy: 0 or more."
            )
        check_critic(critic, self.action_key)
        self.loss_function, self.noise_clip, self.deactivate_vmap = loss_function, noise_clip, deactivate_vmap
        self.delay_qvalue = delay_qvalue
        self.num_qvalue_nets = self.add_critics(
            "qvalue_network", critic, num_qvalue_nets, self.value_key, delay=delay_qvalue, loop=deactivate_vmap
        )
        self._make_bounds(action_spec, bounds)

    @property
    def policy_noise(self) -> float:
        """Standard deviation of the noise on the target action."""
        return self.target_noise

    def _make_bounds(self, spec: TensorSpec | None, bounds: Bounds | None) -> None:
        if spec is not None and bounds is not None:
            raise ValueError(
                "bounds, action_spec: expected one of them, received both. Remedy: leave one out, or both for an actor "
                "with bounds."
            )
        if spec is None and bounds is None:
            self._check_actor_bounds()
            return
        low, high = _bounds_of(spec, self.action_key) if bounds is None else bounds
        device = next(cast("nn.Module", self.actor_network).parameters()).device
        low, high = (torch.as_tensor(value, device=device) for value in (low, high))
        if low.ndim > 1 or high.ndim > 1 or bool((low > high).any()):
            raise ValueError(
                f"bounds: expected numbers or [D] with low <= high, received {low} and {high}. Remedy: (-1.0, 1.0)."
            )
        self.register_buffer("max_action", high)
        self.register_buffer("min_action", low)

    def _check_actor_bounds(self) -> None:
        actor = self.actor_network
        if self.target_noise > 0 and not (hasattr(actor, "low") and hasattr(actor, "high")):
            raise ValueError(
                f"actor: expected bounds low [D] and high [D], which the target noise is measured by, received "
                f"{type(actor).__name__} without. Remedy: DeterministicActor, bounds=, action_spec=, or policy_noise=0."
            )

    def _bounds(self) -> tuple[Tensor, Tensor]:
        if "max_action" in self._buffers:
            return cast("Tensor", self.min_action), cast("Tensor", self.max_action)
        return self.target_actor.low, self.target_actor.high

    def values(self, critic: Any, td: TensorDictBase, action: Tensor, *, following: bool = False) -> Tensor:
        """``[*, K]`` values of ``action [*, D]`` in the batch's states, or with ``following`` its next states."""
        return state_action_values(self, critic, td, action, following=following)

    def next_action(self, td: TensorDictBase, noise: Tensor | None = None) -> Tensor:
        """``[*, D]`` actions of the target actor, with clipped noise, within the bounds.

        Args:
            td: the batch ``[*]``.
            noise: ``[*, D]`` standard normal numbers instead of fresh ones.
        """
        return self.smoothed(self.act(self.target_actor, td, following=True), noise)

    def smoothed(self, action: Tensor, noise: Tensor | None = None) -> Tensor:
        """Actions ``[*, D]`` with the clipped noise of the targets, within the bounds."""
        if self.target_noise == 0:
            return action if "max_action" not in self._buffers else action.clamp(*self._bounds())
        low, high = self._bounds()
        unit = torch.randn_like(widened(action)) if noise is None else noise
        shift = (unit * self.target_noise).clamp(-self.noise_clip, self.noise_clip)
        if self.relative_noise:
            shift = shift * (high - low) / 2
        return (action + shift).clamp(low, high).to(action.dtype)

    def critic_losses(self, td: TensorDictBase, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The critics' loss, the priority of each row ``[*]`` and the mean value 0-d, the last two detached.

        Args:
            td: the batch ``[*]``.
            noise: as for :meth:`next_action`.
        """
        with torch.no_grad():
            next_value = self.values(self.target_critic, td, self.next_action(td, noise), following=True)
        value = self.values(self.online_critic(), td, cast("Tensor", td.get(self.action_key)))
        return self.losses_of_values(td, value, next_value)

    def losses_of_values(self, td: TensorDictBase, value: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`critic_losses` from the critics' values and the target critics', ``[*, K]`` each."""
        with torch.no_grad():
            reward, terminated = self.outcome(td, td.batch_size)
            discount = bootstrap_discount(self, td, reward, terminated)
            following = next_value.amin(-1)
            # values of a terminal state are ignored, NaN or not
            if self.lmbda is None:
                target = reward + discount * following.masked_fill(terminated, 0.0)
            else:
                target = self.returns(td, following, reward, terminated)
        loss, priority = critic_rows(value, target, self.loss_function)
        return self.reduced(loss, td), priority, self.mean(value.detach().mean(-1), td)

    def policy_value(self, critic: Any, td: TensorDictBase, action: Tensor) -> Tensor:
        """``[*]`` the first critic's value."""
        return self.values(critic, td, action)[..., 0]


def bootstrap_discount(loss: OffPolicyLoss, td: TensorDictBase, reward: Tensor, terminated: Tensor) -> Tensor:
    """``[*]``: gamma to the power of the steps, and 0 where the next state is terminal."""
    discount = loss.discount(td, reward.shape)
    if isinstance(discount, float):
        discount = torch.full_like(reward, discount)
    return discount.to(reward.dtype).masked_fill(terminated, 0.0)


def _bounds_of(spec: TensorSpec | None, action_key: NestedKey) -> tuple[Tensor, Tensor]:
    leaf: Any = cast("Any", spec)[action_key] if isinstance(spec, Composite) else spec
    if not isinstance(leaf, Bounded):
        raise ValueError(
            f"action_spec: expected Bounded actions, received {type(leaf).__name__}. Remedy: bounds=(low, high)."
        )
    low, high = leaf.space.low, leaf.space.high
    # one row's bounds: the leading dims are those of a batch of envs
    return low.reshape(-1, low.shape[-1])[0], high.reshape(-1, high.shape[-1])[0]
