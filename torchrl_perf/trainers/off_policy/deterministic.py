"""What algorithms with a deterministic policy share (arXiv:1509.02971): it explores by noise on the action."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import TensorSpec

from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.modules.deterministic import DeterministicActor, Squash
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.modules.noise import GaussianNoise, OUNoise
from torchrl_perf.objectives.sac import frozen
from torchrl_perf.objectives.td3 import DeterministicPolicyLoss
from torchrl_perf.trainers.config_checks import Checks, is_count
from torchrl_perf.trainers.memory import actor_inputs, on_inputs
from torchrl_perf.trainers.off_policy.actor_critic import ActorCriticConfig, Pass, Passes, actor_layers
from torchrl_perf.trainers.optim.optimization import GuardedAdam
from torchrl_perf.trainers.run.state import Stateful


@dataclass(frozen=True)
class DeterministicConfig(ActorCriticConfig):
    """What algorithms with a deterministic policy have in common: they explore by noise on the action.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    noise: Literal["gaussian", "ou"] = "gaussian"
    """Noise on the actions: independent from step to step, or an Ornstein-Uhlenbeck process that drifts back to 0."""
    noise_start: float = 0.2
    """Standard deviation of the noise at the start, as a share of half the bounds' width."""
    noise_end: float = 0.1
    """Standard deviation of the noise after noise_frames."""
    noise_frames: int = 50_000
    """Frames in which it changes, linearly; those before learning_starts count."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("noise_start", "noise_end"), lambda value: value >= 0, "a number of at least 0")
        checks.each(("noise_frames",), is_count, "a positive integer")


# Of a horizon of 20 steps, as PPO and SAC have it.
PENDULUM: dict[str, Any] = {
    "total_steps": 32_000,
    "capacity": 50_000,
    "updates_per_iteration": 4,
    "learning_starts": 1_600,
    "gamma": 0.95,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 3e-3,
    "tau": 0.01,
    "hidden_size": 64,
    "noise_frames": 20_000,
}


class DeterministicPasses(Passes):
    """The critics learn a target, and the actor climbs the critics' value of its own action.

    Args:
        loss: actor, critics and their targets.
        critic_optimizer: of the critics.
        actor_optimizer: of the actor.
        noise: draws what ``loss.critic_losses`` takes beside the sample, for the targets' actions; by default it takes
            the sample alone.
    """

    def __init__(
        self,
        loss: DeterministicPolicyLoss,
        critic_optimizer: GuardedAdam,
        actor_optimizer: GuardedAdam,
        *,
        noise: Callable[[TensorDictBase], Tensor | None] | None = None,
    ) -> None:
        self.loss, self._draw_noise = loss, noise
        self._critic_optimizer, self._actor_optimizer = critic_optimizer, actor_optimizer
        self._critic_loss = Differentiable(loss, self._critic_part, critic_optimizer.params)
        self._actor_loss = Differentiable(loss, self._actor_part, actor_optimizer.params)

    def noise(self, sample: TensorDictBase) -> Tensor | None:
        """``[B, D]`` for the targets' actions, or None where they have no noise."""
        return None if self._draw_noise is None else self._draw_noise(self.rows(sample))

    def critic(self, sample: TensorDictBase, context: Tensor | None, weight: float | Tensor = 1.0) -> Pass:
        """The loss of the critics."""
        (loss,), (priority, value, td_error), to_critic = self._critic_loss.pullback((sample, context))
        grads, _ = to_critic([self._critic_optimizer.cotangent(loss) * weight])
        return Pass({"loss_critic": loss}, {"value": value, "td_error": td_error}, grads, priority)

    def actor(self, sample: TensorDictBase, context: Tensor | None, weight: float | Tensor = 1.0) -> Pass:
        """Minus the value of the actor's action."""
        # through the critics, whose parameters need no gradient
        with contextlib.nullcontext() if torch.compiler.is_compiling() else frozen(self.loss.critic):
            (loss,), _, to_actor = self._actor_loss.pullback(sample)
        grads, _ = to_actor([self._actor_optimizer.cotangent(loss) * weight])
        return Pass({"loss_actor": loss}, {}, grads)

    def _critic_part(self, context: tuple[TensorDictBase, Tensor | None]) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
        sample, noise = self.learnt(context[0]), context[1]
        of = self.loss.critic_losses
        loss, priority, value = of(sample) if self._draw_noise is None else cast("Any", of)(sample, noise)
        return (loss,), (priority, value, priority.mean())

    def _actor_part(self, sample: TensorDictBase) -> tuple[tuple[Tensor], tuple[()]]:
        return (self.loss.actor_losses(self.rows(sample)),), ()


NOISES: tuple[Any, ...] = (GaussianNoise, OUNoise)


class NoisyActor:
    """The part of an :class:`ActorCritic` that puts the noise of a :class:`DeterministicConfig` on its actions."""

    config: DeterministicConfig
    policy: nn.Module
    acting: nn.Module
    metric_names: ClassVar[tuple[str, ...]] = ("train/noise",)

    def policy_of(self, actor: nn.Module) -> nn.Module:
        """The actor within the noise that the config asks for."""
        config = self.config
        return (OUNoise if config.noise == "ou" else GaussianNoise)(
            cast("Any", actor),
            sigma_start=config.noise_start,
            sigma_end=config.noise_end,
            decay_frames=config.noise_frames,
        )

    def actor_of(self, policy: nn.Module) -> nn.Module:
        """What the noise is added to, or the policy itself where it has none."""
        return cast("nn.Module", policy.policy) if isinstance(policy, NOISES) else policy

    def parts(self) -> dict[str, Stateful]:
        """Networks and targets; the optimisers' moments; schedule and state of the noise."""
        return {**cast("Any", super()).parts(), "policy": self.policy}

    def schedule(self) -> Mapping[str, Tensor]:
        """Advances the noise by the frames of an iteration; its scale, by the name of its column."""
        told = cast("Any", super()).schedule()
        if not isinstance(self.acting, NOISES):
            return told
        cast("Any", self.acting).step(self.config.batch_size)
        return {**told, "train/noise": cast("Any", self.acting).sigma}


def make_deterministic_actor(
    observation: TensorSpec, action: TensorSpec, config: DeterministicConfig, squash: Squash = "tanh"
) -> DeterministicActor:
    """A deterministic policy: reads observations, writes ``action`` within the spec's bounds.

    Args:
        observation: spec ``[*, O]`` of ``"observation"``, or a Composite of all observations.
        action: spec ``[*, D]``, continuous with finite bounds.
        config: gives width, activation and precision.
        squash: of the network's output into the bounds.

    Raises:
        ValueError: for another kind of action, or infinite bounds.
    """
    inputs = actor_inputs(observation, config)
    layers = actor_layers(inputs.size, action.shape[-1] if action.shape else 1, config)
    with torch.no_grad():
        # far from the bounds at the start, where the squash has a gradient
        layers[-1].weight.mul_(0.1)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    net: nn.Module = MixedSequential(*layers, precision=config.precision).to(action.device)
    net = on_inputs(net, inputs, config, action.device)
    return DeterministicActor(net, spec=action, squash=squash, in_keys=inputs.keys)
