"""Soft actor-critic for actions with a discrete and continuous parts, with a temperature for each."""

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn
from torchrl.data import Categorical

from torchrl_perf.functional.hybrid import expected_soft_value
from torchrl_perf.functional.masked import masked_entropy
from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.functional.sac import critic_loss, weighted_mean
from torchrl_perf.modules.hybrid_actor import HybridActor, action_leaves
from torchrl_perf.objectives.sac import LOSS_FUNCTIONS, scored_sample, without_gradient
from torchrl_perf.objectives.value_loss import checked_gamma, step_of


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


class HybridSACLoss(nn.Module):
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
        actor: a :class:`HybridActor` whose action has at most one discrete part, and no nodes.
        critic: a TensorDict module that reads observations and the continuous parts at their keys, and writes values
            ``[B, K, D]`` (such as an ``EnsembleHybridQ``), or ``[B, K]`` without a discrete part, at its first out_key.
        gamma: discount factor.
        alpha: initial temperature, one for all parts or a mapping from parts.
        learn_alpha: adapt the temperatures to the target entropies, or keep them.
        entropy: target entropies in nats by part, in place of those above.
        choice_entropy: share of the greatest entropy that the discrete part is to have.
        loss_function: of the critics, ``"l2"`` or ``"smooth_l1"``.

    Attributes:
        part_keys: the parts, in the order of ``log_alpha``.
        log_alpha: ``[P]``, a parameter where it is learnt and a buffer where not.
        target_critic: the critic whose values the targets are made of; no gradient reaches it.

    Raises:
        ValueError: for another actor, two discrete parts, a critic that does not read the continuous parts or reads the
            discrete one, a temperature that is not positive, unknown parts or loss function, a gamma or a
            ``choice_entropy`` outside of [0, 1]; at a call, for an action with nodes and for values of another shape.
    """

    def __init__(
        self,
        actor: HybridActor,
        critic: nn.Module,
        *,
        gamma: float = 0.99,
        alpha: float | Mapping[NestedKey, float] = 1.0,
        learn_alpha: bool = True,
        entropy: Mapping[NestedKey, float] | None = None,
        choice_entropy: float = 0.98,
        loss_function: str = "l2",
    ) -> None:
        super().__init__()
        if loss_function not in LOSS_FUNCTIONS:
            raise ValueError(f"loss_function: expected one of {LOSS_FUNCTIONS}, received {loss_function!r}.")
        if not 0.0 <= choice_entropy <= 1.0:
            raise ValueError(f"choice_entropy: expected a share in [0, 1] of the greatest, received {choice_entropy}.")
        if not isinstance(actor, HybridActor):
            raise ValueError(f"actor: expected a HybridActor, received {type(actor).__name__}. Remedy: DeviceSACLoss.")
        self.discrete_key, self.continuous_keys, targets = _parts(actor, critic)
        self.part_keys = [*([] if self.discrete_key is None else [self.discrete_key]), *self.continuous_keys]
        targets |= self._by_part("entropy", entropy or {})
        # None for the discrete part: it depends on how many choices a state allows
        self.target_entropies = [targets.get(key) for key in self.part_keys]
        self.actor, self.critic = actor, critic
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        self.value_key = cast("list[NestedKey]", critic.out_keys)[0]
        self.gamma, self.loss_function, self.choice_entropy = checked_gamma(gamma), loss_function, choice_entropy
        initial = (
            dict.fromkeys(self.part_keys, alpha) if isinstance(alpha, int | float) else self._by_part("alpha", alpha)
        )
        temperatures = [float(cast("float", initial.get(key, 1.0))) for key in self.part_keys]
        if min(temperatures) <= 0:
            raise ValueError(f"alpha: expected positive temperatures, received {alpha}. Remedy: a small one for none.")
        log_alpha = torch.tensor([math.log(value) for value in temperatures], device=next(critic.parameters()).device)
        if learn_alpha:
            self.log_alpha = nn.Parameter(log_alpha)
        else:
            self.register_buffer("log_alpha", log_alpha)

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
        policy = None if self.discrete_key is None else cast("Any", dist.dists[self.discrete_key]).logits
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
        values = critic(_gathered(cast("dict[NestedKey, Tensor]", inputs | given), td.shape[0], td.device)).get(
            self.value_key
        )
        dims = 2 if self.discrete_key is None else 3
        if values.ndim != dims:
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
            reward, discount, terminated = step_of(td, self.gamma)
            target = reward + discount * self.soft_value(following, value).masked_fill(terminated, 0.0)
        value = self.values(self.critic, td, tuple(td.get(key) for key in self.continuous_keys))
        if self.discrete_key is not None:
            choice = td.get(self.discrete_key).long()[:, None, None].expand(*value.shape[:2], 1)
            value = value.gather(-1, choice).squeeze(-1)
        loss, priority = critic_loss(value, target, td.get("priority_weight", None), self.loss_function)
        return loss, priority, value.detach().mean(-1).mean()

    def actor_losses(
        self, td: TensorDictBase, draw: HybridDraw, *, detached: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The actor's and the temperatures' loss, 0-d, and the entropy of each part ``[P]``, detached.

        Args:
            td: the batch ``[B]``.
            draw: of its states, with a gradient.
            detached: let no gradient reach the critic's parameters.
        """
        weights = td.get("priority_weight", None)
        critic = without_gradient(self.critic) if detached else self.critic
        loss = -weighted_mean(self.soft_value(draw, self.values(critic, td, draw.actions)), weights)
        entropies = [-log_prob.detach() for log_prob in draw.log_probs]
        if draw.log_policy is not None:
            entropies.insert(0, masked_entropy(draw.log_policy.detach()))
        targets = self._targets(draw)
        excess = [weighted_mean(entropy - target, weights) for entropy, target in zip(entropies, targets, strict=True)]
        loss_alpha = (self.log_alpha * torch.stack(excess)).sum()
        return loss, loss_alpha, torch.stack([entropy.mean() for entropy in entropies])

    def _targets(self, draw: HybridDraw) -> list[Tensor | float]:
        """The target entropy of each part, a number or ``[B]``."""
        targets = cast("list[Tensor | float]", list(self.target_entropies))
        if draw.log_policy is not None and targets[0] is None:
            allowed = (draw.log_policy != -torch.inf).sum(-1)
            targets[0] = self.choice_entropy * allowed.to(draw.log_policy.dtype).log()
        return targets

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """All losses of a batch ``[B]`` from the same parameters; writes ``td_error [B]`` into it.

        Returns:
            0-d ``loss_qvalue``, ``loss_actor``, ``loss_alpha`` and, detached, ``alpha [P]`` and ``entropy [P]``, in the
            order of ``part_keys``. The gradient of ``loss_actor`` does not reach the critics, so that the sum of the
            losses can be differentiated.
        """
        draw, following = self.sample(tensordict)
        loss_qvalue, priority, _ = self.critic_losses(tensordict, following)
        loss_actor, loss_alpha, entropy = self.actor_losses(tensordict, draw, detached=True)
        tensordict.set("td_error", priority)
        return TensorDict(
            {
                "loss_qvalue": loss_qvalue,
                "loss_actor": loss_actor,
                "loss_alpha": loss_alpha,
                "alpha": self.log_alpha.detach().exp(),
                "entropy": entropy,
            }
        )

    def update_targets_(self, tau: float | Tensor) -> None:
        """Moves the target critics towards the critics by ``tau``, in one call."""
        polyak_update_(list(self.target_critic.parameters()), list(self.critic.parameters()), tau)


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
