"""An update of soft actor-critic in few launches."""

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.modules.actor import DeviceActor
from torchrl_perf.modules.squashed_normal import SquashedNormal, SquashedNormalHead
from torchrl_perf.objectives.sac import DeviceSACLoss
from torchrl_perf.runtime.draws import normal
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
from torchrl_perf.trainers.off_policy.passes import Outcome

__all__ = ["ChainedSAC", "chained_sac"]


def chained_sac(algorithm: ActorCritic) -> "ChainedSAC | None":
    """The update of an algorithm with a :class:`DeviceSACLoss`; None for networks of another form."""
    loss = algorithm.loss
    if type(loss) is not DeviceSACLoss or loss.skip_done_states or loss.separate_losses or not loss.delay_qvalue:
        return None
    actor, action_key = actor_chain(loss.actor), loss.action_key
    critic, target = critic_chain(loss.critic, action_key), critic_chain(loss.target_critic, action_key)
    if actor is None or critic is None or target is None or not critic.net.is_like(target.net):
        return None
    squashes = len(actor.head) == 1 and type(actor.head[0]) is SquashedNormalHead
    is_plain = type(loss.actor) is DeviceActor and loss.actor.made_of == (SquashedNormal, {})
    own = {id(param) for param in [*actor.net.params, *critic.net.params, loss.log_alpha]}
    learnt = [*algorithm.critic_optimizer.params, *algorithm.actor_optimizer.params]
    if not (squashes and is_plain and all(id(param) in own for param in learnt) and ChainedSAC.serves(algorithm)):
        return None
    return ChainedSAC(algorithm, actor, critic, target)


class ChainedSAC(ChainedUpdate):
    """Critics, actor, temperature and targets in this order, as :class:`~torchrl_perf.trainers.sac.SACPasses`.

    One launch for the actor's outputs at states and next states, one for the critics and their targets, one for the
    critics at the actor's actions, one each for the gradients down critics, critics again and actor, one for the
    gradients of the parameters of critics and actor, and one for each step; the rest is compiled between them.
    """

    def __init__(self, algorithm: Any, actor: ActorChain, critic: CriticChain, target_critic: CriticChain) -> None:
        super().__init__(algorithm, actor, critic, target_critic)
        temperature = [self.loss.log_alpha] if self.loss.learns_alpha else []
        self.actor_step = actor_step(algorithm, actor, None, temperature)
        self._squashed = Differentiable(self.loss, self._action, [])
        self._critic_loss = Differentiable(self.loss, self._critic_part, [])
        self._actor_loss = Differentiable(self.loss, self._actor_part, temperature)
        compiled = algorithm.setup.compiled
        self._inputs_fn, self._drawn_fn = compiled(self._inputs), compiled(self._drawn)
        self._critics_fn, self._actors_fn = compiled(self._critics), compiled(self._actors)
        self._pushed_fn = compiled(self._pushed)

    def __call__(self, sample: TensorDictBase, actor_due: bool = True) -> Outcome:
        """Losses, gradients and steps of a sample ``[B]``."""
        tau, rows, size = self.algorithm.target_share(), len(sample), self.critic.net.size
        x = self._inputs_fn(sample)
        y, kept_actor = self.actor.net.forward(x)
        taken, fresh, log_prob, next_log_prob, noise = self._drawn_fn(sample, y)
        values, kept = self.values(taken, beside=True)
        losses, means, priority, g = self._critics_fn(sample, values, next_log_prob)
        gradients, _ = self.critic.net.backward(g, kept, taken[:1])
        critic_step = self.critic_step(of_first(gradients), [], losses["loss_critic"], tau)
        values, kept = self.values(fresh)
        of_actor, of_mean, total, g, g_log_prob, temperature = self._actors_fn(sample, values, log_prob)
        _, dx = self.critic.net.backward(g, kept, needs_x=True)
        g = self._pushed_fn(sample, y, noise, dx, g_log_prob)
        gradients, _ = self.actor.net.backward(g, kept_actor, x)
        step = self.actor_step(of_first(gradients), temperature, total, None)
        assert values.shape == (size, rows, 1)
        return self.outcome((losses, means, priority), critic_step, (of_actor, of_mean), step)

    def _inputs(self, sample: TensorDictBase) -> Tensor:
        """``[1, 2 B, O]`` what the actor reads of states and next states."""
        return torch.cat([self.actor.observations(sample), self.actor.observations(sample, following=True)])[None]

    def _drawn(self, sample: TensorDictBase, y: Tensor) -> tuple[Tensor, ...]:
        """What critics read of the actions taken and the next ones ``[2, B, IN]``, and of fresh ones ``[1, B, IN]``.

        Then log-probabilities ``[B]`` of fresh actions for states, and next states, and the noise of the former.
        """
        rows = len(sample)
        like = sample.get(self.loss.action_key)
        noise = normal(torch.Size((2 * rows, *like.shape[1:])), dtype=torch.float32, device=y.device)
        action, log_prob = self._action(noise, y[0])[0]
        now, later = (self.critic.observations(sample, following=following) for following in (False, True))
        if self.target_critic.normalization is not None:
            later = self.target_critic.observations(sample, following=True)
        taken = torch.stack([torch.cat([now, like.float()], -1), torch.cat([later, action[rows:]], -1)])
        fresh = torch.cat([now, action[:rows]], -1)[None]
        return taken, fresh, log_prob[:rows], log_prob[rows:], noise[:rows]

    def _action(self, noise: Tensor, y: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
        return SquashedNormal(*self.actor.headed(y)).rsample_and_log_prob(noise=noise), ()

    def _critics(
        self, sample: TensorDictBase, values: Tensor, next_log_prob: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
        """Loss, means, priorities ``[B]`` and the gradient in the critics' values ``[K, B, 1]``."""
        value, next_value = values.chunk(2)
        (loss,), (priority, mean, td_error), pull = self._critic_loss.pullback(
            (sample, next_value, next_log_prob), value
        )
        _, (g,) = pull([torch.ones_like(loss)])
        return {"loss_critic": loss}, {"value": mean, "td_error": td_error}, priority, g.contiguous()

    def _critic_part(self, context: tuple[TensorDictBase, Tensor, Tensor], value: Tensor) -> tuple[Any, ...]:
        (sample, next_value, next_log_prob), loss = context, cast("DeviceSACLoss", self.loss)
        values = of_rows(value)
        rows, priority = loss.rows_of_values(sample, values, of_rows(next_value), next_log_prob)
        mean = loss.mean(values.detach().mean(-1), sample)
        return (loss.reduced(rows, sample),), (priority, mean, priority.mean())

    def _actors(
        self, sample: TensorDictBase, values: Tensor, log_prob: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor, Tensor, list[Tensor]]:
        """Losses, means, their sum, and its gradients in values, log-probabilities and temperature."""
        (total,), (actor, alpha_loss, alpha, entropy), pull = self._actor_loss.pullback(sample, values, log_prob)
        temperature, (g, g_log_prob) = pull([torch.ones_like(total)])
        losses, means = {"loss_actor": actor, "loss_alpha": alpha_loss}, {"alpha": alpha, "entropy": entropy}
        return losses, means, total, g.contiguous(), g_log_prob, temperature

    def _actor_part(self, sample: TensorDictBase, values: Tensor, log_prob: Tensor) -> tuple[Any, ...]:
        loss = cast("DeviceSACLoss", self.loss)
        actor, temperature = loss.actor_losses_of_values(sample, of_rows(values), log_prob)
        row = (actor, temperature, loss.log_alpha.exp(), -log_prob.mean())
        return (actor + temperature,), tuple(value.detach() for value in row)

    def _pushed(self, sample: TensorDictBase, y: Tensor, noise: Tensor, dx: Tensor, g_log_prob: Tensor) -> Tensor:
        """The gradient in the actor's outputs ``[1, B, 2 D]`` from that in what the critics read, ``[K, B, IN]``."""
        rows, width = noise.shape
        _, _, pull = self._squashed.pullback(noise, y[0, :rows])
        _, (g,) = pull([dx[..., -width:].sum(0), g_log_prob])
        return g[None].contiguous()


def of_rows(values: Tensor) -> Tensor:
    """Values ``[K, B, 1]`` as losses read them, ``[B, K]``."""
    return values.squeeze(-1).movedim(0, -1)
