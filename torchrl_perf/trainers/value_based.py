"""What trainers of discrete action values share: a network, its delayed copy, one optimiser, epsilon-greedy actions."""

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase

from torchrl_perf.functional.priority_tree import LEAST_PRIORITY
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.mlp import FusedMLP
from torchrl_perf.modules.q_networks import DuelingMLP
from torchrl_perf.runtime.oom import parts_of
from torchrl_perf.trainers.off_policy import OffPolicyTrainer, with_steps
from torchrl_perf.trainers.optimization import GuardedAdam
from torchrl_perf.trainers.recurrent import refuse_recurrent
from torchrl_perf.trainers.run.state import Stateful
from torchrl_perf.trainers.spaces import observation_inputs, single_choice
from torchrl_perf.trainers.value_config import ValueConfig


class ValueTrainer(OffPolicyTrainer):
    """Learns a value for each action by temporal differences, and acts epsilon-greedily on the values.

    An algorithm writes :meth:`make_policy`, :meth:`make_target` and :meth:`sample_losses`.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs] and discrete actions; by default the task that the config names.
        collector: collects ``[N, T]`` batches with ``policy``, such as a ``HostCollector``.
        policy: an :class:`EpsilonGreedy` on a network of your own; by default :meth:`make_policy`. Where only a
            collector is given, its policy.

    Attributes:
        q_network: the online network of action values.
        target_network: its delayed copy.
        optimizer: Adam of the online network.

    Raises:
        ValueError: at construction, for continuous actions, and for parts that do not fit each other.
    """

    statistics: ClassVar[tuple[str, ...]] = ("loss", "td_error", "q_value", "grad_norm")
    config: ValueConfig
    policy: EpsilonGreedy

    def __init__(
        self,
        config: ValueConfig,
        *,
        env: EnvBase | None = None,
        collector: BaseCollector | None = None,
        policy: EpsilonGreedy | None = None,
    ) -> None:
        self._given_policy = policy if policy is not None else getattr(collector, "policy", None)
        refuse_recurrent(type(self).__name__, {"policy": self._given_policy}, env=env)
        super().__init__(config, env=env, collector=collector)

    # -- what an algorithm writes -------------------------------------------------------------------------------------

    @abstractmethod
    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """The policy for an env, of a network as the config has it."""

    @abstractmethod
    def make_target(self, policy: EpsilonGreedy) -> nn.Module:
        """The delayed copy of ``self.q_network``, without gradients; makes what :meth:`sample_losses` needs besides."""

    @abstractmethod
    def sample_losses(self, sample: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Loss 0-d with gradient, errors ``[B]`` (priorities), mean value of the actions taken 0-d; both detached."""

    # -- what the base asks for ---------------------------------------------------------------------------------------

    def build(self) -> EpsilonGreedy:
        """The online network, its target, the optimiser; the policy is epsilon-greedy on the online network."""
        policy = self._given_policy or self.make_policy(cast("EnvBase", self.env))
        if not isinstance(policy, EpsilonGreedy):
            raise ValueError(
                f"policy: expected an EpsilonGreedy, whose network is trained, received {type(policy).__name__}. "
                "Remedy: EpsilonGreedy(network, spec=action_spec), the same in the collector and here."
            )
        self.q_network = self.acceleration.module(policy.network)
        self.target_network = self.make_target(policy)
        self._online = list(self.q_network.parameters())
        self._target = list(self.target_network.parameters())
        config = self.config
        self.optimizer = GuardedAdam(
            self._online,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            acceleration=self.acceleration,
        )
        self.parameter_names = [name for name, _ in self.q_network.named_parameters()]
        self._losses_fn = self.compiled(self.sample_losses)
        self._guard_fn = self.compiled(self._guard)
        self._update_target_fn = self.compiled(self._update_target)
        return policy

    def parts(self) -> dict[str, Stateful]:
        """Policy with its schedule, target network, optimiser."""
        return {"policy": self.policy, "target_network": self.target_network, "optimizer": self.optimizer}

    def schedule(self) -> None:
        """Epsilon of the next collection, learning rate of this iteration's updates, exponent of the weights."""
        config = self.config
        self.policy.step(config.batch_size)
        if config.anneal_learning_rate:
            self.optimizer.learning_rate.copy_(config.learning_rate * (1.0 - self.progress))
        self.metrics.add("train/epsilon", self.policy.epsilon, reduce="last")
        self.metrics.add("train/learning_rate", self.optimizer.learning_rate, reduce="last")

    def update(self, sample: TensorDictBase) -> None:
        """One step of Adam on the temporal differences of ``sample [B]``, then target network and priorities."""
        attempt = functools.partial(self._gradients, sample)
        loss, td_error, q_value = self.micro.run(attempt, len(sample), undo=self.optimizer.zero_grad)
        grad_scale, skip, fault = self._guard_fn(loss, td_error, q_value, self.optimizer.grad_norm())
        self.optimizer.step(grad_scale, skip)
        self.guard.note(loss.view(1), self.optimizer.grad_norms, fault)
        self._update_target_fn()
        if self.config.sampler == "prioritized":
            self.buffer.update_priority(
                sample.get("index"), td_error.abs() + LEAST_PRIORITY, sample.get("index_generation", None)
            )

    # -- one update ---------------------------------------------------------------------------------------------------

    def probe(self, rows: TensorDictBase) -> None:
        """The passes of an update on a sample ``rows [b]``, eagerly, to see how much memory they take."""
        self.sample_losses(with_steps(rows))[0].backward()

    def _gradients(self, sample: TensorDictBase, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``sample [B]`` in micro-batches, and what :meth:`sample_losses` gives, without a gradient."""
        self.optimizer.zero_grad()
        if parts == 1:
            loss, td_error, q_value = self._losses_fn(sample)
            self.optimizer.scaled(loss).backward()
            return loss.detach(), td_error, q_value
        rows: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in parts_of(sample, parts, sample.get("priority_weight", None)):
            loss, td_error, q_value = self._losses_fn(part.batch)
            loss = loss * part.weight
            self.optimizer.scaled(loss).backward()
            rows.append((loss.detach(), td_error, q_value * part.share))
        losses, td_errors, q_values = zip(*rows, strict=True)
        return torch.stack(losses).sum(), torch.cat(td_errors), torch.stack(q_values).sum()

    def _guard(self, loss: Tensor, td_error: Tensor, q_value: Tensor, grad_norm: Tensor) -> tuple[Tensor, ...]:
        """Gradient scale, 1 to skip the step (loss or gradient are not finite), and whether that is a fault."""
        finite = loss.isfinite() & grad_norm.isfinite()
        fault = self.optimizer.is_fault(loss, grad_norm)
        self.count_update(torch.stack([loss, td_error.abs().mean(), q_value, grad_norm]), finite, fault)
        return (grad_norm / self.config.max_grad_norm).clamp_min(1.0), (~finite).to(torch.float32), fault

    @torch.no_grad()
    def _update_target(self) -> None:
        """Moves the target network by tau every ``target_interval`` updates, decided on the device."""
        due = (self.updates % self.config.target_interval == 0).to(torch.float32)
        for target, online in zip(self._target, self._online, strict=True):
            target.lerp_(online, due * self.config.tau)


class DistributionalTrainer(ValueTrainer):
    """A :class:`ValueTrainer` whose networks and targets are those of a distributional loss.

    An algorithm writes :meth:`make_policy` and :meth:`make_loss`.

    Attributes:
        loss: the loss, with both networks.
    """

    @abstractmethod
    def make_loss(self, network: nn.Module, **keys: Any) -> Any:
        """The loss of a network; ``keys`` are the loss's arguments ``in_keys``, ``action_key``, ``mask_key``."""

    def make_target(self, policy: EpsilonGreedy) -> nn.Module:
        """The loss's target network."""
        keys = {"in_keys": policy.network_keys, "action_key": policy.action_key, "mask_key": policy.mask_key}
        self.loss = self.make_loss(self.q_network, **keys)
        return self.loss.target_network

    def sample_losses(self, sample: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`ValueTrainer.sample_losses`."""
        return self.loss.losses(sample)


def epsilon_greedy(env: EnvBase, config: ValueConfig, make_network: Callable[..., nn.Module]) -> EpsilonGreedy:
    """Epsilon-greedy on a network: writes ``action``.

    It reads ``observation``, or the vectors of :func:`~torchrl_perf.trainers.spaces.observation_inputs`; several of
    them for a network whose values are all that is asked of it, :class:`FusedMLP` and :class:`DuelingMLP`.

    Args:
        env: gives sizes and device.
        config: gives width, activation, precision and the schedule.
        make_network: called with the observation's size, the number of actions, and ``hidden_size``, ``activation``,
            ``precision`` and ``device``.

    Raises:
        ValueError: for continuous actions, several of them at once, and an env without a vector to read.
    """
    spec = single_choice(env)
    inputs = observation_inputs(env, several=make_network in (FusedMLP, DuelingMLP))
    network = make_network(
        inputs.size,
        int(cast("Any", spec.space).n),
        hidden_size=config.hidden_size,
        activation=config.activation,
        precision=config.precision,
        device=env.device,
    )
    return EpsilonGreedy(
        inputs.network(network),
        spec=spec,
        in_keys=inputs.keys,
        eps_start=config.eps_start,
        eps_end=config.eps_end,
        decay_frames=config.eps_frames,
        write_values=False,
    )
