"""Deep Q-learning (arXiv:1312.5602) with every step of the loop on the device."""

import copy
from typing import ClassVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import BaseCollector
from torchrl.data import Categorical, OneHot
from torchrl.envs import EnvBase

from torchrl_perf.functional.dqn import action_value, q_loss, q_targets
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.mlp import FusedMLP
from torchrl_perf.modules.q_networks import DuelingMLP
from torchrl_perf.trainers.dqn_config import DQNConfig
from torchrl_perf.trainers.off_policy import OffPolicyTrainer, Stateful
from torchrl_perf.trainers.optimization import GuardedAdam

MIN_PRIORITY = 1e-6  # a row without error is still drawn now and then


class DQNTrainer(OffPolicyTrainer):
    """DQN: double Q-learning, n-step returns, prioritised replay, duelling networks, as the config says.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs] and discrete actions; by default the task that the config names.
        collector: collects ``[N, T]`` batches with ``policy``, such as a ``HostCollector``.
        policy: an :class:`EpsilonGreedy` on a network of your own; by default :func:`make_q_policy`. Where only a
            collector is given, its policy.

    Attributes:
        q_network: the online network of action values.
        target_network: its delayed copy.
        optimizer: Adam of the online network.

    Raises:
        ValueError: at construction, for continuous actions, and for parts that do not fit each other.
    """

    statistics: ClassVar[tuple[str, ...]] = ("loss", "td_error", "q_value", "grad_norm")
    config: DQNConfig
    policy: EpsilonGreedy

    def __init__(
        self,
        config: DQNConfig,
        *,
        env: EnvBase | None = None,
        collector: BaseCollector | None = None,
        policy: EpsilonGreedy | None = None,
    ) -> None:
        self._given_policy = policy if policy is not None else getattr(collector, "policy", None)
        super().__init__(config, env=env, collector=collector)

    # -- what the base asks for ---------------------------------------------------------------------------------------

    def build(self) -> EpsilonGreedy:
        """The online network, its target, the optimiser; the policy is epsilon-greedy on the online network."""
        policy = self._given_policy or make_q_policy(cast("EnvBase", self.env), self.config)
        if not isinstance(policy, EpsilonGreedy):
            raise ValueError(
                f"policy: expected an EpsilonGreedy, whose network is trained, received {type(policy).__name__}. "
                "Remedy: EpsilonGreedy(network, spec=action_spec), the same in the collector and here."
            )
        self.q_network = policy.network
        self.target_network = copy.deepcopy(policy.network).requires_grad_(False)
        self._online = list(self.q_network.parameters())
        self._target = list(self.target_network.parameters())
        config = self.config
        self.optimizer = GuardedAdam(
            self._online, learning_rate=config.learning_rate, max_grad_norm=config.max_grad_norm
        )
        self._losses_fn = self.compiled(self._losses)
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
        self.optimizer.zero_grad()
        loss, td_error, q_value = self._losses_fn(sample)
        loss.backward()
        grad_scale, skip = self._guard_fn(loss.detach(), td_error, q_value, self.optimizer.grad_norm())
        self.optimizer.step(grad_scale, skip)
        self._update_target_fn()
        if self.config.sampler == "prioritized":
            self.buffer.update_priority(
                sample.get("index"), td_error.abs() + MIN_PRIORITY, sample.get("index_generation", None)
            )

    # -- one update ---------------------------------------------------------------------------------------------------

    def _losses(self, sample: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Loss 0-d with gradient, temporal differences ``[B]``, mean value of the actions taken 0-d."""
        config, policy = self.config, self.policy
        inputs = [sample.get(key) for key in policy.network_keys]
        following = sample.get("next")
        next_inputs = [following.get(key) for key in policy.network_keys]
        discount = config.gamma
        if config.n_step > 1:
            discount = config.gamma ** sample.get("steps_to_next_obs").squeeze(-1)
        with torch.no_grad():
            target = q_targets(
                following.get("reward").squeeze(-1),
                following.get("terminated").squeeze(-1),
                discount,
                self.target_network(*next_inputs),
                online_values=self.q_network(*next_inputs) if config.double else None,
                action_mask=None if policy.mask_key is None else following.get(policy.mask_key),
            )
        value = action_value(self.q_network(*inputs), sample.get(policy.action_key))
        loss = q_loss(value, target, config.loss, sample.get("priority_weight", None))
        return loss, (value - target).detach(), value.detach().mean()

    def _guard(self, loss: Tensor, td_error: Tensor, q_value: Tensor, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient scale, and 1 to skip the step: where loss or gradient are not finite."""
        finite = loss.isfinite() & grad_norm.isfinite()
        self.count_update(torch.stack([loss, td_error.abs().mean(), q_value, grad_norm]), finite)
        return (grad_norm / self.config.max_grad_norm).clamp_min(1.0), (~finite).to(torch.float32)

    @torch.no_grad()
    def _update_target(self) -> None:
        """Moves the target network by tau every ``target_interval`` updates, decided on the device."""
        due = (self.updates % self.config.target_interval == 0).to(torch.float32)
        for target, online in zip(self._target, self._online, strict=True):
            target.lerp_(online, due * self.config.tau)


def make_q_policy(env: EnvBase, config: DQNConfig) -> EpsilonGreedy:
    """Epsilon-greedy on a perceptron, duelling or not: reads ``observation``, writes ``action``.

    Raises:
        ValueError: for continuous actions.
    """
    spec = env.action_spec
    if not isinstance(spec, Categorical | OneHot):
        raise ValueError(
            f"action_spec: expected discrete actions (Categorical or OneHot), received {type(spec).__name__} in "
            f"{type(env).__name__}. Remedy: SAC or PPO for continuous actions."
        )
    network = (DuelingMLP if config.dueling else FusedMLP)(
        env.observation_spec["observation"].shape[-1],
        spec.space.n,
        hidden_size=config.hidden_size,
        activation=config.activation,
        precision=config.precision,
        device=env.device,
    )
    return EpsilonGreedy(
        network, spec=spec, eps_start=config.eps_start, eps_end=config.eps_end, decay_frames=config.eps_frames
    )
