"""Soft actor-critic (arXiv:1812.05905) with every step of the loop on the device."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded, TensorSpec

from torchrl_perf.functional.pullback import Differentiable, Pull
from torchrl_perf.modules import DeviceActor
from torchrl_perf.modules.bounds import action_bounds
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.modules.squashed_normal import SquashedNormal, SquashedNormalHead
from torchrl_perf.objectives.sac import DeviceSACLoss, frozen
from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive
from torchrl_perf.trainers.memory import actor_inputs, on_inputs
from torchrl_perf.trainers.off_policy.actor_critic import (
    ActorCritic,
    ActorCriticConfig,
    Pass,
    Passes,
    actor_layers,
)
from torchrl_perf.trainers.off_policy.algorithm import Setup
from torchrl_perf.trainers.off_policy.chained_sac import chained_sac
from torchrl_perf.trainers.off_policy.ensemble_critic import make_ensemble_critic
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.off_policy.twin_critics import critics_wanted
from torchrl_perf.trainers.optim.optimization import GuardedAdam


@dataclass(frozen=True)
class SACConfig(ActorCriticConfig):
    """Every choice of a SAC run (arXiv:1812.05905). Frames, steps, transitions: all one action of one env.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "sac"
    presets_in: ClassVar[str] = "trainers.sac:SAC_PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:SAC"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *ActorCriticConfig.fixed_by_checkpoint,
        "num_critics",
        "learn_temperature",
    )

    temperature_learning_rate: float = 1e-3
    """Adam's step size for the logarithm of the temperature."""
    target_interval: int = 1
    """Updates from one move of the target critics to the next."""
    initial_temperature: float = 1.0
    """Weight of the entropy against the reward, at the start; throughout where it is not learnt."""
    learn_temperature: bool = True
    """Adapt the temperature so that the policy's entropy stays at target_entropy."""
    target_entropy: float | None = None
    """Entropy of the policy that the temperature is adapted to, in nats; None is minus the number of action dims."""
    num_critics: int = 2
    """Critics whose smallest value is believed (K)."""
    loss_function: Literal["l2", "smooth_l1"] = "l2"
    """Loss of the critics: squared error, or the Huber loss that TorchRL takes by default."""
    max_grad_norm: float | None = None
    """Largest norm of the gradient of the critics, and of actor and temperature together; None is no limit."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("num_critics", "target_interval"), is_count, "a positive integer")
        checks.each(("temperature_learning_rate", "initial_temperature"), is_positive, "a positive number")
        checks.idle(("temperature_learning_rate", "target_entropy"), "learn_temperature")

    @property
    def fixed_on_resume(self) -> tuple[str, ...]:
        """A temperature that is learnt goes on from where it is, whatever it was at the start."""
        return (
            (*self.fixed_by_checkpoint, "initial_temperature") if self.learn_temperature else self.fixed_by_checkpoint
        )


SAC_PRESETS: dict[str, SACConfig] = {
    # Large steps are safe here, and a low temperature spares the time in which the initial one would fall.
    "Pendulum": SACConfig(
        total_steps=32_000,
        capacity=50_000,
        updates_per_iteration=4,
        learning_starts=1_600,
        gamma=0.95,
        actor_learning_rate=3e-3,
        critic_learning_rate=3e-3,
        temperature_learning_rate=3e-3,
        initial_temperature=0.2,
        tau=0.01,
        hidden_size=64,
    ),
}
"""Settings for each task, by env name."""


class Draw(NamedTuple):
    """One draw of actions for an update.

    Attributes:
        action: ``[B, D]`` for the states; None where only the critics learn.
        log_prob: ``[B]`` of it.
        following: actions ``[B, D]`` for the next states, and their log-probabilities ``[B]``; empty where only the
            actor learns.
        to_actor: from cotangents of ``action`` and ``log_prob`` to the actor's gradients.
    """

    action: Tensor | None
    log_prob: Tensor | None
    following: tuple[Tensor, ...]
    to_actor: Pull | None


class SACPasses(Passes):
    """The losses of soft actor-critic, in the usual order of its steps.

    The critics step first, the actor learns from the critics so updated, and the temperature from the actor's sample.
    Actions and log-probabilities come from one pass of the actor, before either has stepped, for states and next states
    together.

    Args:
        loss: actor, critics, target critics and temperature.
        critic_optimizer: of the critics.
        actor_optimizer: of the actor and, where it is learnt, the temperature.
    """

    def __init__(self, loss: DeviceSACLoss, critic_optimizer: GuardedAdam, actor_optimizer: GuardedAdam) -> None:
        self.loss = loss
        self._critic_optimizer, self._actor_optimizer = critic_optimizer, actor_optimizer
        self._reparametrizes_noise = draws_squashed_normal(cast("nn.Module", loss.actor))
        params = list(loss.actor.parameters())
        self._sample = Differentiable(loss, self._sample_part, params)
        self._sample_states = Differentiable(loss, self._states_part, params)
        self._critic_loss = Differentiable(loss, self._critic_part, critic_optimizer.params)
        self._actor_loss = Differentiable(loss, self._actor_part, temperature_of(loss))

    def noise(self, sample: TensorDictBase) -> Tensor | None:
        """``[2 B, D]`` for actions that are the same however often they are drawn; None for another distribution."""
        if not self._reparametrizes_noise:
            return None
        like = self.rows(sample).get(self.loss.action_key)
        return torch.randn(2 * len(sample), *like.shape[1:], dtype=like.dtype, device=like.device)

    def context(self, sample: TensorDictBase, noise: Tensor | None, *, to_actor: bool = True) -> Draw:
        """Actions for states and next states."""
        if not to_actor:
            _, of_next = _halves(noise)
            return Draw(None, None, self.loss.sample_next(self.rows(sample), of_next), None)
        (action, log_prob), following, pull = self._sample.pullback((sample, noise))
        return Draw(action, log_prob, following, pull)

    def actor_context(self, sample: TensorDictBase, noise: Tensor | None) -> Draw:
        """Actions for states alone."""
        of_states, _ = _halves(noise)
        (action, log_prob), _, pull = self._sample_states.pullback((sample, of_states))
        return Draw(action, log_prob, (), pull)

    def critic(self, sample: TensorDictBase, context: Draw, weight: float | Tensor = 1.0) -> Pass:
        """The critics' errors against the soft target of the next action."""
        (loss,), (priority, value, td_error), to_critic = self._critic_loss.pullback((sample, *context.following))
        grads, _ = to_critic([self._critic_optimizer.cotangent(loss) * weight])
        return Pass({"loss_critic": loss}, {"value": value, "td_error": td_error}, grads, priority)

    def actor(self, sample: TensorDictBase, context: Draw, weight: float | Tensor = 1.0) -> Pass:
        """The entropy-regularised value of the actor's action, and the temperature's distance to its entropy."""
        # back to the action through the critics, whose parameters need no gradient, then on to the actor
        action, log_prob = cast("Tensor", context.action), cast("Tensor", context.log_prob)
        with contextlib.nullcontext() if torch.compiler.is_compiling() else frozen(self.loss.critic):
            (total,), row, to_action = self._actor_loss.pullback(sample, action, log_prob)
        temperature, pushed = to_action([self._actor_optimizer.cotangent(total) * weight])
        grads, _ = cast("Pull", context.to_actor)(pushed)
        loss_actor, loss_alpha, alpha, entropy = row
        losses = {"loss_actor": loss_actor, "loss_alpha": loss_alpha}
        return Pass(losses, {"alpha": alpha, "entropy": entropy}, grads + temperature)

    def _sample_part(self, context: tuple[TensorDictBase, Tensor | None]) -> tuple[tuple[Tensor, ...], ...]:
        action, log_prob, *following = self.loss.sample(self.rows(context[0]), context[1])
        return (action, log_prob), tuple(following)

    def _states_part(self, context: tuple[TensorDictBase, Tensor | None]) -> tuple[tuple[Tensor, ...], tuple[()]]:
        return self.loss.sample_states(self.rows(context[0]), context[1]), ()

    def _critic_part(self, context: tuple[TensorDictBase, Tensor, Tensor]) -> tuple[tuple[Tensor, ...], ...]:
        sample, *following = context
        loss, priority, value = self.loss.critic_losses(self.learnt(sample), *following)
        return (loss,), (priority, value, priority.mean())

    def _actor_part(self, sample: TensorDictBase, action: Tensor, log_prob: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        actor, temperature = self.loss.actor_losses(self.rows(sample), action, log_prob)
        row = (actor, temperature, self.loss.log_alpha.exp(), -log_prob.mean())
        return (actor + temperature,), tuple(value.detach() for value in row)


def _halves(noise: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The numbers ``[B, D]`` for states and for next states, of those for both."""
    return (None, None) if noise is None else (noise[: len(noise) // 2], noise[len(noise) // 2 :])


class SAC(ActorCritic):
    """Soft actor-critic (arXiv:1812.05905), whose update is one compiled function of device state.

    Critics, actor, temperature, targets, in this order; the targets follow the critics at each ``target_interval``-th
    update.
    """

    config: SACConfig
    loss: DeviceSACLoss
    actor_losses = ("loss_actor", "loss_alpha")
    actor_means = ("alpha", "entropy")
    excluded_keys = (*SquashedNormalHead.param_keys, "action_log_prob")

    def make_actor(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """A squashed normal policy."""
        return make_sac_actor(observation, action, self.config)

    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """``num_critics`` action values in one batched network."""
        return make_sac_critic(observation, action, self.config)

    def make_loss(self, actor: nn.Module, critic: nn.Module) -> DeviceSACLoss:
        """The losses of soft actor-critic."""
        return make_sac_loss(actor, critic, self.config, self.setup)

    def make_passes(self) -> SACPasses:
        """The equations of soft actor-critic."""
        return SACPasses(self.loss, self.critic_optimizer, self.actor_optimizer)

    def make_chained(self) -> Any:
        """The update in few launches, for perceptrons."""
        return chained_sac(self)

    def actor_groups(self) -> list[dict[str, Any]]:
        """Actor and, where it is learnt, temperature."""
        return [*super().actor_groups(), *temperature_groups(self.loss, self.config)]

    def target_share(self) -> float | Tensor:
        """``tau`` at each ``target_interval``-th update."""
        return sac_target_share(self.config, self.setup)

    def after_load(self) -> None:
        """A temperature that is not learnt stays that of the settings."""
        keep_temperature(self.loss, self.config)


class SACTrainer(OffPolicyTrainer):
    """The loop of :class:`OffPolicyTrainer` on :class:`SAC`.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs]; by default the package's task that the config names.
        collector: a collector that acts with ``actor``, such as a ``HostCollector`` with ``init_random_frames``; by
            default a :class:`DeviceCollector` of the env.
        actor: a probabilistic TensorDict module for the env's action; by default the collector's policy, or
            :func:`make_sac_actor` where there is no collector.
        critic: a TensorDict module that reads observations and the action and writes ``state_action_value``, ``[B, 1]``
            or those of all ``num_critics``, ``[B, K]``; of one value twins are made, as TorchRL's loss makes them. By
            default :func:`make_sac_critic`.

    Raises:
        ValueError: at construction, for actions that are not continuous and bounded, or parts that do not fit.
    """

    algorithm_class = SAC


def make_sac_loss(actor: nn.Module, critic: nn.Module, config: SACConfig, setup: Setup) -> DeviceSACLoss:
    """The losses of soft actor-critic with the settings of a config.

    Raises:
        ValueError: for a critic that is several, but not as many as the settings have.
    """
    return DeviceSACLoss(
        actor,
        critic,
        num_qvalue_nets=critics_wanted(critic, setup.specs, config.num_critics),
        gamma=config.gamma,
        alpha_init=config.initial_temperature,
        fixed_alpha=not config.learn_temperature,
        target_entropy=config.target_entropy,
        loss_function=config.loss_function,
    )


def temperature_of(loss: DeviceSACLoss) -> list[nn.Parameter]:
    """The logarithm of the temperature where it is learnt, or nothing."""
    return [cast("nn.Parameter", loss.log_alpha)] if loss.learns_alpha else []


def temperature_groups(loss: DeviceSACLoss, config: SACConfig) -> list[dict[str, Any]]:
    """The temperature as a group of an optimiser, or nothing where it is not learnt."""
    params = temperature_of(loss)
    # of its logarithm no size is better than another
    return [{"params": params, "lr": config.temperature_learning_rate, "weight_decay": 0.0}] if params else []


def keep_temperature(loss: DeviceSACLoss, config: SACConfig) -> None:
    """Writes the temperature of the settings where it is not learnt."""
    if not loss.learns_alpha:
        loss.log_alpha.fill_(math.log(config.initial_temperature))


def sac_target_share(config: SACConfig, setup: Setup) -> float | Tensor:
    """How far the targets move at this update: ``tau``, or 0-d where they do not move at each one."""
    if config.target_interval == 1:
        return config.tau
    return torch.where((setup.updates + 1) % config.target_interval == 0, config.tau, 0.0)


def draws_squashed_normal(actor: nn.Module) -> bool:
    """Whether an actor's distribution is a :class:`SquashedNormal`, whose noise can be given."""
    kinds = {getattr(module, "distribution_class", None) for module in actor.modules()}
    return any(isinstance(kind, type) and issubclass(kind, SquashedNormal) for kind in kinds)


def make_sac_actor(observation: TensorSpec, action: TensorSpec, config: SACConfig) -> DeviceActor:
    """A squashed normal policy: reads observations, writes ``action`` within the spec's bounds.

    Args:
        observation: spec ``[*, O]`` of ``"observation"``, or a Composite of all observations.
        action: spec ``[*, D]``, continuous with finite bounds.
        config: gives width, activation and precision.

    Raises:
        ValueError: for another kind of action, and for bounds that are infinite or differ between rows.
    """
    if not isinstance(action, Bounded) or not action.dtype.is_floating_point:
        raise ValueError(
            f"action_spec: expected continuous actions with finite bounds (Bounded, floating point), received "
            f"{type(action).__name__} of {action.dtype}. Remedy: DQN for discrete actions; a transform that bounds "
            "unbounded ones."
        )
    head = SquashedNormalHead(*action_bounds(action))
    inputs = actor_inputs(observation, config)
    layers = actor_layers(inputs.size, 2 * action.shape[-1], config)
    net: nn.Module = MixedSequential(*layers, head, precision=config.precision).to(action.device)
    return DeviceActor(
        on_inputs(net, inputs, config, action.device),
        distribution_class=SquashedNormal,
        param_keys=SquashedNormalHead.param_keys,
        in_keys=inputs.keys,
        spec=action,
    )


def make_sac_critic(observation: TensorSpec, action: TensorSpec, config: SACConfig) -> TensorDictModule:
    """``num_critics`` action values in one batched network: reads observations and ``action``, writes ``[*, K]``."""
    return make_ensemble_critic(observation, action, config, config.num_critics)
