"""The losses of soft actor-critic on TensorDicts, in few large kernels."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams, dispatch
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.data import Composite, TensorSpec

from torchrl_perf.functional.losses.sac import critic_rows, soft_target
from torchrl_perf.functional.wide import widened
from torchrl_perf.objectives.checks import checked_gamma, refuse, required
from torchrl_perf.objectives.loss_module import OffPolicyKeys, OffPolicyLoss
from torchrl_perf.runtime.self_capture import self_capturing

__all__ = ["LOSS_FUNCTIONS", "VALUE_KEY", "DeviceSACLoss", "checked_gamma", "frozen", "target_entropy"]

VALUE_KEY = "state_action_value"
LOSS_FUNCTIONS = ("l2", "smooth_l1")
SCALAR_OUTPUT_MODES = (None, "exclude", "non_tensor")


def target_entropy(spec: TensorSpec) -> float:
    """Minus the number of action dims, the last dim of the spec whatever its batch dims are (arXiv:1812.05905)."""
    return -float(spec.shape[-1])


@dataclass
class SACKeys(OffPolicyKeys):
    """Keys of soft actor-critic.

    Attributes:
        state_action_value: what the critics write.
        value: of TorchRL's loss; not read.
        log_prob: of TorchRL's loss; not read, since log-probabilities are those of fresh actions.
    """

    state_action_value: NestedKey = VALUE_KEY
    value: NestedKey = "state_value"
    log_prob: NestedKey = "action_log_prob"


class DeviceSACLoss(OffPolicyLoss):
    """Soft actor-critic (arXiv:1812.05905): K critics with targets, one actor, a learnt temperature.

    The counterpart of ``torchrl.objectives.SACLoss`` (version 2), with its arguments, keys, outputs and equations.
    :meth:`forward` gives all losses from the same parameters; :meth:`sample`, :meth:`critic_losses` and
    :meth:`actor_losses` are its parts, with which the critics can be updated before the actor. The actor runs once for
    states and next states together, and the K critics are one batched network. Nothing waits for the host.

    Keys read: the networks' ``in_keys``, at the root and under "next", ``action``, ("next", "reward") and ("next",
    "terminated") ``[*, 1]``; where present ``priority_weight [*]`` and ``steps_to_next_obs [*, 1]``, the steps of an
    n-step target: it is discounted by gamma to that power. Flags are bool. Written by :meth:`forward`: ``td_error
    [*]``, the largest absolute difference of the critics.

    Args:
        actor_network: a probabilistic TensorDict module, whose distribution samples by reparametrisation.
        qvalue_network: a TensorDict module that reads observations and the action and writes ``state_action_value``:
            ``[*, 1]`` of one critic, which is copied to twins whose values are drawn anew, as TorchRL does; or
            ``[*, K]`` of an ensemble, known by an int attribute ``num_members`` of one of its parts, such as
            :class:`~torchrl_perf.modules.EnsembleQ`; or a list of critics.
        value_network: None; version 1, with a network of state values, exists only in TorchRL.
        num_qvalue_nets: number of critics; ``"auto"`` is that of an ensemble or a list, and otherwise 2. None takes
            the network as it is, whatever number of values it writes.
        loss_function: of the critics, ``"l2"`` or ``"smooth_l1"``.
        alpha_init: initial temperature.
        min_alpha: least temperature; None for no bound.
        max_alpha: greatest temperature; None for no bound.
        action_spec: the action's spec, which the target entropy is read from; by default the actor's.
        fixed_alpha: keep the temperature.
        target_entropy: in nats; ``"auto"`` is minus the number of action dims.
        delay_actor: False; targets are made with the actor itself.
        delay_qvalue: make targets with copies of the critics.
        delay_value: True; there is no value network to delay or not.
        gamma: discount factor, 0.99 by default, as ``make_value_estimator(gamma=...)``.
        priority_key: as ``set_keys(priority=...)``.
        separate_losses: let no gradient of the critics' loss reach parameters that they share with the actor.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, with which ``alpha`` and ``entropy`` are left out.
        skip_done_states: use 0 as action and log-probability of next states that are done, which the actor then sees
            as zeros.
        deactivate_vmap: call twins one after the other.
        use_prioritized_weights: ``"auto"``, True or False.
        scalar_output_mode: with ``reduction="none"``, ``"exclude"`` (the default) or ``"non_tensor"``, by which
            ``alpha`` and ``entropy`` are kept.
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the rows that count.
        **former: ``actor``, ``critic``, ``alpha``, ``learn_alpha`` and ``entropy`` for ``actor_network``,
            ``qvalue_network``, ``alpha_init``, ``not fixed_alpha`` and ``target_entropy``.

    Attributes:
        log_alpha: 0-d, a parameter where it is learnt and a buffer where not.
        critic: the critics as one network, which writes ``[*, K]``.
        target_critic: the critics whose values the targets are made of; no gradient reaches them.

    Raises:
        ValueError: for an option out of range or that is not served, an alpha that is not positive, a critic without
            the action among its ``in_keys``, an actor without a distribution, or without a spec where the target
            entropy is read from it; at a call, for entries of another shape.
    """

    _AcceptedKeys = SACKeys
    default_keys = SACKeys
    tensor_keys: SACKeys
    actor_network: Any
    qvalue_network: Any
    value_network: Any
    actor_network_params: TensorDictParams
    qvalue_network_params: TensorDictParams
    value_network_params: TensorDictParams | None
    target_actor_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams
    target_value_network_params: TensorDictParams | None
    _schedulable_buffers = frozenset({"alpha_init", "min_log_alpha", "max_log_alpha", "log_alpha"})
    constants = ("alpha_init", "_target_entropy", "min_log_alpha", "max_log_alpha")

    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self,
        actor_network: nn.Module | None = None,
        qvalue_network: Any = None,
        value_network: None = None,
        *,
        num_qvalue_nets: int | Literal["auto"] | None = "auto",
        loss_function: str = "smooth_l1",
        alpha_init: float = 1.0,
        min_alpha: float | None = None,
        max_alpha: float | None = None,
        action_spec: TensorSpec | None = None,
        fixed_alpha: bool = False,
        target_entropy: str | float | None = "auto",
        delay_actor: bool = False,
        delay_qvalue: bool = True,
        delay_value: bool = True,
        gamma: float | None = None,
        priority_key: NestedKey | None = None,
        separate_losses: bool = False,
        reduction: str | None = None,
        skip_done_states: bool = False,
        deactivate_vmap: bool = False,
        use_prioritized_weights: str | bool = "auto",
        scalar_output_mode: str | None = None,
        valid_key: NestedKey | None = None,
        capture: bool = True,
        **former: Any,
    ) -> None:
        actor, critic = former.pop("actor", actor_network), former.pop("critic", qvalue_network)
        alpha = former.pop("alpha", alpha_init)
        fixed_alpha = not former.pop("learn_alpha", not fixed_alpha)
        entropy = former.pop("entropy", target_entropy)
        refuse(self, former)
        required(self, actor_network=actor, qvalue_network=critic)
        super().__init__(
            gamma=gamma,
            reduction=reduction,
            use_prioritized_weights=use_prioritized_weights,
            priority_key=priority_key,
            valid_key=valid_key,
            capture=capture,
        )
        check_loss_function(loss_function)
        _check_version(value_network, delay_actor, delay_value, scalar_output_mode)
        self.set_keys(action=sampled_action(actor))
        check_critic(critic, self.action_key)
        self.loss_function, self.skip_done_states = loss_function, skip_done_states
        self.scalar_output_mode, self.deactivate_vmap = scalar_output_mode, deactivate_vmap
        self.delay_actor, self.delay_qvalue = delay_actor, delay_qvalue
        self.add_network("actor_network", actor, delay=False)
        self.num_qvalue_nets = self.add_critics(
            "qvalue_network", critic, num_qvalue_nets, self.value_key, delay=delay_qvalue, loop=deactivate_vmap
        )
        self.value_network = self.value_network_params = self.target_value_network_params = None
        self.separate_losses = separate_losses
        self._make_temperature(float(alpha), min_alpha, max_alpha, fixed_alpha)
        entropy = self._entropy_of_spec(action_spec) if entropy in (None, "auto") else float(cast("float", entropy))
        self.register_buffer("_target_entropy", torch.tensor(entropy, device=self.log_alpha.device), False)

    def _make_temperature(self, alpha: float, least: float | None, most: float | None, fixed: bool) -> None:
        if not alpha > 0:
            raise ValueError(f"alpha: expected a positive temperature, received {alpha}. Remedy: a small one for none.")
        if (least is not None and least < 0) or (most is not None and most <= 0) or (least or 0.0) > (most or math.inf):
            raise ValueError(
                f"min_alpha, max_alpha: expected 0 <= min_alpha <= max_alpha and max_alpha > 0, received {least} and "
                f"{most}. Remedy: leave both out for no bounds."
            )
        self.fixed_alpha = fixed
        device = next(cast("nn.Module", self.qvalue_network).parameters()).device
        self.register_buffer("alpha_init", torch.tensor(alpha, device=device), False)
        for name, bound in (("min_log_alpha", least), ("max_log_alpha", most)):
            if bound:
                self.register_buffer(name, torch.tensor(math.log(bound), device=device), False)
            else:
                setattr(self, name, None)
        log_alpha = torch.tensor(math.log(alpha), device=device)
        if fixed:
            self.register_buffer("log_alpha", log_alpha)
        else:
            self.log_alpha = nn.Parameter(log_alpha)

    def _entropy_of_spec(self, spec: TensorSpec | None) -> float:
        spec = getattr(self.actor_network, "spec", None) if spec is None else spec
        leaf = cast("Any", spec)[self.action_key] if isinstance(spec, Composite) else spec
        if leaf is None:
            raise ValueError(
                "target_entropy: expected a number where the actor has no spec, received None. Remedy: set it, or "
                "action_spec."
            )
        return target_entropy(leaf)

    # -- attributes ---------------------------------------------------------------------------------------------------

    @property
    def value_key(self) -> NestedKey:
        """What the critics write."""
        return self.tensor_keys.state_action_value

    @property
    def learns_alpha(self) -> bool:
        """Whether the temperature is a parameter."""
        return isinstance(self.log_alpha, nn.Parameter)

    @property
    def target_entropy(self) -> Tensor:
        """0-d, in nats."""
        return cast("Tensor", self._target_entropy)

    def returned_keys(self) -> list[NestedKey]:
        """What :meth:`forward` returns."""
        losses: list[NestedKey] = ["loss_actor", "loss_qvalue", "loss_alpha"]
        left_out = self.reduction == "none" and self.scalar_output_mode != "non_tensor"
        return losses if left_out else [*losses, "alpha", "entropy"]

    @property
    def alpha(self) -> Tensor:
        """The temperature, 0-d, without a gradient, within its bounds."""
        with torch.no_grad():
            if self.min_log_alpha is not None or self.max_log_alpha is not None:
                self.log_alpha.clamp_(self.min_log_alpha, self.max_log_alpha)
            return self.log_alpha.exp()

    @property
    def _alpha(self) -> Tensor:
        # TorchRL's name, which its trainers log
        return self.alpha

    # -- parts --------------------------------------------------------------------------------------------------------

    def sample(self, td: TensorDictBase, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fresh actions for the states and the next states of the batch, in one pass of the actor.

        Args:
            td: the batch ``[B, *]``, or one transition, ``[]``.
            noise: ``[2 B, D]`` standard normal numbers to draw the actions with, those of the states first; for a
                :class:`~torchrl_perf.modules.SquashedNormal` only. None draws fresh ones.

        Returns:
            Action ``[B, *, D]`` and log-probability ``[B, *]``, differentiable in the actor's parameters; next action
            and next log-probability, without a gradient.
        """
        if not td.batch_size:
            one, log_prob, other, next_log_prob = self.sample(td.unsqueeze(0), noise)
            return one.squeeze(0), log_prob.squeeze(0), other.squeeze(0), next_log_prob.squeeze(0)
        rows = td.shape[0]
        states, following = self._inputs(td), self._next_inputs(td)
        both = {key: torch.cat([state, following[key]]) for key, state in states.items()}
        action, log_prob = self._drawn(both, td, 2, noise)
        return action[:rows], log_prob[:rows], *self._ended(td, action[rows:], log_prob[rows:])

    def sample_states(self, td: TensorDictBase, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The first two of :meth:`sample` alone.

        Args:
            td: the batch ``[B, *]``.
            noise: ``[B, D]``.
        """
        return self._drawn(self._inputs(td), td, 1, noise)

    def sample_next(self, td: TensorDictBase, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The last two of :meth:`sample` alone.

        Args:
            td: the batch ``[B, *]``.
            noise: ``[B, D]``.
        """
        return self._ended(td, *self._drawn(self._next_inputs(td), td, 1, noise))

    def _inputs(self, td: TensorDictBase) -> dict[NestedKey, Tensor]:
        """What the actor reads of the states."""
        return {key: td.get(key) for key in cast("list[NestedKey]", self.actor.in_keys)}

    def _next_inputs(self, td: TensorDictBase) -> dict[NestedKey, Tensor]:
        """What it reads of the next states, 0 where an episode has ended and those are skipped."""
        found = {key: td.get(("next", key)) for key in cast("list[NestedKey]", self.actor.in_keys)}
        if not self.skip_done_states:
            return found
        done = self._done(td)
        return {
            key: torch.where(_beside(done, value), 0.0, value) if value.is_floating_point() else value
            for key, value in found.items()
        }

    def _drawn(
        self, inputs: dict[NestedKey, Tensor], td: TensorDictBase, times: int, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Actions and log-probabilities of inputs of ``times`` as many rows as the batch has."""
        shape = (times * td.shape[0], *td.shape[1:])
        dist = cast("Any", self.actor).get_dist(TensorDict(inputs, shape, device=td.device))
        action, log_prob = scored_sample(dist) if noise is None else dist.rsample_and_log_prob(noise=noise)
        log_prob = widened(log_prob)
        if log_prob.shape != shape:
            raise ValueError(
                f"actor: expected log-probabilities {list(td.shape)}, one for each row, received "
                f"{[log_prob.shape[0] // times, *log_prob.shape[1:]]}. Remedy: a distribution of the whole action, such"
                " as TanhNormal or SquashedNormal (Independent for others)."
            )
        return action, log_prob

    def _ended(self, td: TensorDictBase, action: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Next actions and log-probabilities without a gradient, 0 where an episode has ended and those are skipped."""
        action, log_prob = action.detach(), log_prob.detach()
        if not self.skip_done_states:
            return action, log_prob
        done = self._done(td)
        return torch.where(_beside(done, action), 0.0, action), torch.where(done, 0.0, log_prob)

    def _done(self, td: TensorDictBase) -> Tensor:
        return td.get(("next", self.tensor_keys.done)).reshape(td.shape)

    def values(self, critic: Any, td: TensorDictBase, action: Tensor, *, following: bool = False) -> Tensor:
        """``[*, K]`` values of ``action [*, D]`` in the batch's states, or with ``following`` its next states."""
        return state_action_values(self, critic, td, action, following=following)

    def critic_rows(
        self, td: TensorDictBase, next_action: Tensor, next_log_prob: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and priority of each row ``[*]``, and values ``[*, K]``, the last two detached."""
        with torch.no_grad():
            next_value = self.values(self.target_critic, td, next_action, following=True)
        critic = without_shared(self, "qvalue_network") if self.separate_losses else self.critic
        value = self.values(critic, td, td.get(self.action_key))
        return *self.rows_of_values(td, value, next_value, next_log_prob), value.detach()

    def rows_of_values(
        self, td: TensorDictBase, value: Tensor, next_value: Tensor, next_log_prob: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss and priority of each row ``[*]`` from the critics' values and the target critics', ``[*, K]`` each."""
        with torch.no_grad():
            reward, terminated = self.outcome(td, next_log_prob.shape)
            if self.lmbda is None:
                discount = self.discount(td, reward.shape)
                target = soft_target(reward, terminated, next_value, next_log_prob, self.alpha, discount)
            else:
                soft = next_value.amin(-1) - self.alpha * next_log_prob
                target = self.returns(td, soft, reward, terminated)
        return critic_rows(value, target, self.loss_function)

    def critic_losses(
        self, td: TensorDictBase, next_action: Tensor, next_log_prob: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The critics' loss, the priority of each row ``[*]`` and the mean value 0-d, the last two detached."""
        loss, priority, value = self.critic_rows(td, next_action, next_log_prob)
        # over the members first: the sums over the batch are then all of one length, and one kernel
        return self.reduced(loss, td), priority, self.mean(value.mean(-1), td)

    def actor_losses(
        self, td: TensorDictBase, action: Tensor, log_prob: Tensor, *, detached: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The actor's and the temperature's loss of a fresh action of each state.

        Args:
            td: the batch ``[*]``.
            action: ``[*, D]`` that carries a gradient.
            log_prob: ``[*]`` of it.
            detached: let no gradient reach the critic's parameters. Freezing them is cheaper outside of a
                compiled function, which cannot do that.
        """
        critic = without_gradient(self.critic) if detached else self.critic
        return self.actor_losses_of_values(td, self.values(critic, td, action), log_prob)

    def actor_losses_of_values(self, td: TensorDictBase, value: Tensor, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`actor_losses` from the critics' values ``[*, K]`` of the action."""
        loss = self.reduced(self.alpha * log_prob - value.amin(-1), td)
        if self.reduction != "mean":
            return loss, self.reduced(-self.log_alpha * (log_prob.detach() + self.target_entropy), td)
        return loss, -self.log_alpha * self.reduced(log_prob.detach() + self.target_entropy, td)

    @dispatch
    @self_capturing
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """All losses of a batch ``[*]`` from the same parameters; writes ``td_error [*]`` into it.

        Returns:
            0-d ``loss_qvalue``, ``loss_actor``, ``loss_alpha`` and, detached, ``alpha`` and ``entropy``. The gradient
            of ``loss_actor`` does not reach the critics, so that the sum of the losses can be differentiated.
        """
        batch = self.prepared(tensordict)
        action, log_prob, next_action, next_log_prob = self.sample(batch)
        loss_qvalue, priority, _ = self.critic_losses(batch, next_action, next_log_prob)
        loss_actor, loss_alpha = self.actor_losses(batch, action, log_prob, detached=True)
        self.write_priority(tensordict, priority, batch)
        losses = {"loss_actor": loss_actor, "loss_qvalue": loss_qvalue, "loss_alpha": loss_alpha}
        scalars = {"alpha": self.alpha, "entropy": -self.mean(log_prob.detach(), batch)}
        if self.reduction != "none":
            return TensorDict(losses | scalars)
        out = TensorDict(losses, tensordict.batch_size)
        if self.scalar_output_mode == "non_tensor":
            for name, value in scalars.items():
                out.set_non_tensor(name, value)
        return out


def check_loss_function(loss_function: str) -> None:
    """Raises ValueError for an unknown loss of the critics."""
    if loss_function not in LOSS_FUNCTIONS:
        raise ValueError(
            f"loss_function: expected one of {LOSS_FUNCTIONS}, received {loss_function!r}. Remedy: one of these."
        )


def _check_version(value_network: Any, delay_actor: bool, delay_value: bool, scalar_output_mode: str | None) -> None:
    if value_network is not None or not delay_value:
        raise ValueError(
            f"value_network, delay_value: expected None and True, since version 2 (arXiv:1812.05905) has no network of "
            f"state values, received {type(value_network).__name__} and {delay_value}. Remedy: leave both out, or "
            "torchrl.objectives.SACLoss."
        )
    if delay_actor:
        raise ValueError(
            "delay_actor: expected False, since targets are made with the actor itself (TorchRL's version 2 copies the "
            "actor and never reads the copy), received True. Remedy: leave it out."
        )
    if scalar_output_mode not in SCALAR_OUTPUT_MODES:
        raise ValueError(
            f"scalar_output_mode: expected one of {SCALAR_OUTPUT_MODES}, received {scalar_output_mode!r}. Remedy: one "
            "of these."
        )


def sampled_action(actor: Any) -> NestedKey:
    """The key of the action that a probabilistic actor draws.

    Raises:
        ValueError: for an actor without a distribution.
    """
    if not hasattr(actor, "get_dist"):
        raise ValueError(
            "actor: expected a module with get_dist, such as DeviceActor or ProbabilisticActor, received "
            f"{type(actor).__name__}. Remedy: wrap the network in one of these."
        )
    return cast("list[NestedKey]", actor.dist_sample_keys)[0]


def check_critic(critic: Any, action_key: NestedKey) -> None:
    """Raises ValueError for a critic, or one of a list, that does not read the action."""
    for network in critic if isinstance(critic, list | tuple | nn.ModuleList) else [critic]:
        if action_key not in cast("list[NestedKey]", getattr(network, "in_keys", [])):
            raise ValueError(
                f"critic: expected {action_key!r}, the actor's action, among its in_keys, received "
                f"{getattr(network, 'in_keys', None)}. Remedy: a TensorDict module with that key, or the critic's "
                "in_keys."
            )


def state_action_values(
    loss: Any, critic: Any, td: TensorDictBase, action: Tensor, *, following: bool = False
) -> Tensor:
    """``[*, K]`` values of ``action [*, D]`` in the batch's states, or with ``following`` its next states.

    Raises:
        ValueError: for values of another shape than ``[*, K]``.
    """
    keys = [key for key in cast("list[NestedKey]", loss.critic.in_keys) if key != loss.action_key]
    inputs = {key: td.get(("next", key) if following else key) for key in keys}
    inputs[loss.action_key] = action
    values = widened(critic(TensorDict(inputs, td.batch_size, device=td.device)).get(loss.value_key))
    if values.shape[:-1] != td.batch_size:
        raise ValueError(
            f"critic: expected values {[*td.batch_size, 'K']} at {loss.value_key!r}, received {list(values.shape)}. "
            "Remedy: one value for each row and critic, and actions shaped as the actor's."
        )
    return values


class frozen:  # noqa: N801  (a context manager, used as a function)
    """Within it, no gradient is computed for the parameters of ``module``."""

    def __init__(self, module: nn.Module) -> None:
        self._params = [param for param in module.parameters() if param.requires_grad]

    def __enter__(self) -> None:
        for param in self._params:
            param.requires_grad_(False)

    def __exit__(self, *exc: object) -> None:
        for param in self._params:
            param.requires_grad_(True)


def without_gradient(module: nn.Module) -> Callable[..., Any]:
    """The module as a function of its inputs alone: no gradient reaches its parameters."""
    return _called_with(module, {name: param.detach() for name, param in module.named_parameters()})


def without_shared(loss: OffPolicyLoss, name: str) -> Callable[..., Any]:
    """A network as a function whose gradient does not reach the parameters that it shares with the actor."""
    module, actor = cast("nn.Module", getattr(loss, name)), cast("nn.Module", cast("Any", loss).actor_network)
    shared = {id(param) for param in actor.parameters()}
    params = {name: param.detach() for name, param in module.named_parameters() if id(param) in shared}
    return _called_with(module, params)


def _called_with(module: nn.Module, params: dict[str, Tensor]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, params, args, kwargs)

    return call


def _beside(flag: Tensor, value: Tensor) -> Tensor:
    """A flag ``[*]`` in a shape that broadcasts to ``[*, ...]``."""
    return flag.reshape((*flag.shape, *(1,) * (value.ndim - flag.ndim)))


def scored_sample(dist: Distribution) -> tuple[Tensor, Tensor]:
    """Reparametrised actions ``[*, D]`` and their log-probabilities ``[*]``, at the bounds, too."""
    if hasattr(dist, "rsample_and_log_prob"):
        return cast("Any", dist).rsample_and_log_prob()
    action = dist.rsample()
    return action, dist.log_prob(action)
