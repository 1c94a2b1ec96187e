"""Soft actor-critic (arXiv:1812.05905) with every step of the loop on the device."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.data import Bounded, TensorSpec
from torchrl.envs import EnvBase

from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.modules import DeviceActor
from torchrl_perf.modules.aligned import AlignedLinear
from torchrl_perf.modules.ensemble import EnsembleQ
from torchrl_perf.modules.squashed_normal import SquashedNormal, SquashedNormalHead
from torchrl_perf.objectives.sac import VALUE_KEY, DeviceSACLoss, frozen
from torchrl_perf.trainers.group_adam import GroupAdam
from torchrl_perf.trainers.off_policy import OffPolicyTrainer, Stateful
from torchrl_perf.trainers.sac_config import SACConfig

Row = tuple[Tensor, ...]  # statistics of an update, 0-d each


class SACTrainer(OffPolicyTrainer):
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
        critic: a TensorDict module that reads observations and the action and writes ``state_action_value [B, K]``; by
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
    config: SACConfig
    excluded_keys = (*SquashedNormalHead.param_keys, "action_log_prob")

    def __init__(
        self,
        config: SACConfig,
        *,
        env: EnvBase | None = None,
        collector: BaseCollector | None = None,
        actor: nn.Module | None = None,
        critic: nn.Module | None = None,
    ) -> None:
        self._given = (actor if actor is not None else getattr(collector, "policy", None), critic)
        self._specs = getattr(collector, "specs", None)
        super().__init__(config, env=env, collector=collector)

    def build(self) -> nn.Module:
        """Networks, losses and optimisers; the actor collects."""
        config = self.config
        actor, critic = self._given
        specs = cast("Any", self.env if self.env is not None else self._specs)
        unknown = specs is None
        if unknown and (actor is None or critic is None):
            raise ValueError(
                "actor, critic: expected both where only a collector without specs is given, received "
                f"{[type(module).__name__ for module in self._given]}. Remedy: make_sac_actor and make_sac_critic."
            )
        if actor is None:
            actor = make_sac_actor(specs.observation_spec["observation"], specs.action_spec, config)
        if critic is None:
            critic = make_sac_critic(specs.observation_spec["observation"], specs.action_spec, config)
        self.loss = DeviceSACLoss(
            actor,
            critic,
            gamma=config.gamma,
            alpha=config.initial_temperature,
            learn_alpha=config.learn_temperature,
            entropy=config.target_entropy,
            loss_function=config.loss_function,
        )
        self._make_optimizers(config)
        self._update_fn = self.compiled(self._update)
        self._count_fn = self.compiled(self._count)
        return actor

    def _make_optimizers(self, config: SACConfig) -> None:
        loss, compile_ = self.loss, self.mode != "eager"
        self.critic_optimizer = GroupAdam(
            [(list(loss.critic.parameters()), config.critic_learning_rate)],
            max_grad_norm=config.max_grad_norm,
            targets=list(loss.target_critic.parameters()),
            compile=compile_,
        )
        actor_params = list(loss.actor.parameters())
        temperature = [cast("nn.Parameter", loss.log_alpha)] if loss.learns_alpha else []
        groups = [(actor_params, config.actor_learning_rate)]
        if temperature:
            groups.append((temperature, config.temperature_learning_rate))
        self.actor_optimizer = GroupAdam(groups, max_grad_norm=config.max_grad_norm, compile=compile_)
        self._sample = Differentiable(loss, self._sample_part, actor_params)
        self._critic_loss = Differentiable(loss, self._critic_part, self.critic_optimizer.params)
        self._actor_loss = Differentiable(loss, self._actor_part, temperature)

    def parts(self) -> dict[str, Stateful]:
        """Networks, targets and temperature; the optimisers' moments."""
        return {
            "loss": self.loss,
            "critic_optimizer": self.critic_optimizer,
            "actor_optimizer": self.actor_optimizer,
        }

    def collect(self) -> TensorDictBase:
        """A batch ``[N, T]`` of fresh transitions, without the parameters of the distribution."""
        return super().collect().exclude(*self.excluded_keys)

    def schedule(self) -> None:
        """Nothing changes with the iteration: the temperature adapts with each update."""

    def update(self, sample: TensorDictBase) -> None:
        """One step of critics, actor, temperature and targets from ``sample [B]``."""
        with matmul_precision(self.config.precision, self.device), torch.no_grad():
            priority, critic_row, actor_row, norms, taken = self._update_fn(sample)
            if self.config.sampler == "prioritized":
                generation = sample.get("index_generation")
                self.buffer.update_priority(sample.get("index"), priority, generation=generation)
            self._count_fn(critic_row, actor_row, norms, taken)

    def _update(self, sample: TensorDictBase) -> tuple[Tensor, Row, Row, Row, Row]:
        """Losses, gradients and steps: priorities ``[B]``, statistics and flags of the update."""
        (action, log_prob), (next_action, next_log_prob), to_actor = self._sample.pullback(sample)

        # CRITICS, and their targets
        (loss,), (priority, *critic_row), to_critic = self._critic_loss.pullback((sample, next_action, next_log_prob))
        grads, _ = to_critic([torch.ones_like(loss)])
        critic_ok, critic_norm = self.critic_optimizer.step(grads, loss, self.tau)

        # ACTOR and TEMPERATURE: back to the action through the critics, whose parameters need no gradient, then on
        with contextlib.nullcontext() if torch.compiler.is_compiling() else frozen(self.loss.critic):
            (total,), actor_row, to_action = self._actor_loss.pullback(sample, action, log_prob)
        temperature, pushed = to_action([torch.ones_like(total)])
        grads, _ = to_actor(pushed)
        actor_ok, actor_norm = self.actor_optimizer.step(grads + temperature, total)
        # stacked by the caller: fused with the sums over the batch, it is a kernel that Triton fails to compile
        return priority, (loss, *critic_row), actor_row, (critic_norm, actor_norm), (critic_ok, actor_ok)

    @property
    def tau(self) -> float | Tensor:
        """How far the targets move at this update: 0-d where that is not at each one."""
        config = self.config
        if config.target_interval == 1:
            return config.tau
        return torch.where((self.updates + 1) % config.target_interval == 0, config.tau, 0.0)

    def _sample_part(self, sample: TensorDictBase) -> tuple[Row, Row]:
        action, log_prob, *following = self.loss.sample(sample)
        return (action, log_prob), tuple(following)

    def _critic_part(self, context: tuple[TensorDictBase, Tensor, Tensor]) -> tuple[Row, Row]:
        loss, priority, value = self.loss.critic_losses(*context)
        return (loss,), (priority, value, priority.mean())

    def _actor_part(self, sample: TensorDictBase, action: Tensor, log_prob: Tensor) -> tuple[Row, Row]:
        actor, temperature = self.loss.actor_losses(sample, action, log_prob)
        row = (actor, temperature, self.loss.log_alpha.exp(), -log_prob.mean())
        return (actor + temperature,), tuple(value.detach() for value in row)

    def _count(self, critic_row: Row, actor_row: Row, norms: Row, taken: Row) -> None:
        loss, value, td_error = critic_row
        self.count_update(torch.stack([loss, *actor_row, value, td_error, *norms]), taken[0] & taken[1])


@contextlib.contextmanager
def matmul_precision(name: str, device: torch.device) -> Iterator[None]:
    """Within it, float32 matrix products on CUDA take TF32 for ``"tf32"``; the setting before is restored."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_sac_actor(observation: TensorSpec, action: TensorSpec, config: SACConfig) -> DeviceActor:
    """A squashed normal policy: reads ``observation``, writes ``action`` within the spec's bounds.

    Args:
        observation: spec ``[*, O]``.
        action: spec ``[*, D]``, continuous with finite bounds.
        config: gives width and activation.

    Raises:
        ValueError: for another kind of action, or infinite bounds.
    """
    if not isinstance(action, Bounded) or not action.dtype.is_floating_point:
        raise ValueError(
            f"action_spec: expected continuous actions with finite bounds (Bounded, floating point), received "
            f"{type(action).__name__} of {action.dtype}. Remedy: DQN for discrete actions; a transform that bounds "
            "unbounded ones."
        )
    space = cast("Any", action.space)
    head = SquashedNormalHead(*(bound.reshape(-1, action.shape[-1])[0] for bound in (space.low, space.high)))
    sizes = [observation.shape[-1], config.hidden_size, config.hidden_size]
    layers: list[nn.Module] = []
    for rows, columns in itertools.pairwise(sizes):
        layers += [AlignedLinear(rows, columns), nn.ReLU() if config.activation == "relu" else nn.Tanh()]
    net = nn.Sequential(*layers, AlignedLinear(config.hidden_size, 2 * action.shape[-1]), head).to(action.device)
    return DeviceActor(net, distribution_class=SquashedNormal, param_keys=SquashedNormalHead.param_keys, spec=action)


def make_sac_critic(observation: TensorSpec, action: TensorSpec, config: SACConfig) -> TensorDictModule:
    """``num_critics`` action values in one batched network: reads ``observation`` and ``action``, writes ``[*, K]``."""
    net = EnsembleQ(
        config.num_critics,
        observation.shape[-1] + action.shape[-1],
        hidden_sizes=(config.hidden_size, config.hidden_size),
        activation=config.activation,
        device=action.device,
    )
    return TensorDictModule(net, in_keys=["observation", "action"], out_keys=[VALUE_KEY])
