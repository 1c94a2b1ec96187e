"""An update of DDPG or TD3 in few launches."""

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.modules.deterministic import DeterministicActor
from torchrl_perf.objectives.td3 import DeviceTD3Loss
from torchrl_perf.trainers.off_policy.actor_critic import ActorCritic
from torchrl_perf.trainers.off_policy.chained import (
    ActorChain,
    ChainedUpdate,
    CriticChain,
    actor_chain,
    actor_step,
    critic_chain,
    of_first,
)
from torchrl_perf.trainers.off_policy.chained_sac import of_rows
from torchrl_perf.trainers.off_policy.passes import Outcome

__all__ = ["ChainedDeterministic", "chained_deterministic"]


def chained_deterministic(algorithm: ActorCritic) -> "ChainedDeterministic | None":
    """The update of an algorithm with a :class:`DeviceTD3Loss`; None for networks of another form."""
    loss = algorithm.loss
    if type(loss) is not DeviceTD3Loss or loss.separate_losses or not (loss.delay_qvalue and loss.delay_actor):
        return None
    action_key = loss.action_key
    critic, target_critic = critic_chain(loss.critic, action_key), critic_chain(loss.target_critic, action_key)
    actor, target_actor = actor_chain(loss.actor), actor_chain(loss.target_actor)
    if critic is None or target_critic is None or actor is None or target_actor is None:
        return None
    alike = critic.net.is_like(target_critic.net) and actor.net.is_like(target_actor.net)
    own = {id(param) for param in [*actor.net.params, *critic.net.params]}
    learnt = [*algorithm.critic_optimizer.params, *algorithm.actor_optimizer.params]
    acts = type(loss.actor) is DeterministicActor and not actor.head
    if not (alike and acts and all(id(param) in own for param in learnt) and ChainedUpdate.serves(algorithm)):
        return None
    return ChainedDeterministic(algorithm, actor, target_actor, critic, target_critic)


class ChainedDeterministic(ChainedUpdate):
    """The critics and, where the actor is due, actor and targets: as ``DeterministicPasses``.

    The target actor acts at the next states, in one launch with the actor at the states where that is due.
    """

    def __init__(
        self, algorithm: Any, actor: ActorChain, target_actor: ActorChain, critic: CriticChain,
        target_critic: CriticChain,
    ) -> None:  # fmt: skip
        super().__init__(algorithm, actor, critic, target_critic)
        self.target_actor = target_actor
        self.actor_step = actor_step(algorithm, actor, target_actor)
        self._acted = Differentiable(self.loss, self._action, [])
        self._critic_loss = Differentiable(self.loss, self._critic_part, [])
        self._actor_loss = Differentiable(self.loss, self._actor_part, [])
        compiled = algorithm.setup.compiled
        self._inputs_fn, self._taken_fn = compiled(self._inputs), compiled(self._taken)
        self._critics_fn, self._fresh_fn = compiled(self._critics), compiled(self._fresh)
        self._actors_fn, self._pushed_fn = compiled(self._actors), compiled(self._pushed)

    def __call__(self, sample: TensorDictBase, actor_due: bool = True) -> Outcome:
        """Losses, gradients and steps of a sample ``[B]``, those of the actor where it is due."""
        tau = self.algorithm.target_share() if actor_due else None
        x = self._inputs_fn(sample, actor_due)
        if actor_due:
            y, kept_actor = self.actor.net.forward(x, beside=self.target_actor.net)
        else:
            y, kept_actor = self.target_actor.net.forward(x, save=False)
        taken = self._taken_fn(sample, y)
        values, kept = self.values(taken, beside=True)
        losses, means, priority, g = self._critics_fn(sample, values)
        gradients, _ = self.critic.net.backward(g, kept, taken[:1])
        told = losses, means, priority
        critic_step = self.critic_step(of_first(gradients), [], losses["loss_critic"], tau)
        if not actor_due:
            return self.outcome(told, critic_step)
        values, kept = self.values(self._fresh_fn(sample, y))
        loss, g = self._actors_fn(sample, values)
        _, dx = self.critic.net.backward(g, kept, needs_x=True)
        g = self._pushed_fn(sample, y, dx)
        gradients, _ = self.actor.net.backward(g, kept_actor, x[:1])
        step = self.actor_step(of_first(gradients), [], loss, tau)
        return self.outcome(told, critic_step, ({"loss_actor": loss}, {}), step)

    def _inputs(self, sample: TensorDictBase, actor_due: bool) -> Tensor:
        """What the target actor reads of next states, behind what the actor reads of states, ``[1 or 2, B, O]``."""
        following = self.target_actor.observations(sample, following=True)
        return torch.stack([self.actor.observations(sample), following] if actor_due else [following])

    def _action(self, actor: Any, y: Tensor) -> tuple[tuple[Tensor], tuple[()]]:
        return (cast("DeterministicActor", actor).bounded(y),), ()

    def _taken(self, sample: TensorDictBase, y: Tensor) -> Tensor:
        """What critics and targets read, of actions taken and the targets' own, ``[2, B, IN]``."""
        loss = cast("DeviceTD3Loss", self.loss)
        following = loss.smoothed(loss.target_actor.bounded(y[-1]))
        now = self.critic.observations(sample), sample.get(loss.action_key).float()
        later = self.target_critic.observations(sample, following=True), following
        return torch.stack([torch.cat(now, -1), torch.cat(later, -1)])

    def _fresh(self, sample: TensorDictBase, y: Tensor) -> Tensor:
        """What the critics read of the actor's actions, ``[1, B, IN]``."""
        return torch.cat([self.critic.observations(sample), self.loss.actor.bounded(y[0])], -1)[None]

    def _critics(
        self, sample: TensorDictBase, values: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
        """Loss, means, priorities ``[B]`` and the gradient in the critics' values ``[K, B, 1]``."""
        value, next_value = values.chunk(2)
        (loss,), (priority, mean, td_error), pull = self._critic_loss.pullback((sample, next_value), value)
        _, (g,) = pull([torch.ones_like(loss)])
        return {"loss_critic": loss}, {"value": mean, "td_error": td_error}, priority, g.contiguous()

    def _critic_part(self, context: tuple[TensorDictBase, Tensor], value: Tensor) -> tuple[Any, ...]:
        sample, next_value = context
        of = cast("DeviceTD3Loss", self.loss).losses_of_values
        loss, priority, mean = of(sample, of_rows(value), of_rows(next_value))
        return (loss,), (priority, mean, priority.mean())

    def _actors(self, sample: TensorDictBase, values: Tensor) -> tuple[Tensor, Tensor]:
        """The actor's loss, and its gradient in the critics' values ``[K, B, 1]``."""
        (loss,), _, pull = self._actor_loss.pullback(sample, values)
        _, (g,) = pull([torch.ones_like(loss)])
        return loss, g.contiguous()

    def _actor_part(self, sample: TensorDictBase, values: Tensor) -> tuple[Any, ...]:
        return (-self.loss.reduced(of_rows(values)[..., 0], sample),), ()

    def _pushed(self, sample: TensorDictBase, y: Tensor, dx: Tensor) -> Tensor:
        """The gradient in the actor's outputs ``[1, B, D]`` from that in what the critics read, ``[K, B, IN]``."""
        _, _, pull = self._acted.pullback(self.loss.actor, y[0])
        _, (g,) = pull([dx[..., -y.shape[-1] :].sum(0)])
        return g[None].contiguous()
