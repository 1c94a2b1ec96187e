"""The losses of DDPG and TD3 in parts that a compiled update can take apart."""

import copy
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.polyak import polyak_update_
from torchrl_perf.functional.sac import critic_loss, weighted_mean
from torchrl_perf.objectives.sac import LOSS_FUNCTIONS, VALUE_KEY, without_gradient
from torchrl_perf.objectives.value_loss import checked_gamma, step_of, weights_of


class DeterministicPolicyLoss(nn.Module):
    """Base of :class:`DeviceTD3Loss` and :class:`ACIQNLoss`: a deterministic actor, a critic, and targets of both.

    :meth:`forward` gives all losses from the same parameters; :meth:`critic_losses` and :meth:`actor_losses` are its
    parts, with which the critic can be updated before the actor.

    Args:
        actor: a TensorDict module that writes the action first, such as a ``DeterministicActor``.
        critic: the critic.
        gamma: discount factor.

    Attributes:
        target_actor: copy of the actor that the targets are made of; no gradient reaches it.
        target_critic: likewise of the critic.

    Raises:
        ValueError: for a gamma outside of [0, 1].
    """

    def __init__(self, actor: nn.Module, critic: nn.Module, *, gamma: float = 0.99) -> None:
        super().__init__()
        self.gamma = checked_gamma(gamma)
        self.action_key = cast("list[NestedKey]", actor.out_keys)[0]
        self.actor, self.critic = actor, critic
        self.target_actor = copy.deepcopy(actor).requires_grad_(False)
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        self._pairs = self._target_pairs()

    def _target_pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        targets: list[Tensor] = [*self.target_critic.parameters(), *self.target_actor.parameters()]
        sources: list[Tensor] = [*self.critic.parameters(), *self.actor.parameters()]
        return targets, sources

    def act(self, actor: Any, td: TensorDictBase, *, following: bool = False) -> Tensor:
        """``[*, D]`` actions of the batch's states, or with ``following`` its next states."""
        inputs = {key: td.get(("next", key) if following else key) for key in actor.in_keys}
        return actor(TensorDict(inputs, td.batch_size, device=td.device)).get(self.action_key)

    def critic_losses(self, td: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """The critic's loss 0-d, the priority of each row ``[*]`` and the mean value 0-d, the last two detached."""
        raise NotImplementedError

    def policy_value(self, critic: Any, td: TensorDictBase, action: Tensor) -> Tensor:
        """``[*]`` value of an action of each state, as the actor is to raise it.

        Args:
            critic: the critic, or what calls it with other parameters.
            td: the batch.
            action: ``[*, D]``.
        """
        raise NotImplementedError

    def actor_losses(self, td: TensorDictBase, *, detached: bool = False) -> Tensor:
        """``-Q(s, mu(s))``, 0-d.

        Args:
            td: the batch ``[*]``.
            detached: let no gradient reach the critic's parameters. Freezing them, or differentiating the actor's
                alone, is the cheaper way.
        """
        critic = without_gradient(self.critic) if detached else self.critic
        value = self.policy_value(critic, td, self.act(self.actor, td))
        return -weighted_mean(value, weights_of(td, value))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """All losses of a batch ``[*]`` from the same parameters; writes ``td_error [*]`` into it.

        Returns:
            0-d ``loss_qvalue``, ``loss_actor`` and, detached, ``pred_value``. The gradient of ``loss_actor`` does not
            reach the critic, so that the sum of the losses can be differentiated.
        """
        loss_qvalue, priority, value = self.critic_losses(tensordict)
        loss_actor = self.actor_losses(tensordict, detached=True)
        tensordict.set("td_error", priority)
        return TensorDict({"loss_qvalue": loss_qvalue, "loss_actor": loss_actor, "pred_value": value})

    def update_targets_(self, tau: float | Tensor) -> None:
        """Moves the target actor and critic by ``tau``, in one call; 1 copies."""
        polyak_update_(*self._pairs, tau)


class DeviceTD3Loss(DeterministicPolicyLoss):
    """TD3 (arXiv:1802.09477), and with one critic and ``target_noise=0`` DDPG (arXiv:1509.02971).

    The equations are those of TorchRL's ``TD3Loss`` and ``DDPGLoss``. The least of the K critics makes the target; the
    first teaches the actor. How often the actor learns is the trainer's to say. Nothing waits for the host.

    Keys read: the actor's and critic's ``in_keys``, at the root and under "next", ``action``, ("next", "reward") and
    ("next", "terminated") ``[*, 1]``; where present ``priority_weight [*]`` and ``steps_to_next_obs [*, 1]``. Written
    by :meth:`forward`: ``td_error [*]``, the largest absolute difference of the critics.

    Args:
        actor: a TensorDict module that writes the action first, such as a ``DeterministicActor``.
        critic: a TensorDict module that reads observations and the action and writes ``state_action_value [*, K]``.
        gamma: discount factor.
        loss_function: of the critics, ``"l2"`` or ``"smooth_l1"``.
        target_noise: standard deviation of the noise on the target action, as a share of half the bounds' width.
        noise_clip: largest such noise, in the same unit.

    Raises:
        ValueError: for an unknown loss function, a gamma outside of [0, 1], negative noise, a critic without the action
            among its ``in_keys``, and noise on the actions of an actor without bounds.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        *,
        gamma: float = 0.99,
        loss_function: str = "l2",
        target_noise: float = 0.2,
        noise_clip: float = 0.5,
    ) -> None:
        super().__init__(actor, critic, gamma=gamma)
        if loss_function not in LOSS_FUNCTIONS:
            raise ValueError(f"loss_function: expected one of {LOSS_FUNCTIONS}, received {loss_function!r}.")
        if min(target_noise, noise_clip) < 0:
            raise ValueError(f"noise: expected at least 0, received {target_noise} clipped at {noise_clip}.")
        if self.action_key not in cast("list[NestedKey]", critic.in_keys):
            raise ValueError(
                f"critic: expected {self.action_key!r}, the actor's action, among its in_keys, received "
                f"{critic.in_keys}. Remedy: set the critic's in_keys."
            )
        if target_noise > 0 and not (hasattr(actor, "low") and hasattr(actor, "high")):
            raise ValueError(
                f"actor: expected bounds low [D] and high [D], which the target noise is measured by, received "
                f"{type(actor).__name__} without. Remedy: DeterministicActor, or target_noise=0."
            )
        self.loss_function, self.target_noise, self.noise_clip = loss_function, target_noise, noise_clip

    def values(self, critic: Any, td: TensorDictBase, action: Tensor, *, following: bool = False) -> Tensor:
        """``[*, K]`` values of ``action [*, D]`` in the batch's states, or with ``following`` its next states."""
        keys = [key for key in cast("list[NestedKey]", self.critic.in_keys) if key != self.action_key]
        inputs = {key: td.get(("next", key) if following else key) for key in keys}
        inputs[self.action_key] = action
        return critic(TensorDict(inputs, td.batch_size, device=td.device)).get(VALUE_KEY)

    def next_action(self, td: TensorDictBase, noise: Tensor | None = None) -> Tensor:
        """``[*, D]`` actions of the target actor, with clipped noise, within the bounds.

        Args:
            td: the batch ``[*]``.
            noise: ``[*, D]`` standard normal numbers instead of fresh ones.
        """
        action = self.act(self.target_actor, td, following=True)
        if self.target_noise == 0:
            return action
        low, high = cast("Any", self.target_actor).low, cast("Any", self.target_actor).high
        unit = torch.randn_like(action) if noise is None else noise
        shift = (unit * self.target_noise).clamp(-self.noise_clip, self.noise_clip) * (high - low) / 2
        return (action + shift).clamp(low, high)

    def critic_losses(self, td: TensorDictBase, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The critics' loss 0-d, the priority of each row ``[*]`` and the mean value 0-d, the last two detached.

        Args:
            td: the batch ``[*]``.
            noise: as for :meth:`next_action`.
        """
        with torch.no_grad():
            reward, discount, terminated = step_of(td, self.gamma)
            following = self.values(self.target_critic, td, self.next_action(td, noise), following=True).amin(-1)
            # what the networks say of a terminal state is not looked at, NaN or not
            target = reward + discount * following.masked_fill(terminated, 0.0)
        value = self.values(self.critic, td, cast("Tensor", td.get(self.action_key)))
        loss, priority = critic_loss(value, target, weights_of(td, target), self.loss_function)
        return loss, priority, value.detach().mean(-1).mean()

    def policy_value(self, critic: Any, td: TensorDictBase, action: Tensor) -> Tensor:
        """``[*]`` the first critic's value."""
        return self.values(critic, td, action)[..., 0]
