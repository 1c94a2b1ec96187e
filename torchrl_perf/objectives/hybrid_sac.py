"""Soft actor-critic for actions with a discrete and continuous parts, with a temperature for each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams, dispatch
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn
from torchrl.data import Categorical
from torchrl.objectives import ValueEstimators

from torchrl_perf.functional.losses.hybrid import expected_soft_value
from torchrl_perf.functional.losses.sac import critic_rows
from torchrl_perf.functional.masked import masked_entropy
from torchrl_perf.functional.wide import widened
from torchrl_perf.modules.hybrid_actor import HybridActor, action_leaves
from torchrl_perf.objectives.checks import column, refuse, required
from torchrl_perf.objectives.loss_module import OffPolicyKeys, OffPolicyLoss
from torchrl_perf.objectives.sac import check_loss_function, scored_sample, without_gradient
from torchrl_perf.objectives.td3 import bootstrap_discount
from torchrl_perf.objectives.twins import members_of


class HybridDraw(NamedTuple):
    """A draw of the continuous parts in some states, and the policy of the discrete one there.

    Attributes:
        actions: ``[B, D_i]`` for each continuous part.
        log_probs: ``[B]`` of each.
        log_policy: ``[B, D]``, ``-inf`` for choices that are not allowed; None without a discrete part.
    """

    actions: tuple[Tensor, ...]
    log_probs: tuple[Tensor, ...]
    log_policy: Tensor | None


@dataclass
class HybridKeys(OffPolicyKeys):
    """Keys of soft actor-critic with several parts of an action, whose own keys are those of the actor's spec.

    Attributes:
        action_value: what the critics write; by default their first out_key.
    """

    action_value: NestedKey = "action_value"


class HybridSACLoss(OffPolicyLoss):
    """Soft actor-critic for one discrete part, any number of continuous ones, or both (arXiv:1912.11077).

    The policy is ``pi(d | s) prod_i pi(c_i | s)``. The critics give the values of all choices, ``Q(s, c)[d]``, so that
    the expectation over ``d`` is exact and only the continuous parts are sampled:
    ``V(s) = sum_d pi_d (min_k Q_k(s, c)[d] - alpha_d log pi_d) - sum_i alpha_i log pi(c_i)``. Each part has its own
    temperature and its own target entropy. Without a discrete part this is :class:`DeviceSACLoss`, without a continuous
    one discrete SAC (arXiv:1910.07207). Choices that are masked in the next state count in no target. Nothing waits for
    the host.

    The target entropy of a continuous part is minus its number of components; that of the discrete part
    ``choice_entropy`` times the logarithm of the number of choices allowed in the state.

    Keys read: the actor's and the critic's ``in_keys``, at the root and under "next" (masks too), the parts of the
    action, ("next", "reward") and ("next", "terminated") ``[B, 1]``; where present ``priority_weight [B]`` and
    ``steps_to_next_obs [B, 1]``. Written by :meth:`forward`: ``td_error [B]``.

    Args:
        actor_network: a :class:`HybridActor` whose action has at most one discrete part, and no nodes.
        qvalue_network: a TensorDict module that reads observations and the continuous parts at their keys, and writes
            values ``[B, K, D]`` (such as an ``EnsembleHybridQ``), or ``[B, K]`` without a discrete part, at its first
            out_key; or one critic that writes ``[B, D]`` or ``[B, 1]``, which is copied to twins, or a list of these.
        num_qvalue_nets: number of critics; ``"auto"`` is that of an ensemble or a list, and otherwise, without a
            discrete part, 2. None takes the network as it is: one that writes ``[B, D]`` is then refused at a call.
        loss_function: of the critics, ``"l2"`` or ``"smooth_l1"``.
        alpha_init: initial temperature, one for all parts or a mapping from parts.
        fixed_alpha: keep the temperatures.
        target_entropy: target entropies in nats by part, in place of those above.
        target_entropy_weight: ``choice_entropy``, the share of the greatest entropy that the discrete part is to have.
        delay_qvalue: make targets with copies of the critics.
        gamma: discount factor, 0.99 by default.
        deactivate_vmap: call twins one after the other.
        **options: ``reduction``, ``use_prioritized_weights``, ``priority_key`` and ``valid_key``, as for
            :class:`DeviceSACLoss`; ``actor``, ``critic``, ``alpha``, ``learn_alpha``, ``entropy`` and
            ``choice_entropy`` for ``actor_network``, ``qvalue_network``, ``alpha_init``, ``not fixed_alpha``,
            ``target_entropy`` and ``target_entropy_weight``.

    Attributes:
        part_keys: the parts, in the order of ``log_alpha``.
        log_alpha: ``[P]``, a parameter where it is learnt and a buffer where not.
        target_critic: the critics whose values the targets are made of; no gradient reaches them.

    Raises:
        ValueError: for another actor, two discrete parts, a critic that does not read the continuous parts or reads the
            discrete one, a temperature that is not positive, unknown parts or loss function, a gamma or a
            ``target_entropy_weight`` outside of [0, 1]; at a call, for an action with nodes and for values of another
            shape.
    """

    _AcceptedKeys = HybridKeys
    default_keys = HybridKeys
    tensor_keys: HybridKeys
    actor_network: Any
    qvalue_network: Any
    actor_network_params: TensorDictParams
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams
    SUPPORTED_VALUE_ESTIMATORS = (ValueEstimators.TD0,)

    def __init__(  # noqa: PLR0913  TorchRL's arguments
        self,
        actor_network: HybridActor | None = None,
        qvalue_network: Any = None,
        *,
        num_qvalue_nets: int | Literal["auto"] | None = "auto",
        loss_function: str = "l2",
        alpha_init: float | Mapping[NestedKey, float] = 1.0,
        fixed_alpha: bool = False,
        target_entropy: Mapping[NestedKey, float] | str | None = "auto",
        target_entropy_weight: float = 0.98,
        delay_qvalue: bool = True,
        gamma: float | None = None,
        deactivate_vmap: bool = False,
        **options: Any,
    ) -> None:
        actor, critic = options.pop("actor", actor_network), options.pop("critic", qvalue_network)
        alpha = options.pop("alpha", alpha_init)
        fixed_alpha = not options.pop("learn_alpha", not fixed_alpha)
        entropy = options.pop("entropy", target_entropy)
        share = options.pop("choice_entropy", target_entropy_weight)
        known = ("reduction", "use_prioritized_weights", "priority_key", "valid_key")
        refuse(self, {name: value for name, value in options.items() if name not in known})
        required(self, actor_network=actor, qvalue_network=critic)
        super().__init__(gamma=gamma, **options)
        check_loss_function(loss_function)
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"choice_entropy: expected a share in [0, 1] of the greatest, received {share}.")
        if not isinstance(actor, HybridActor):
            raise ValueError(f"actor: expected a HybridActor, received {type(actor).__name__}. Remedy: DeviceSACLoss.")
        first = critic[0] if isinstance(critic, list | tuple | nn.ModuleList) else critic
        self.discrete_key, self.continuous_keys, targets = _parts(actor, first)
        self.part_keys = [*([] if self.discrete_key is None else [self.discrete_key]), *self.continuous_keys]
        targets |= self._by_part("entropy", entropy if isinstance(entropy, Mapping) else {})
        # None for the discrete part: it depends on how many choices a state allows
        self.target_entropies = [targets.get(key) for key in self.part_keys]
        self.set_keys(action_value=cast("list[NestedKey]", first.out_keys)[0])
        self.loss_function, self.choice_entropy, self.fixed_alpha = loss_function, share, fixed_alpha
        self.add_network("actor_network", actor, delay=False)
        if num_qvalue_nets == "auto" and self.discrete_key is not None and critic is first and not members_of(critic):
            num_qvalue_nets = None  # values [B, D] of one critic cannot be taken for those of an ensemble, [B, K, D]
        self.num_qvalue_nets = self.add_critics(
            "qvalue_network",
            critic,
            num_qvalue_nets,
            self.value_key,
            delay=delay_qvalue,
            loop=deactivate_vmap,
            of_choices=self.discrete_key is not None,
        )
        self._make_temperatures(alpha)

    def _make_temperatures(self, alpha: float | Mapping[NestedKey, float]) -> None:
        initial = (
            dict.fromkeys(self.part_keys, alpha) if isinstance(alpha, int | float) else self._by_part("alpha", alpha)
        )
        temperatures = [float(cast("float", initial.get(key, 1.0))) for key in self.part_keys]
        if min(temperatures) <= 0:
            raise ValueError(f"alpha: expected positive temperatures, received {alpha}. Remedy: a small one for none.")
        device = next(cast("nn.Module", self.qvalue_network).parameters()).device
        log_alpha = torch.tensor([math.log(value) for value in temperatures], device=device)
        if self.fixed_alpha:
            self.register_buffer("log_alpha", log_alpha)
        else:
            self.log_alpha = nn.Parameter(log_alpha)

    @property
    def value_key(self) -> NestedKey:
        """What the critics write."""
        return self.tensor_keys.action_value

    def returned_keys(self) -> list[NestedKey]:
        """What :meth:`forward` returns."""
        losses: list[NestedKey] = ["loss_actor", "loss_qvalue", "loss_alpha"]
        return losses if self.reduction == "none" else [*losses, "alpha", "entropy"]

    def read_keys(self) -> list[NestedKey]:
        """What actor and critics read of a state."""
        keys = [unravel_key(key) for key in (*self.actor.head.in_keys, *self.critic.in_keys)]
        return [key for key in dict.fromkeys(keys) if key not in self.part_keys]

    def action_keys(self) -> list[NestedKey]:
        """The parts of the action."""
        return self.part_keys

    def _by_part(self, name: str, values: Mapping[NestedKey, float]) -> dict[NestedKey, float]:
        named = {cast("NestedKey", unravel_key(key)): value for key, value in values.items()}
        if unknown := [key for key in named if key not in self.part_keys]:
            raise ValueError(f"{name}: expected parts among {self.part_keys}, received {unknown}.")
        return named

    @property
    def learns_alpha(self) -> bool:
        """Whether the temperatures are parameters."""
        return isinstance(self.log_alpha, nn.Parameter)

    # -- parts --------------------------------------------------------------------------------------------------------

    def sample(self, td: TensorDictBase) -> tuple[HybridDraw, HybridDraw]:
        """Draws for the states and, without a gradient, the next states of the batch ``[B]``, in one pass."""
        rows = td.shape[0]
        keys = cast("list[NestedKey]", self.actor.head.in_keys)
        both = {key: torch.cat([td.get(key), td.get(("next", key))]) for key in keys}
        dist = self.actor.get_dist(_gathered(both, 2 * rows, td.device))
        if nodes := [key for key, part in dist.dists.items() if len(part.batch_shape) != 1]:
            raise ValueError(
                f"actor: expected one action for each row, received nodes in {nodes}. Remedy: make the nodes rows of "
                "the batch, or PPO."
            )
        draws = [scored_sample(dist.dists[key]) for key in self.continuous_keys]
        draws = [(action, widened(log_prob)) for action, log_prob in draws]
        policy = None if self.discrete_key is None else cast("Any", dist.dists[self.discrete_key]).log_probs
        here = HybridDraw(
            tuple(action[:rows] for action, _ in draws),
            tuple(log_prob[:rows] for _, log_prob in draws),
            None if policy is None else policy[:rows],
        )
        following = HybridDraw(
            tuple(action[rows:].detach() for action, _ in draws),
            tuple(log_prob[rows:].detach() for _, log_prob in draws),
            None if policy is None else policy[rows:].detach(),
        )
        return here, following

    def values(
        self, critic: Any, td: TensorDictBase, actions: tuple[Tensor, ...], *, following: bool = False
    ) -> Tensor:
        """``[B, K, D]`` (``[B, K]`` without a discrete part) values in the batch's states, or its next states."""
        given = dict(zip(self.continuous_keys, actions, strict=True))
        keys = [key for key in map(unravel_key, cast("list[NestedKey]", self.critic.in_keys)) if key not in given]
        inputs = {key: td.get(unravel_key(("next", key)) if following else key) for key in keys}
        gathered = _gathered(cast("dict[NestedKey, Tensor]", inputs | given), td.shape[0], td.device)
        values = widened(critic(gathered).get(self.value_key))
        dims = 2 if self.discrete_key is None else 3
        if values.ndim != dims or values.shape[0] != td.shape[0]:
            shape = "[B, K]" if dims == 2 else "[B, K, D], the values of all choices"
            raise ValueError(f"critic: expected {shape}, at {self.value_key!r}, received {list(values.shape)}.")
        return values

    def soft_value(self, draw: HybridDraw, value: Tensor) -> Tensor:
        """``V [B]`` of states from the critics' values ``[B, K(, D)]`` of a draw; the temperatures are constants."""
        alpha = self.log_alpha.detach().exp().unbind()
        if draw.log_policy is None:
            soft = value.amin(1)
        else:
            soft = expected_soft_value(value.amin(1), draw.log_policy, alpha[0])
        for temperature, log_prob in zip(alpha[len(alpha) - len(draw.log_probs) :], draw.log_probs, strict=True):
            soft = soft - temperature * log_prob
        return soft

    def critic_losses(self, td: TensorDictBase, following: HybridDraw) -> tuple[Tensor, Tensor, Tensor]:
        """The critics' loss 0-d, the priority of each row ``[B]`` and the mean value 0-d, the last two detached."""
        with torch.no_grad():
            value = self.values(self.target_critic, td, following.actions, following=True)
            reward, terminated = self.outcome(td, value.shape[:1])
            discount = bootstrap_discount(self, td, reward, terminated)
            target = reward + discount * self.soft_value(following, value).masked_fill(terminated, 0.0)
        value = self.values(self.critic, td, tuple(td.get(key) for key in self.continuous_keys))
        if self.discrete_key is not None:
            taken = column(td.get(self.discrete_key), value.shape[:1], self.discrete_key).long()
            choice = taken[:, None, None].expand(*value.shape[:2], 1)
            value = value.gather(-1, choice).squeeze(-1)
        loss, priority = critic_rows(value, target, self.loss_function)
        return self.reduced(loss, td), priority, self.mean(value.detach().mean(-1), td)

    def actor_losses(
        self, td: TensorDictBase, draw: HybridDraw, *, detached: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The actor's and the temperatures' loss, 0-d, and the entropy of each part ``[P]``, detached.

        Args:
            td: the batch ``[B]``.
            draw: of its states, with a gradient.
            detached: let no gradient reach the critic's parameters.
        """
        critic = without_gradient(self.critic) if detached else self.critic
        loss = -self.reduced(self.soft_value(draw, self.values(critic, td, draw.actions)), td)
        entropies = [-log_prob.detach() for log_prob in draw.log_probs]
        if draw.log_policy is not None:
            entropies.insert(0, masked_entropy(draw.log_policy.detach()))
        targets = self._targets(draw)
        excess = [self.reduced(entropy - target, td) for entropy, target in zip(entropies, targets, strict=True)]
        stacked = torch.stack(excess)
        loss_alpha = (self.log_alpha.reshape(-1, *(1,) * (stacked.ndim - 1)) * stacked).sum(0)
        return loss, loss_alpha, torch.stack([self.mean(entropy, td) for entropy in entropies])

    def _targets(self, draw: HybridDraw) -> list[Tensor | float]:
        """The target entropy of each part, a number or ``[B]``."""
        targets = cast("list[Tensor | float]", list(self.target_entropies))
        if draw.log_policy is not None and targets[0] is None:
            allowed = (draw.log_policy != -torch.inf).sum(-1)
            targets[0] = self.choice_entropy * allowed.to(draw.log_policy.dtype).log()
        return targets

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """All losses of a batch ``[*]`` from the same parameters; writes ``td_error [*]`` into it.

        Returns:
            0-d ``loss_qvalue``, ``loss_actor``, ``loss_alpha`` and, detached, ``alpha [P]`` and ``entropy [P]``, in the
            order of ``part_keys``. The gradient of ``loss_actor`` does not reach the critics, so that the sum of the
            losses can be differentiated.
        """
        if tensordict.batch_dims != 1:
            flat, key = tensordict.reshape(-1), self.tensor_keys.priority
            out = self.forward(flat)
            tensordict.set(key, flat.get(key).reshape(tensordict.batch_size))
            return out.reshape(tensordict.batch_size) if self.reduction == "none" else out
        batch = self.prepared(tensordict)
        draw, following = self.sample(batch)
        loss_qvalue, priority, _ = self.critic_losses(batch, following)
        loss_actor, loss_alpha, entropy = self.actor_losses(batch, draw, detached=True)
        self.write_priority(tensordict, priority, batch)
        losses = {"loss_qvalue": loss_qvalue, "loss_actor": loss_actor, "loss_alpha": loss_alpha}
        if self.reduction == "none":
            return TensorDict(losses, tensordict.batch_size)
        return TensorDict(losses | {"alpha": self.log_alpha.detach().exp(), "entropy": entropy})


def _parts(
    actor: HybridActor, critic: nn.Module
) -> tuple[NestedKey | None, list[NestedKey], dict[NestedKey, float | None]]:
    """The discrete part, the continuous ones, and the target entropy of each that is known beforehand."""
    leaves = action_leaves(actor.action_spec)
    discrete = [key for key, leaf in leaves.items() if isinstance(leaf, Categorical)]
    continuous = [key for key in leaves if key not in discrete]
    if len(discrete) > 1:
        raise ValueError(
            f"actor: expected at most one discrete part, received {discrete}. Remedy: one part for all combinations, "
            "or PPO."
        )
    read = [unravel_key(key) for key in cast("list[NestedKey]", critic.in_keys)]
    if any(key not in read for key in continuous) or any(key in read for key in discrete):
        raise ValueError(
            f"critic: expected {continuous} among its in_keys and none of {discrete}, whose values are its outputs, "
            f"received {read}. Remedy: set the critic's in_keys."
        )
    targets: dict[NestedKey, float | None] = {key: -float(leaves[key].shape[-1]) for key in continuous}
    return (discrete[0] if discrete else None), continuous, targets


def _gathered(entries: Mapping[NestedKey, Tensor], rows: int, device: torch.device | None) -> TensorDict:
    # entry by entry: a compiler cannot trace the construction from nested keys on a device
    td = TensorDict({}, [rows], device=device)
    for key, value in entries.items():
        td.set(key, value)
    return td
