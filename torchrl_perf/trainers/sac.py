"""Soft actor-critic (arXiv:1812.05905) with every step of the loop on the device."""

import contextlib
import math
import os
from typing import Any, ClassVar, NamedTuple, cast

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
from torchrl_perf.trainers.off_policy_actor_critic import (
    ActorCriticTrainer,
    Row,
    Step,
    actor_layers,
    make_ensemble_critic,
)
from torchrl_perf.trainers.sac_config import SACConfig
from torchrl_perf.trainers.twin_critics import critics_wanted


class Draw(NamedTuple):
    """One draw of actions for an update.

    Attributes:
        action: ``[B, D]`` for the states; None where only the critics learn.
        log_prob: ``[B]`` of it.
        following: actions ``[B, D]`` for the next states, and their log-probabilities ``[B]``.
        to_actor: from cotangents of ``action`` and ``log_prob`` to the actor's gradients.
    """

    action: Tensor | None
    log_prob: Tensor | None
    following: Row
    to_actor: Pull | None


class SACTrainer(ActorCriticTrainer):
    """SAC whose update (critics, actor, temperature, targets) is one compiled function of device state.

    The order is the usual one: the critics step first, the actor learns from the critics so updated, then the
    temperature from the actor's sample, and the targets follow the critics at each ``target_interval``-th update.
    Actions and log-probabilities come from one pass of the actor, before either has stepped, for states and next states
    together. The loop itself is :class:`OffPolicyTrainer`'s.

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

    Attributes:
        loss: actor, critics, target critics and temperature.

    Raises:
        ValueError: at construction, for actions that are not continuous and bounded, or parts that do not fit.
    """

    statistics: ClassVar[tuple[str, ...]] = (
        "loss_critic",
        "loss_actor",
        "loss_alpha",
        "alpha",
        "entropy",
        "value",
        "td_error",
        "grad_norm_critic",
        "grad_norm_actor",
    )
    losses: ClassVar[tuple[str, ...]] = ("loss_critic", "loss_actor", "loss_alpha")
    config: SACConfig
    loss: DeviceSACLoss
    excluded_keys = (*SquashedNormalHead.param_keys, "action_log_prob")

    def make_actor(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """:func:`make_sac_actor`."""
        return make_sac_actor(observation, action, self.config)

    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """:func:`make_sac_critic`."""
        return make_sac_critic(observation, action, self.config)

    def make_loss(self, actor: nn.Module, critic: nn.Module) -> DeviceSACLoss:
        """The losses of soft actor-critic."""
        config = self.config
        self._reparametrizes_noise = draws_squashed_normal(actor)
        return DeviceSACLoss(
            actor,
            critic,
            num_qvalue_nets=critics_wanted(critic, self.specs, config.num_critics),
            gamma=config.gamma,
            alpha_init=config.initial_temperature,
            fixed_alpha=not config.learn_temperature,
            target_entropy=config.target_entropy,
            loss_function=config.loss_function,
        )

    def _make_optimizers(self) -> None:
        super()._make_optimizers()
        self._sample = Differentiable(self.loss, self._sample_part, list(self.loss.actor.parameters()))
        self._critic_loss = Differentiable(self.loss, self._critic_part, self.critic_optimizer.params)
        self._actor_loss = Differentiable(self.loss, self._actor_part, self._temperature)

    @property
    def _temperature(self) -> list[nn.Parameter]:
        return [cast("nn.Parameter", self.loss.log_alpha)] if self.loss.learns_alpha else []

    def actor_groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Actor and, where it is learnt, temperature."""
        groups = super().actor_groups()
        if self._temperature:
            groups.append((self._temperature, self.config.temperature_learning_rate))
        return groups

    def collect(self) -> TensorDictBase:
        """A batch ``[N, T]`` of fresh transitions, without the parameters of the distribution."""
        return super().collect().exclude(*self.excluded_keys)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state; a temperature that is not learnt stays that of the settings.

        Raises:
            ValueError: for other networks, or a buffer of another layout or sampler; nothing is changed then.
        """
        super().load_state_dict(state)
        self._keep_temperature()

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads a checkpoint; see :meth:`load_state_dict`."""
        super().load(path)
        self._keep_temperature()

    def _keep_temperature(self) -> None:
        if not self.loss.learns_alpha:
            self.loss.log_alpha.fill_(math.log(self.config.initial_temperature))

    # -- parts of an update -------------------------------------------------------------------------------------------

    @property
    def tau(self) -> float | Tensor:
        """How far the targets move at this update: 0-d where that is not at each one."""
        config = self.config
        if config.target_interval == 1:
            return config.tau
        return torch.where((self.updates + 1) % config.target_interval == 0, config.tau, 0.0)

    def noise(self, sample: TensorDictBase) -> Tensor | None:
        """``[2 B, D]`` for actions that are the same however often they are drawn; None for another distribution."""
        if not self._reparametrizes_noise:
            return None
        like = sample.get(self.loss.action_key)
        return torch.randn(2 * len(sample), like.shape[-1], dtype=like.dtype, device=like.device)

    def context(self, sample: TensorDictBase, noise: Tensor | None, *, to_actor: bool = True) -> Draw:
        """Actions for states and next states."""
        if not to_actor:
            _, _, *following = self.loss.sample(sample, noise)
            return Draw(None, None, tuple(following), None)
        (action, log_prob), following, pull = self._sample.pullback((sample, noise))
        return Draw(action, log_prob, following, pull)

    def critic_gradients(self, sample: TensorDictBase, context: Draw, weight: float | Tensor = 1.0) -> Step:
        """Priorities ``[b]``, statistics, and the gradients of the critics' loss times ``weight``."""
        (loss,), (priority, *row), to_critic = self._critic_loss.pullback((sample, *context.following))
        grads, _ = to_critic([self.critic_optimizer.cotangent(loss) * weight])
        return priority, (loss, *row), grads

    def actor_gradients(self, sample: TensorDictBase, context: Draw, weight: float | Tensor = 1.0) -> Step:
        """Loss of actor and temperature, statistics, and the gradients of the loss times ``weight``."""
        # back to the action through the critics, whose parameters need no gradient, then on to the actor
        action, log_prob = cast("Tensor", context.action), cast("Tensor", context.log_prob)
        with contextlib.nullcontext() if torch.compiler.is_compiling() else frozen(self.loss.critic):
            (total,), row, to_action = self._actor_loss.pullback(sample, action, log_prob)
        temperature, pushed = to_action([self.actor_optimizer.cotangent(total) * weight])
        grads, _ = cast("Pull", context.to_actor)(pushed)
        return total, row, grads + temperature

    def _sample_part(self, context: tuple[TensorDictBase, Tensor | None]) -> tuple[Row, Row]:
        action, log_prob, *following = self.loss.sample(*context)
        return (action, log_prob), tuple(following)

    def _critic_part(self, context: tuple[TensorDictBase, Tensor, Tensor]) -> tuple[Row, Row]:
        loss, priority, value = self.loss.critic_losses(*context)
        return (loss,), (priority, value, priority.mean())

    def _actor_part(self, sample: TensorDictBase, action: Tensor, log_prob: Tensor) -> tuple[Row, Row]:
        actor, temperature = self.loss.actor_losses(sample, action, log_prob)
        row = (actor, temperature, self.loss.log_alpha.exp(), -log_prob.mean())
        return (actor + temperature,), tuple(value.detach() for value in row)


def draws_squashed_normal(actor: nn.Module) -> bool:
    """Whether an actor's distribution is a :class:`SquashedNormal`, whose noise can be given."""
    kinds = {getattr(module, "distribution_class", None) for module in actor.modules()}
    return any(isinstance(kind, type) and issubclass(kind, SquashedNormal) for kind in kinds)


def make_sac_actor(observation: TensorSpec, action: TensorSpec, config: SACConfig) -> DeviceActor:
    """A squashed normal policy: reads ``observation``, writes ``action`` within the spec's bounds.

    Args:
        observation: spec ``[*, O]``.
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
    layers = actor_layers(observation.shape[-1], 2 * action.shape[-1], config)
    net = MixedSequential(*layers, head, precision=config.precision).to(action.device)
    return DeviceActor(net, distribution_class=SquashedNormal, param_keys=SquashedNormalHead.param_keys, spec=action)


def make_sac_critic(observation: TensorSpec, action: TensorSpec, config: SACConfig) -> TensorDictModule:
    """``num_critics`` action values in one batched network: reads ``observation`` and ``action``, writes ``[*, K]``."""
    return make_ensemble_critic(observation, action, config, config.num_critics)
