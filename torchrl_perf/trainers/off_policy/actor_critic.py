"""What off-policy algorithms with an actor and a critic share: one update of both, compiled whole or in stages."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchrl.data import TensorSpec

from torchrl_perf.kernels import has_triton
from torchrl_perf.modules.aligned import AlignedLinear
from torchrl_perf.modules.mlp import hidden_layers
from torchrl_perf.parallel import SharedGradients
from torchrl_perf.runtime.oom import Part, WholeUpdates, parts_of
from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive, is_share
from torchrl_perf.trainers.memory import make_trunk, refuse_memory, remembers
from torchrl_perf.trainers.networks import NETWORK_SETTINGS, Activation, CriticNetworkSettings
from torchrl_perf.trainers.off_policy.algorithm import Algorithm, Setup, Update, with_steps
from torchrl_perf.trainers.off_policy.config import OffPolicyConfig
from torchrl_perf.trainers.off_policy.passes import Outcome, Pass, Passes, share_of
from torchrl_perf.trainers.off_policy.shard_weights import weight_of
from torchrl_perf.trainers.off_policy.slice_memory import (
    SLICE_MEMORY_SETTINGS,
    SliceMemory,
    SliceMemorySettings,
)
from torchrl_perf.trainers.off_policy.unused import refuse_unused
from torchrl_perf.trainers.optim.hooks import is_hooked
from torchrl_perf.trainers.optim.optimization import GuardedAdam
from torchrl_perf.trainers.optim.settings import adam_options
from torchrl_perf.trainers.recurrent import refuse_recurrent
from torchrl_perf.trainers.run.state import Stateful
from torchrl_perf.trainers.spaces import continuous_action, readable_observation, vector_observation

MakeNetwork = Callable[[TensorSpec, TensorSpec, Any], nn.Module]
"""Makes an actor or a critic of the specs of observation ``[*, O]`` and action ``[*, D]`` and the config."""


@dataclass(frozen=True)
class ActorCriticConfig(SliceMemorySettings, CriticNetworkSettings, OffPolicyConfig):
    """A run that learns a policy of bounded continuous actions from a critic.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *OffPolicyConfig.fixed_by_checkpoint,
        *("hidden_size", "activation"),
        *NETWORK_SETTINGS,
        *SLICE_MEMORY_SETTINGS,
    )

    env: str = "Pendulum"
    """Env with bounded continuous actions to learn in: a task of the package, an id of Gymnasium's (HalfCheetah-v5),
    vmas:SCENARIO, module.path:Class or file.py:function; torchrl-perf envs lists them. Any name beside env=."""
    num_envs: int = 16
    """Number of envs that run at once (N)."""
    num_steps: int = 1
    """Steps of each env in one iteration (T)."""
    total_steps: int = 100_000
    """Env steps of the whole run, over all envs; rounded up to whole iterations."""
    capacity: int = 1_000_000
    """Rows of the replay buffer; rounded down to a multiple of num_envs."""
    updates_per_iteration: int = 16
    """Updates after each collected batch of num_envs * num_steps frames."""
    learning_starts: int = 5_000
    """Frames collected with random actions before the first update, rounded up to whole iterations."""
    actor_learning_rate: float = 3e-4
    """Adam's step size for the policy."""
    critic_learning_rate: float = 1e-3
    """Adam's step size for the critics."""
    anneal_learning_rate: bool = False
    """Lower all of Adam's step sizes linearly to 0 over the run."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's mean of squares, so that no step is divided by 0."""
    tau: float = 0.005
    """How far the targets move towards the networks each time."""
    max_grad_norm: float | None = None
    """Largest norm of the gradient of the critics, and of the actor; None is no limit."""
    hidden_size: int = 256
    """Width of the two hidden layers of actor and critics, where hidden_sizes are not given."""
    activation: Activation = "relu"
    """Activation of the hidden layers."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("hidden_size",), is_count, "a positive integer")
        checks.each(("actor_learning_rate", "critic_learning_rate", "max_grad_norm"), is_positive, "a positive number")
        checks.each(("tau",), is_share, "a number in [0, 1]")


class ActorCritic(Algorithm):
    """A critic and an actor, each with an optimiser and targets, updated in one compiled function of device state.

    The critic steps first, the actor learns from the critic so updated, and targets follow. Where memory runs out, the
    update goes on in stages that can be repeated, each in micro-batches.

    An algorithm writes :meth:`make_actor`, :meth:`make_critic`, :meth:`make_loss` and :meth:`make_passes`, and names in
    :attr:`actor_losses` and :attr:`actor_means` what its passes give.

    Args:
        config: every choice of the run.
        actor: a TensorDict module for the env's action; by default that of the collector's policy, or
            :meth:`make_actor` where there is no collector.
        critic: by default :meth:`make_critic`.
        make_actor: in place of :meth:`make_actor`, such as a system's, whose networks are its own.
        make_critic: the same for :meth:`make_critic`.

    Attributes:
        actor_losses: names of the losses of the actor's pass, in order.
        actor_means: names of its other statistics.
        carried: entries of a policy's state that this algorithm learns from; others are refused.
        acting: what acts: the policy itself, or what reads its memory.
        loss: actor, critics and targets.
        passes: the equations.
        critic_optimizer: Adam of the critics, whose targets follow its steps.
        actor_optimizer: Adam of the actor and of what learns with it.
        reads_vector: whether default networks read one vector alone.
        actor_interval: updates from one step of the actor, and of the targets, to the next.
    """

    actor_losses: ClassVar[tuple[str, ...]] = ("loss_actor",)
    actor_means: ClassVar[tuple[str, ...]] = ()
    carried: ClassVar[tuple[NestedKey, ...]] = ()
    reads_vector: ClassVar[bool] = False
    actor_interval: int = 1

    def __init__(
        self,
        config: Any,
        *,
        actor: nn.Module | None = None,
        critic: nn.Module | None = None,
        make_actor: MakeNetwork | None = None,
        make_critic: MakeNetwork | None = None,
    ) -> None:
        self.config = config
        self._given = (actor, critic)
        self._make_actor, self._make_critic = make_actor, make_critic
        self.losses = ("loss_critic", *self.actor_losses)
        norms = ("grad_norm_critic", "grad_norm_actor")
        self.statistics = (*self.losses, *self.actor_means, "value", "td_error", *norms)

    # -- what an algorithm writes -------------------------------------------------------------------------------------

    @abstractmethod
    def make_actor(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """The actor for specs ``[*, O]``, or a Composite of all observations, and ``[*, D]``."""

    @abstractmethod
    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """The critic for specs ``[*, O]``, or a Composite of all observations, and ``[*, D]``."""

    @abstractmethod
    def make_loss(self, actor: nn.Module, critic: nn.Module) -> Any:
        """The losses of actor and critic, with ``target_critic`` and, where there is one, ``target_actor``."""

    @abstractmethod
    def make_passes(self) -> Passes:
        """The equations, of ``self.loss`` and the optimisers."""

    def actor_groups(self) -> list[dict[str, Any]]:
        """Groups of parameters that learn with the actor, as :class:`GuardedAdam` takes them."""
        return [{"params": list(self.loss.actor.parameters()), "lr": self.config.actor_learning_rate}]

    def actor_of(self, policy: nn.Module) -> nn.Module:
        """The actor in a policy that collects; by default the policy itself."""
        return policy

    def policy_of(self, actor: nn.Module) -> nn.Module:
        """The policy that collects with an actor; by default the actor itself."""
        return actor

    def target_share(self) -> float | Tensor:
        """How far the targets move at this update, a number or 0-d."""
        return self.config.tau

    # -- what the trainer asks for ------------------------------------------------------------------------------------

    def build(self, setup: Setup) -> nn.Module:
        """Networks, losses and optimisers."""
        self.setup = setup
        (actor, critic), collecting = self._given, setup.collecting
        given = {"actor": actor, "critic": critic, "policy": collecting}
        refuse_recurrent(setup.owner, given, env=setup.env, own_state=self.carried)
        if remembers(self.config):
            refuse_memory(self.config, given, setup.env)
        if actor is None and collecting is not None:
            actor = self.actor_of(collecting)
        actor, critic = self._with_default_networks(actor, critic)
        self.loss = self.make_loss(setup.acceleration.policy(actor), setup.acceleration.policy(critic))
        self._make_slices()
        self._make_optimizers()
        self.passes = self.make_passes()
        self.passes.slices = self.slices
        self.weights = dict.fromkeys(self._of_the_actor, self.actor_interval) if self.actor_interval > 1 else {}
        self._update_fn = setup.compiled(self._update)
        self._critic_step_fn, self._actor_step_fn = map(setup.compiled, (self._critic_step, self._actor_step))
        self._optimizers = self.critic_optimizer, self.actor_optimizer
        self._first_rates = [[float(rate) for rate in one.learning_rates] for one in self._optimizers]
        self._may_decay = any(group["weight_decay"] for one in self._optimizers for group in one.param_groups)
        self._conclude_fn = setup.compiled(self._conclude)
        if self.slices is None:
            self._critic_micro_fn, self._actor_micro_fn = map(setup.compiled, (self._critic_micro, self._actor_micro))
        else:
            self._critic_micro_fn, self._actor_micro_fn = self._critic_micro, self._actor_micro
            self._prepared_fn = setup.compiled(self.slices.prepared)
            self.passes.compile_alone(setup.compiled)
        plain = self.slices is None and not setup.ranks.several and setup.device.type == "cuda" and has_triton()
        self._chained = self.make_chained() if plain and setup.mode != "eager" else None
        self._tries = WholeUpdates(setup.micro, trials=3 * self.actor_interval)
        self._critic_share_fn, self._actor_share_fn = map(setup.compiled, (self._critic_share, self._actor_share))
        # a collector's that does not act with this actor is refused where the collector is checked
        own = collecting is not None and self.actor_of(collecting) is actor
        self.acting = self.policy = collecting if own else self.policy_of(actor)
        if self.slices is not None:
            self.policy = TensorDictSequential(self.slices.online, self.acting)
        return self.policy

    def parts(self) -> dict[str, Stateful]:
        """Networks and targets; the optimisers' moments."""
        return {
            "loss": self.loss,
            "critic_optimizer": self.critic_optimizer,
            "actor_optimizer": self.actor_optimizer,
        }

    def schedule(self) -> Mapping[str, Tensor]:
        """Sets the step sizes of this iteration's updates, where they fall over the run."""
        if self.config.anneal_learning_rate:
            left = 1.0 - self.setup.progress()
            for optimizer, first in zip(self._optimizers, self._first_rates, strict=True):
                for rate, whole in zip(optimizer.learning_rates, first, strict=True):
                    rate.copy_(whole * left)
        return {}

    def update(self, sample: TensorDictBase, number: int) -> Update:
        """One step of critics, actor and targets from ``sample [B]``; of the critics alone where the actor waits."""
        due, micro = (number + 1) % self.actor_interval == 0, self.setup.micro
        with self.setup.acceleration.active(self.setup.device), torch.no_grad():
            # ranks agree on gradients between the stages, the compiler differentiates no memory and calls no hook
            in_stages = self.setup.ranks.several or self.slices is not None or self._hooked
            if self._may_decay:
                self._may_decay = refuse_unused(self.passes, self._optimizers, self.parameter_names, sample)
            at_once = self.setup.kernels.on and micro.parts == 1 and not in_stages
            outcome = self._whole_update(sample, due) if at_once else None
            outcome = outcome or self._staged_update(sample, due)
            told = self._conclude_fn(outcome.statistics, outcome.critic_taken, outcome.actor_taken)
        losses, grad_norms, taken, fault = told
        priority = outcome.priority if self.slices is None else self.slices.priority(outcome.priority)
        return Update(priority, outcome.statistics, losses, grad_norms, taken, fault)

    def probe(self, rows: TensorDictBase) -> None:
        """The passes of an update on a sample ``rows [b]``, eagerly, to see how much memory they take."""
        self.passes.made_once(with_steps(rows) if self.slices is None else self.slices.probed(rows))

    def make_chained(self) -> Any:
        """The update in few launches (:mod:`~torchrl_perf.trainers.off_policy.chained`); None where there is none."""
        return None

    # -- construction -------------------------------------------------------------------------------------------------

    def _with_default_networks(self, actor: nn.Module | None, critic: nn.Module | None) -> tuple[nn.Module, nn.Module]:
        """Actor and critic, made for the specs where they were not given."""
        specs, config = self.setup.specs, self.config
        if specs is None and (actor is None or critic is None):
            raise ValueError(
                "actor, critic: expected both where only a collector without specs is given, received "
                f"{[type(module).__name__ for module in (actor, critic)]}. Remedy: pass actor= and critic=."
            )
        # networks that an application makes read one vector
        if actor is None:
            read = vector_observation if self.reads_vector or self._make_actor is not None else readable_observation
            of = read(specs), continuous_action(specs)
            actor = self.make_actor(*of) if self._make_actor is None else self._make_actor(*of, config)
        if critic is None:
            read = vector_observation if self.reads_vector or self._make_critic is not None else readable_observation
            of = read(specs), continuous_action(specs)
            critic = self.make_critic(*of) if self._make_critic is None else self._make_critic(*of, config)
        return actor, critic

    def _make_slices(self) -> None:
        """The memory below actor and critics, where the config asks for one: the critics' loss alone trains it."""
        trunk, config, loss = make_trunk(self.setup.specs, self.config), self.config, self.loss
        if not trunk:
            return
        both = not hasattr(loss, "target_actor")  # the next action is then the actor's own
        self.slices = SliceMemory(trunk, config.slice_length, config.burn_in, both=both)
        self.setup.acceleration.policy(self.slices.online)
        loss.add_module("memory", self.slices.online)
        loss.add_module("target_memory", self.slices.delayed)
        self.excluded_keys = (*self.excluded_keys, *self.slices.written)

    def _make_optimizers(self) -> None:
        loss, config = self.loss, self.config
        of_critics, of_targets = [loss.critic], [loss.target_critic]
        if self.slices is not None:
            of_critics, of_targets = [loss.critic, self.slices.online], [loss.target_critic, self.slices.delayed]
        learnt = [param for module in of_critics for param in module.parameters()]
        critics = {"params": learnt, "lr": config.critic_learning_rate}
        self.critic_optimizer = self._make_optimizer([critics])
        self.actor_optimizer = self._make_optimizer(self.actor_groups())
        of_ranks: dict[str, Any] = {"ranks": self.setup.ranks, "broadcast": False, "compile": self.setup.compiled}
        self._shared_critic = SharedGradients(self.critic_optimizer.params, **of_ranks)
        self._shared_actor = SharedGradients(self.actor_optimizer.params, **of_ranks)
        self._critic_targets = [param for module in of_targets for param in module.parameters()]
        self._actor_targets = list(loss.target_actor.parameters()) if hasattr(loss, "target_actor") else []
        names = {param: name for name, param in loss.named_parameters()}
        params = [*self.critic_optimizer.params, *self.actor_optimizer.params]
        self.parameter_names = [names[param] for param in params]

    def _make_optimizer(self, groups: list[dict[str, Any]]) -> GuardedAdam:
        """Adam of groups of parameters with a step size each."""
        return GuardedAdam(
            groups,
            max_grad_norm=self.config.max_grad_norm,
            acceleration=self.setup.acceleration,
            **adam_options(self.config),
        )

    def _critic_step(self, grads: list[Tensor], loss: Tensor, tau: float | Tensor) -> tuple[Tensor, Tensor]:
        """The critics' step, which their targets follow; whether it was taken, and the norm, 0-d both."""
        return self.critic_optimizer.apply_gradients(grads, loss, self._critic_targets, tau)

    def _actor_step(self, grads: list[Tensor], loss: Tensor, tau: float | Tensor) -> tuple[Tensor, Tensor]:
        """The same of the actor's."""
        return self.actor_optimizer.apply_gradients(grads, loss, self._actor_targets, tau)

    @property
    def _hooked(self) -> bool:
        """Whether something is called around a step of an optimiser, or with a gradient."""
        return any(map(is_hooked, self._optimizers))

    @property
    def _of_the_actor(self) -> tuple[str, ...]:
        """Names of the statistics that an update has in which the actor does not wait."""
        return (*self.actor_losses, *self.actor_means, "grad_norm_actor")

    # -- one update ---------------------------------------------------------------------------------------------------

    def _update(self, sample: TensorDictBase, actor_due: bool = True) -> Outcome:
        """Losses, gradients and steps of a sample ``[B]``, without a memory."""
        context = self.passes.context(sample, None, to_actor=actor_due)
        tau = self.target_share() if actor_due else 0.0
        critic = self.passes.critic(sample, context)
        critic_step = self._critic_step(critic.gradients, critic.loss, tau)
        if not actor_due:
            return self.outcome_of(critic, critic_step)
        actor = self.passes.actor(sample, context)
        # stacked by the caller: fused with the sums over the batch, it is a kernel that Triton fails to compile
        return self.outcome_of(critic, critic_step, actor, self._actor_step(actor.gradients, actor.loss, tau))

    def outcome_of(
        self,
        critic: Pass,
        critic_step: tuple[Tensor, Tensor],
        actor: Pass | None = None,
        actor_step: tuple[Tensor, Tensor] | None = None,
    ) -> Outcome:
        """What an update did, of its passes and steps; without an actor's where that waits."""
        critic_taken, critic_norm = critic_step
        statistics = {**critic.losses, **critic.means, "grad_norm_critic": critic_norm}
        assert critic.priority is not None
        if actor is None or actor_step is None:
            zeros = dict.fromkeys(self._of_the_actor, torch.zeros_like(critic_norm))
            return Outcome(critic.priority, statistics | zeros, critic_taken, torch.ones_like(critic_taken))
        actor_taken, actor_norm = actor_step
        statistics |= {**actor.losses, **actor.means, "grad_norm_actor": actor_norm}
        return Outcome(critic.priority, statistics, critic_taken, actor_taken)

    def _whole_update(self, sample: TensorDictBase, due: bool) -> Outcome | None:
        """The compiled update; None where memory ran out, nothing has changed, and micro-batches are to be made."""
        args, update = () if due else (False,), self._update_fn
        if self._chained is not None and self._chained.takes(sample):
            update = self._chained
        return self._tries(lambda: update(sample, *args), len(sample), self._state)

    def _state(self) -> list[Tensor]:
        """What an update writes."""
        leaves = tree_leaves([part.state_dict() for part in self.parts().values()])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _staged_update(self, sample: TensorDictBase, due: bool) -> Outcome:
        """:meth:`_update` in stages that can be repeated, with the optimisers' steps between them."""
        sample = sample if self.slices is None else self._prepared_fn(sample)
        rows, noise, micro = len(sample), self.passes.noise(sample), self.setup.micro
        carry: list[Any] = []  # from the first stage to the second, where neither is split
        tau = self.target_share() if due else 0.0
        # ranks agree on gradients between the stages: compiled, each is a function of its own
        ranks, hooked = self.setup.ranks, self._hooked  # hooks are called by autograd, and by no compiled function
        compiled, weight = ranks.several and self.setup.kernels.on and not hooked, weight_of(sample, ranks)
        micro_fns = (self._critic_micro, self._actor_micro) if hooked else (self._critic_micro_fn, self._actor_micro_fn)
        share = 1.0 if weight is not None else 1.0 / ranks.size

        def critics(parts: int) -> Pass:
            if parts == 1 and compiled:
                return self._critic_share_fn(sample, noise, share)
            if parts > 1:
                return share_of(self._split(micro_fns[0], sample, noise, parts), share)
            carry.append(self.passes.context(sample, noise, to_actor=due))
            return share_of(self.passes.critic(sample, carry[0]), share)

        def actors(parts: int) -> Pass:
            if parts == 1 and compiled:
                return self._actor_share_fn(sample, noise, share)
            if parts == 1 and carry:
                return share_of(self.passes.actor(sample, carry.pop()), share)
            return share_of(self._split(micro_fns[1], sample, noise, parts), share)

        critic = micro.run(critics, rows, undo=carry.clear)
        critic = self._agreed(critic, self._shared_critic, weight)
        steps = (self._critic_step, self._actor_step) if hooked else (self._critic_step_fn, self._actor_step_fn)
        critic_step = steps[0](critic.gradients, critic.loss, tau)
        if not due:
            return self.outcome_of(critic, critic_step)
        actor = self._agreed(micro.run(actors, rows), self._shared_actor, weight)
        return self.outcome_of(critic, critic_step, actor, steps[1](actor.gradients, actor.loss, tau))

    def _agreed(self, found: Pass, shared: SharedGradients, weight: Tensor | None) -> Pass:
        """The pass of the rows of all ranks, of each one's share; the priorities are those of this rank's rows."""
        if not self.setup.ranks.several:
            return found
        told = [*found.losses.values(), *found.means.values()]
        mean = shared.reduced(found.gradients, *told, weight=weight, divided=weight is None)
        losses = dict(zip(found.losses, mean.values, strict=False))
        others = dict(zip(found.means, mean.values[len(losses) :], strict=True))
        return Pass(losses, others, mean.gradients, found.priority)

    def _micro_batches(
        self, sample: TensorDictBase, noise: Tensor | None, parts: int
    ) -> Iterator[tuple[Part, Tensor | None]]:
        """The parts of a sample, each with its noise."""
        start, blocks = 0, None if noise is None else noise.unflatten(0, (-1, len(sample)))
        for part in parts_of(sample, parts, sample.get("priority_weight", None)):
            end = start + len(part.batch)
            yield part, None if blocks is None else blocks[:, start:end].flatten(0, 1)
            start = end

    def _split(self, micro: Callable[..., Pass], sample: TensorDictBase, noise: Tensor | None, parts: int) -> Pass:
        """The pass of a sample as the sum of those of its micro-batches."""
        losses, means, gradients, priorities = [], [], [], []
        names: tuple[list[str], list[str]] = ([], [])
        for part, part_noise in self._micro_batches(sample, noise, parts):
            found = micro(part.batch, part_noise, part.weight)
            names = list(found.losses), list(found.means)
            losses.append({name: value * part.weight for name, value in found.losses.items()})
            means.append({name: value * part.share for name, value in found.means.items()})
            # not in place: a compiled function may return views
            gradients = list(torch._foreach_add(gradients, found.gradients)) if gradients else found.gradients
            priorities.append(found.priority)
        return Pass(
            {name: torch.stack([row[name] for row in losses]).sum() for name in names[0]},
            {name: torch.stack([row[name] for row in means]).sum() for name in names[1]},
            gradients,
            None if priorities[0] is None else torch.cat(priorities),
        )

    def _critic_micro(self, sample: TensorDictBase, noise: Tensor | None, weight: float | Tensor) -> Pass:
        return self.passes.critic(sample, self.passes.context(sample, noise, to_actor=False), weight)

    def _actor_micro(self, sample: TensorDictBase, noise: Tensor | None, weight: float | Tensor) -> Pass:
        return self.passes.actor(sample, self.passes.actor_context(sample, noise), weight)

    def _critic_share(self, sample: TensorDictBase, noise: Tensor | None, share: float) -> Pass:
        return share_of(self._critic_micro(sample, noise, share), share, gradients=False)

    def _actor_share(self, sample: TensorDictBase, noise: Tensor | None, share: float) -> Pass:
        return share_of(self._actor_micro(sample, noise, share), share, gradients=False)

    def _conclude(
        self, statistics: Mapping[str, Tensor], critic_taken: Tensor, actor_taken: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The last four entries of an :class:`Update`, which is counted."""
        critic, actor = self.critic_optimizer, self.actor_optimizer
        losses = [statistics[name] for name in self.losses]
        fault = critic.is_fault(losses[0], statistics["grad_norm_critic"])
        fault = fault | actor.is_fault(torch.stack(losses[1:]).sum(), statistics["grad_norm_actor"])
        taken = critic_taken & actor_taken
        self.setup.count(statistics, taken, fault)
        return torch.stack(losses), torch.cat([critic.grad_norms, actor.grad_norms]), taken, fault


def actor_layers(in_features: int, out_features: int, config: ActorCriticConfig) -> list[nn.Module]:
    """The layers of an actor: hidden ones and a linear one."""
    sizes = [in_features, *config.widths]
    hidden = hidden_layers(sizes, config.activation, layer_norm=config.layer_norm, linear=AlignedLinear)
    return [*hidden, AlignedLinear(sizes[-1], out_features)]
