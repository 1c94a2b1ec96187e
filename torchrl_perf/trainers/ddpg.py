"""Deterministic policy gradients, DDPG and TD3, with every step of the loop on the device."""

import contextlib
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import TensorSpec

from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.modules.deterministic import DeterministicActor, Squash
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.modules.noise import GaussianNoise, OUNoise
from torchrl_perf.objectives.sac import frozen
from torchrl_perf.objectives.td3 import DeterministicPolicyLoss, DeviceTD3Loss
from torchrl_perf.trainers.ddpg_config import DDPGConfig, DeterministicConfig, TD3Config
from torchrl_perf.trainers.off_policy_actor_critic import (
    ActorCriticTrainer,
    Row,
    Step,
    actor_layers,
    make_ensemble_critic,
)
from torchrl_perf.trainers.run.state import Stateful
from torchrl_perf.trainers.twin_critics import critics_wanted


class DeterministicTrainer(ActorCriticTrainer):
    """An actor-critic whose policy is deterministic and explores by noise on the action.

    An algorithm writes :meth:`make_critic` and :meth:`make_loss`. Arguments, attributes and errors are those of
    :class:`ActorCriticTrainer`; the default actor is :func:`make_deterministic_actor`. The policy that collects is the
    actor within a :class:`GaussianNoise` or :class:`OUNoise`.
    """

    statistics: ClassVar[tuple[str, ...]] = (
        "loss_critic",
        "loss_actor",
        "value",
        "td_error",
        "grad_norm_critic",
        "grad_norm_actor",
    )
    config: DeterministicConfig
    loss: DeterministicPolicyLoss
    squash: ClassVar[Squash] = "tanh"

    def make_actor(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """:func:`make_deterministic_actor`."""
        return make_deterministic_actor(observation, action, self.config, self.squash)

    def actor_of(self, policy: nn.Module) -> nn.Module:
        """What the noise is added to, or the policy itself where it has none."""
        return policy.policy if isinstance(policy, GaussianNoise | OUNoise) else policy

    def policy_of(self, actor: nn.Module) -> nn.Module:
        """The actor within the noise that the config asks for."""
        config = self.config
        return (OUNoise if config.noise == "ou" else GaussianNoise)(
            cast("Any", actor),
            sigma_start=config.noise_start,
            sigma_end=config.noise_end,
            decay_frames=config.noise_frames,
        )

    def _make_optimizers(self) -> None:
        super()._make_optimizers()
        self._critic_loss = Differentiable(self.loss, self._critic_part, self.critic_optimizer.params)
        self._actor_loss = Differentiable(self.loss, self._actor_part, self.actor_optimizer.params)

    def parts(self) -> dict[str, Stateful]:
        """Networks and targets; the optimisers' moments; schedule and state of the noise."""
        return {**super().parts(), "policy": self.policy}

    def schedule(self) -> None:
        """Scale of the noise of the next collection."""
        if isinstance(self.policy, GaussianNoise | OUNoise):
            self.policy.step(self.config.batch_size)
            self.metrics.add("train/noise", self.policy.sigma, reduce="last")

    # -- parts of an update -------------------------------------------------------------------------------------------

    def critic_gradients(self, sample: TensorDictBase, context: Any, weight: float | Tensor = 1.0) -> Step:
        """Priorities ``[b]``, statistics, and the gradients of the critics' loss times ``weight``."""
        (loss,), (priority, *row), to_critic = self._critic_loss.pullback((sample, context))
        grads, _ = to_critic([self.critic_optimizer.cotangent(loss) * weight])
        return priority, (loss, *row), grads

    def actor_gradients(self, sample: TensorDictBase, context: Any, weight: float | Tensor = 1.0) -> Step:
        """The actor's loss, in a row of its own too, and its gradients times ``weight``."""
        # through the critics, whose parameters need no gradient
        with contextlib.nullcontext() if torch.compiler.is_compiling() else frozen(self.loss.critic):
            (loss,), _, to_actor = self._actor_loss.pullback(sample)
        grads, _ = to_actor([self.actor_optimizer.cotangent(loss) * weight])
        return loss, (loss,), grads

    def critic_losses(self, sample: TensorDictBase, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The critics' loss 0-d, priorities ``[b]``, mean value 0-d.

        Args:
            sample: the batch ``[b]``.
            noise: what :meth:`noise` gave for these rows, or None for fresh numbers.
        """
        return self.loss.critic_losses(sample)

    def _critic_part(self, context: tuple[TensorDictBase, Tensor | None]) -> tuple[Row, Row]:
        loss, priority, value = self.critic_losses(*context)
        return (loss,), (priority, value, priority.mean())

    def _actor_part(self, sample: TensorDictBase) -> tuple[Row, Row]:
        return (self.loss.actor_losses(sample),), ()


class DDPGTrainer(DeterministicTrainer):
    """DDPG (arXiv:1509.02971), and with a :class:`TD3Config` TD3 (arXiv:1802.09477).

    Arguments, attributes and errors are those of :class:`ActorCriticTrainer`. TD3's actor and targets move at each
    ``policy_delay``-th update of an iteration; nothing is computed of them at the others.
    """

    config: DDPGConfig
    loss: DeviceTD3Loss

    def make_critic(self, observation: TensorSpec, action: TensorSpec) -> nn.Module:
        """One network of action values, or those of TD3 in one batched network."""
        config = self.config
        num_critics = config.num_critics if isinstance(config, TD3Config) else 1
        return make_ensemble_critic(observation, action, config, num_critics)

    def make_loss(self, actor: nn.Module, critic: nn.Module) -> DeviceTD3Loss:
        """The losses of DDPG or TD3."""
        config = self.config
        smoothing, number = {"target_noise": 0.0}, None  # DDPG takes a critic as it is
        if isinstance(config, TD3Config):
            number = critics_wanted(critic, self.specs, config.num_critics)
            self.actor_interval = config.policy_delay
            smoothing = {"target_noise": config.target_noise, "noise_clip": config.noise_clip}
        options = {"num_qvalue_nets": number, "gamma": config.gamma, "loss_function": config.loss_function}
        return DeviceTD3Loss(actor, critic, **options, **smoothing)

    def noise(self, sample: TensorDictBase) -> Tensor | None:
        """``[B, D]`` standard normal numbers for the target's actions; None where they have no noise."""
        return torch.randn_like(sample.get(self.loss.action_key)) if self.loss.target_noise > 0 else None

    def critic_losses(self, sample: TensorDictBase, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`DeterministicTrainer.critic_losses`."""
        return self.loss.critic_losses(sample, noise)


def make_deterministic_actor(
    observation: TensorSpec, action: TensorSpec, config: DeterministicConfig, squash: Squash = "tanh"
) -> DeterministicActor:
    """A deterministic policy: reads ``observation``, writes ``action`` within the spec's bounds.

    Args:
        observation: spec ``[*, O]``.
        action: spec ``[*, D]``, continuous with finite bounds.
        config: gives width, activation and precision.
        squash: of the network's output into the bounds.

    Raises:
        ValueError: for another kind of action, or infinite bounds.
    """
    layers = actor_layers(observation.shape[-1], action.shape[-1] if action.shape else 1, config)
    with torch.no_grad():
        # far from the bounds at the start, where the squash has a gradient
        layers[-1].weight.mul_(0.1)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    net = MixedSequential(*layers, precision=config.precision).to(action.device)
    return DeterministicActor(net, spec=action, squash=squash)
