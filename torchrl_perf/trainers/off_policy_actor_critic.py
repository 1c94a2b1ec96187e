"""What off-policy trainers with an actor and a critic share: one update of both, compiled whole or in stages."""

import itertools
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchrl.collectors import BaseCollector
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase

from torchrl_perf.modules.aligned import AlignedLinear
from torchrl_perf.modules.ensemble import EnsembleQ
from torchrl_perf.objectives.sac import VALUE_KEY
from torchrl_perf.runtime.oom import Part, parts_of, refused
from torchrl_perf.trainers.actor_critic_config import ActorCriticConfig
from torchrl_perf.trainers.group_adam import GroupAdam
from torchrl_perf.trainers.off_policy import OffPolicyTrainer, with_steps
from torchrl_perf.trainers.recurrent import refuse_recurrent
from torchrl_perf.trainers.run.state import Stateful
from torchrl_perf.trainers.spaces import continuous_action, vector_observation

Row = tuple[Tensor, ...]  # statistics of an update, 0-d each
Outcome = tuple[Tensor, Row, Row, Row, Row]  # priorities [B]; rows of critics, actor; norms; whether steps were taken
Step = tuple[Tensor, Row, list[Tensor]]  # priorities or loss; statistics; gradients


class ActorCriticTrainer(OffPolicyTrainer):
    """A critic and an actor, each with an optimiser and targets, updated in one compiled function of device state.

    The critic steps first, the actor learns from the critic so updated, and targets follow. Where memory runs out, the
    update goes on in stages that can be repeated, each in micro-batches.

    An algorithm writes :meth:`make_actor`, :meth:`make_critic`, :meth:`make_loss`, and the passes
    :meth:`critic_gradients` and :meth:`actor_gradients`.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs]; by default the package's task that the config names.
        collector: a collector that acts with the trainer's policy, such as a ``HostCollector`` with
            ``init_random_frames``; by default a :class:`DeviceCollector` of the env.
        actor: a TensorDict module for the env's action; by default that of the collector's policy, or
            :meth:`make_actor` where there is no collector.
        critic: by default :meth:`make_critic`.

    Attributes:
        loss: actor, critics and targets.
        carried: entries of a policy's state that this algorithm learns from; others are refused.
        actor_interval: updates from one step of the actor, and of the targets, to the next.

    Raises:
        ValueError: at construction, for actions that are not continuous and bounded, or parts that do not fit.
    """

    losses: ClassVar[tuple[str, ...]] = ("loss_critic", "loss_actor")
    carried: ClassVar[tuple[NestedKey, ...]] = ()
    config: ActorCriticConfig
    actor_interval: int = 1

    def __init__(
        self,
        config: ActorCriticConfig,
        *,
        env: EnvBase | None = None,
        collector: BaseCollector | None = None,
        actor: nn.Module | None = None,
        critic: nn.Module | None = None,
    ) -> None:
        self._given = (actor, critic)
        self._collecting = getattr(collector, "policy", None)
        self._specs = getattr(collector, "specs", None)
        given = {"actor": actor, "critic": critic, "policy": self._collecting}
        refuse_recurrent(type(self).__name__, given, env=env, own_state=self.carried)
        super().__init__(config, env=env, collector=collector)

    # -- what an algorithm writes -------------------------------------------------------------------------------------

    @abstractmethod
    def make_actor(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """The actor for specs ``[*, O]`` and ``[*, D]``."""

    @abstractmethod
    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """The critic for specs ``[*, O]`` and ``[*, D]``."""

    @abstractmethod
    def make_loss(self, actor: nn.Module, critic: nn.Module) -> Any:
        """The losses of actor and critic, with ``target_critic`` and, where there is one, ``target_actor``."""

    @abstractmethod
    def critic_gradients(self, sample: TensorDictBase, context: Any, weight: float | Tensor = 1.0) -> Step:
        """Priorities ``[b]``; loss, mean value, mean priority; gradients of the critics' loss times ``weight``."""

    @abstractmethod
    def actor_gradients(self, sample: TensorDictBase, context: Any, weight: float | Tensor = 1.0) -> Step:
        """The actor's losses in all 0-d; each of them and other statistics; gradients of the sum times ``weight``."""

    def context(self, sample: TensorDictBase, noise: Tensor | None, *, to_actor: bool = True) -> Any:
        """What the passes of critics and actor have in common; by default the noise.

        Args:
            sample: the batch ``[b]``.
            noise: what :meth:`noise` gave for these rows, or None for fresh numbers.
            to_actor: whether the actor's pass follows, or only the critics'.
        """
        return noise

    def noise(self, sample: TensorDictBase) -> Tensor | None:
        """``[k B, D]`` numbers that the passes draw with, so that they are the same however often they are repeated."""
        return None

    def actor_groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Parameters that learn with the actor, and their step sizes."""
        return [(list(self.loss.actor.parameters()), self.config.actor_learning_rate)]

    def actor_of(self, policy: nn.Module) -> nn.Module:
        """The actor in a policy that collects; by default the policy itself."""
        return policy

    def policy_of(self, actor: nn.Module) -> nn.Module:
        """The policy that collects with an actor; by default the actor itself."""
        return actor

    # -- what the base asks for ---------------------------------------------------------------------------------------

    @property
    def specs(self) -> Any:
        """The env, or what its collector says of it; None where neither is there."""
        return self.env if self.env is not None else self._specs

    def build(self) -> nn.Module:
        """Networks, losses and optimisers."""
        actor, critic = self._given
        policy = self._collecting
        if actor is None and policy is not None:
            actor = self.actor_of(policy)
        specs = self.specs
        unknown = specs is None
        if unknown and (actor is None or critic is None):
            raise ValueError(
                "actor, critic: expected both where only a collector without specs is given, received "
                f"{[type(module).__name__ for module in (actor, critic)]}. Remedy: pass actor= and critic=."
            )
        if actor is None:
            actor = self.make_actor(vector_observation(specs), continuous_action(specs))
        if critic is None:
            critic = self.make_critic(vector_observation(specs), continuous_action(specs))
        self.loss = self.make_loss(self.acceleration.policy(actor), self.acceleration.policy(critic))
        self._make_optimizers()
        self._update_fn = self.compiled(self._update)
        self._count_fn = self.compiled(self._count)
        self._critic_micro_fn = self.compiled(self._critic_micro)
        self._actor_micro_fn = self.compiled(self._actor_micro)
        self._trials = 3 * self.actor_interval
        # a collector's that does not act with this actor is refused where the collector is checked
        return policy if policy is not None and self.actor_of(policy) is actor else self.policy_of(actor)

    def _make_optimizers(self) -> None:
        loss, config = self.loss, self.config
        target_actor = getattr(loss, "target_actor", None)
        self.critic_optimizer = self.make_optimizer(
            [(list(loss.critic.parameters()), config.critic_learning_rate)], loss.target_critic
        )
        self.actor_optimizer = self.make_optimizer(self.actor_groups(), target_actor)
        names = {param: name for name, param in loss.named_parameters()}
        params = [*self.critic_optimizer.params, *self.actor_optimizer.params]
        self.parameter_names = [names[param] for param in params]

    def make_optimizer(
        self, groups: list[tuple[list[nn.Parameter], float]], target: nn.Module | None = None
    ) -> GroupAdam:
        """Adam of groups of parameters with a step size each; the parameters of ``target`` follow them."""
        return GroupAdam(
            groups,
            max_grad_norm=self.config.max_grad_norm,
            targets=[] if target is None else list(target.parameters()),
            compile=self.mode != "eager",
            loss_scale=self.acceleration.make_loss_scale(self.device),
        )

    def parts(self) -> dict[str, Stateful]:
        """Networks and targets; the optimisers' moments."""
        return {
            "loss": self.loss,
            "critic_optimizer": self.critic_optimizer,
            "actor_optimizer": self.actor_optimizer,
        }

    def schedule(self) -> None:
        """Nothing changes with the iteration."""

    def update(self, sample: TensorDictBase) -> None:
        """One step of critics, actor and targets from ``sample [B]``; of the critics alone where the actor waits."""
        due = (self.update_number + 1) % self.actor_interval == 0
        with self.acceleration.active(self.device), torch.no_grad():
            outcome = self._whole_update(sample, due) if self.mode != "eager" and self.micro.parts == 1 else None
            priority, critic_row, actor_row, norms, taken = outcome or self._staged_update(sample, due)
            if self.config.sampler == "prioritized":
                generation = sample.get("index_generation")
                self.buffer.update_priority(sample.get("index"), priority, generation=generation)
            self.guard.note(*self._count_fn(critic_row, actor_row, norms, taken))

    def probe(self, rows: TensorDictBase) -> None:
        """The passes of an update on a sample ``rows [b]``, eagerly, to see how much memory they take."""
        with torch.no_grad():
            rows = with_steps(rows)
            context = self.context(rows, None)
            self.critic_gradients(rows, context)
            self.actor_gradients(rows, context)

    # -- one update ---------------------------------------------------------------------------------------------------

    def _update(self, sample: TensorDictBase, actor_due: bool = True) -> Outcome:
        """Losses, gradients and steps: priorities ``[B]``, statistics and flags of the update."""
        context = self.context(sample, None, to_actor=actor_due)
        tau = self.tau if actor_due else 0.0
        priority, critic_row, grads = self.critic_gradients(sample, context)
        critic_ok, critic_norm = self.critic_optimizer.step(grads, critic_row[0], tau)
        if not actor_due:
            return priority, critic_row, *self._no_actor_step(critic_ok, critic_norm)
        total, actor_row, grads = self.actor_gradients(sample, context)
        actor_ok, actor_norm = self.actor_optimizer.step(grads, total, tau)
        # stacked by the caller: fused with the sums over the batch, it is a kernel that Triton fails to compile
        return priority, critic_row, actor_row, (critic_norm, actor_norm), (critic_ok, actor_ok)

    def _no_actor_step(self, critic_ok: Tensor, critic_norm: Tensor) -> tuple[Row, Row, Row]:
        """Statistics of the actor, norms and flags of an update in which the actor waits."""
        zero = torch.zeros_like(critic_norm)
        others = 5  # the critics' loss, value, error, and two norms
        return (zero,) * (len(self.statistics) - others), (critic_norm, zero), (critic_ok, torch.ones_like(critic_ok))

    def _whole_update(self, sample: TensorDictBase, due: bool) -> Outcome | None:
        """The compiled update; None where memory ran out, nothing has changed, and micro-batches are to be made.

        Compiled, nobody knows which parameters it has written when memory runs out. So the first updates, which need
        as much memory as all others, begin with a copy; and a recording computes nothing.
        """
        args = () if due else (False,)
        if not self.micro.recording and self._trials == 0:
            with refused("update", "go on from the last checkpoint; this update may be half done"):
                return self._update_fn(sample, *args)
        states = [] if self.micro.recording else [part.state_dict() for part in self.parts().values()]
        values = [leaf.detach() for leaf in tree_leaves(states) if isinstance(leaf, Tensor)]
        before = [value.clone() for value in values]

        def undo() -> None:
            for value, old in zip(values, before, strict=True):
                value.copy_(old)

        def attempt(parts: int) -> Outcome | None:
            return self._update_fn(sample, *args) if parts == 1 else None

        outcome = self.micro.run(attempt, len(sample), undo=undo)
        self._trials = max(0, self._trials - 1)
        return outcome

    def _staged_update(self, sample: TensorDictBase, due: bool) -> Outcome:
        """:meth:`_update` in stages that can be repeated, with the optimisers' steps between them."""
        rows, noise = len(sample), self.noise(sample)
        carry: list[Any] = []  # from the first stage to the second, where neither is split
        tau = self.tau if due else 0.0

        def critics(parts: int) -> Step:
            if parts > 1:
                return self._split_critics(sample, noise, parts)
            carry.append(self.context(sample, noise, to_actor=due))
            return self.critic_gradients(sample, carry[0])

        def actor(parts: int) -> Step:
            if parts == 1 and carry:
                return self.actor_gradients(sample, carry.pop())
            return self._split_actor(sample, noise, parts)

        priority, critic_row, grads = self.micro.run(critics, rows, undo=carry.clear)
        critic_ok, critic_norm = self.critic_optimizer.step(grads, critic_row[0], tau)
        if not due:
            return priority, critic_row, *self._no_actor_step(critic_ok, critic_norm)
        total, actor_row, grads = self.micro.run(actor, rows)
        actor_ok, actor_norm = self.actor_optimizer.step(grads, total, tau)
        return priority, critic_row, actor_row, (critic_norm, actor_norm), (critic_ok, actor_ok)

    def _micro_batches(
        self, sample: TensorDictBase, noise: Tensor | None, parts: int
    ) -> Iterator[tuple[Part, Tensor | None]]:
        """The parts of a sample, each with its noise."""
        start, blocks = 0, None if noise is None else noise.unflatten(0, (-1, len(sample)))
        for part in parts_of(sample, parts, sample.get("priority_weight", None)):
            end = start + len(part.batch)
            yield part, None if blocks is None else blocks[:, start:end].flatten(0, 1)
            start = end

    def _split_critics(self, sample: TensorDictBase, noise: Tensor | None, parts: int) -> Step:
        priorities, rows, total = [], [], []
        for part, part_noise in self._micro_batches(sample, noise, parts):
            priority, (loss, *means), grads = self._critic_micro_fn(part.batch, part_noise, part.weight)
            priorities.append(priority)
            rows.append(torch.stack([loss * part.weight, *(mean * part.share for mean in means)]))
            total = summed(total, grads)
        return torch.cat(priorities), torch.stack(rows).sum(0).unbind(), total

    def _split_actor(self, sample: TensorDictBase, noise: Tensor | None, parts: int) -> Step:
        rows, total, count = [], [], len(self.losses) - 1
        for part, part_noise in self._micro_batches(sample, noise, parts):
            _, row, grads = self._actor_micro_fn(part.batch, part_noise, part.weight)
            losses = [loss * part.weight for loss in row[:count]]
            rows.append(torch.stack([*losses, *(mean * part.share for mean in row[count:])]))
            total = summed(total, grads)
        row = torch.stack(rows).sum(0)
        return row[:count].sum(), row.unbind(), total

    def _critic_micro(self, sample: TensorDictBase, noise: Tensor | None, weight: float | Tensor) -> Step:
        return self.critic_gradients(sample, self.context(sample, noise, to_actor=False), weight)

    def _actor_micro(self, sample: TensorDictBase, noise: Tensor | None, weight: float | Tensor) -> Step:
        return self.actor_gradients(sample, self.context(sample, noise), weight)

    @property
    def tau(self) -> float | Tensor:
        """How far the targets move at an update of the actor."""
        return self.config.tau

    def _count(self, critic_row: Row, actor_row: Row, norms: Row, taken: Row) -> tuple[Tensor, Tensor, Tensor]:
        """Keeps the statistics; what the guard notes: losses ``[L]``, gradients ``[P]``, whether there is a fault."""
        loss, value, td_error = critic_row
        critic, actor = self.critic_optimizer, self.actor_optimizer
        losses = [loss, *actor_row[: len(self.losses) - 1]]
        fault = critic.is_fault(loss, norms[0]) | actor.is_fault(torch.stack(losses[1:]).sum(), norms[1])
        # of the updates in which it waits the actor has zeros: the mean over all updates becomes that over its own
        if self.actor_interval > 1:
            actor_row = tuple(value * self.actor_interval for value in actor_row)
            norms = (norms[0], norms[1] * self.actor_interval)
        row = torch.stack([loss, *actor_row, value, td_error, *norms])
        self.count_update(row, taken[0] & taken[1], fault)
        return torch.stack(losses), torch.cat([critic.grad_checks, actor.grad_checks]), fault


def summed(total: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Gradients added to those of the parts before; ``total`` is empty before the first."""
    # not in place: a compiled function may return views
    return list(torch._foreach_add(total, grads)) if total else grads


def actor_layers(in_features: int, out_features: int, config: ActorCriticConfig) -> list[nn.Module]:
    """The layers of an actor: two hidden ones and a linear one."""
    layers: list[nn.Module] = []
    sizes = [in_features, config.hidden_size, config.hidden_size]
    for rows, columns in itertools.pairwise(sizes):
        layers += [AlignedLinear(rows, columns), nn.ReLU() if config.activation == "relu" else nn.Tanh()]
    return [*layers, AlignedLinear(config.hidden_size, out_features)]


def make_ensemble_critic(
    observation: TensorSpec, action: TensorSpec, config: ActorCriticConfig, num_critics: int
) -> TensorDictModule:
    """K action values in one batched network: reads ``observation`` and ``action``, writes ``[*, K]``."""
    net = EnsembleQ(
        num_critics,
        observation.shape[-1] + action.shape[-1],
        hidden_sizes=(config.hidden_size, config.hidden_size),
        activation=config.activation,
        precision=config.precision,
        device=action.device,
    )
    return TensorDictModule(net, in_keys=["observation", "action"], out_keys=[VALUE_KEY])
