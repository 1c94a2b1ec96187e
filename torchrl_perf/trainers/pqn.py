"""Parallelised Q-learning (arXiv:2407.04811): layer norm and lambda returns, no replay and no target network."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_perf.collectors.native_autoreset import is_native
from torchrl_perf.functional.advantages import td_lambda_targets
from torchrl_perf.functional.losses.dqn import action_value, q_loss
from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.modules.mlp import hidden_layers
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.trainers.config import RunConfig, check_minibatches
from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive, is_share
from torchrl_perf.trainers.networks import CONVOLUTION_SETTINGS, Activation, NetworkSettings
from torchrl_perf.trainers.normalization import NORMALIZATION_SETTINGS, NormalizationSettings, normalized
from torchrl_perf.trainers.on_policy.algorithm import OnPolicyAlgorithm, valid_key_of
from torchrl_perf.trainers.on_policy.trainer import OnPolicyTrainer
from torchrl_perf.trainers.ppo import PPOConfig
from torchrl_perf.trainers.run.numerics import NumericalGuard
from torchrl_perf.trainers.spaces import observation_inputs, single_choice
from torchrl_perf.transforms.missing import fill_missing

TARGET = "value_target"


@dataclass(frozen=True)
class PQNConfig(NormalizationSettings, NetworkSettings, RunConfig):
    """Every choice of a PQN run (arXiv:2407.04811): Q-learning on parallel envs, without replay or target network.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "pqn"
    presets_in: ClassVar[str] = "trainers.pqn:PQN_PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:PQN"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        *("hidden_size", "hidden_sizes", "activation", "layer_norm"),
        *CONVOLUTION_SETTINGS,
        *NORMALIZATION_SETTINGS,
    )

    epochs: int = 4
    """Passes over each batch."""
    minibatches: int = 4
    """Parts that a batch is split into at each pass; has to divide num_envs * num_steps."""
    learning_rate: float = 1e-3
    """Adam's step size at the start."""
    anneal_learning_rate: bool = True
    """Lower the learning rate linearly to 0 over the run, or over schedule_steps."""
    lmbda: float = 0.95
    """Lambda of the returns; 0 is one step."""
    max_grad_norm: float = 10.0
    """Largest norm of the gradient."""
    eps_start: float = 1.0
    """Probability of a random action at the start."""
    eps_end: float = 0.01
    """Probability of a random action after eps_frames."""
    eps_frames: int = 60_000
    """Env steps in which that probability falls, linearly."""
    hidden_size: int = 64
    """Width of the two hidden layers, where hidden_sizes are not given."""
    layer_norm: bool = True
    """Normalise the units of each hidden layer before its activation (arXiv:1607.06450), as the paper does."""
    activation: Activation = "relu"
    """Activation of the hidden layers."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("epochs", "minibatches", "hidden_size", "eps_frames"), is_count, "a positive integer")
        checks.each(("lmbda", "eps_start", "eps_end"), is_share, "a number in [0, 1]")
        checks.each(("learning_rate", "max_grad_norm"), is_positive, "a positive number")
        check_minibatches(self, checks)

    # the same passes over minibatches
    updates_each_iteration = PPOConfig.updates_each_iteration
    experiences_per_iteration = PPOConfig.experiences_per_iteration


_CARTPOLE = PQNConfig(num_envs=32, minibatches=8)
PQN_PRESETS = {"CartPole": _CARTPOLE, "Acrobot": replace(_CARTPOLE, env="Acrobot", total_steps=400_000)}
"""Settings for each task, by env name."""


class PQN(OnPolicyAlgorithm):
    """Epsilon-greedy on one network, which regresses on the lambda returns of its own greatest values."""

    acting: ClassVar[str] = "policy"
    losses: ClassVar[tuple[str, ...]] = ("loss",)
    metric_names: ClassVar[tuple[str, ...]] = ("train/epsilon",)

    def __init__(
        self, config: PQNConfig, env: EnvBase, acceleration: Acceleration, *, policy: EpsilonGreedy | None = None
    ) -> None:
        if valid_key_of(env) is not None:
            raise ValueError("env: expected one whose rows all count, received 'valid' flags. Remedy: PPOTrainer.")
        self.config, self.fills = config, is_native(env)
        if not isinstance(policy := policy or make_pqn_policy(env, config), EpsilonGreedy):
            raise ValueError(f"policy: expected EpsilonGreedy, received {type(policy).__name__}. Remedy: policy=None.")
        self.policy = acceleration.policy(policy)
        self.networks = {"policy": self.policy}
        self.network = self.loss = acceleration.module(cast("nn.Module", self.policy.network))
        self.statistics, self.schedules = ("loss", "value", "error"), {}
        self.row_keys = [*self.policy.network_keys, self.policy.action_key, TARGET]

    def schedule(self, iteration: Tensor) -> None:
        """Epsilon of this iteration."""
        self.policy.frames.copy_(iteration * self.config.batch_size)
        self.policy.step(0)

    @torch.no_grad()
    def estimate(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds the lambda returns ``value_target [N, T, 1]``, which bootstrap from ``max_a Q(s', a)``."""
        following = batch.get("next")
        done, terminated = following.get("done"), following.get("terminated")
        if self.fills:
            following = fill_missing(following.copy(), batch, done)
        greatest = self.network(*[following.get(key) for key in self.policy.network_keys]).amax(-1, keepdim=True)
        config, reward = self.config, following.get("reward")
        return batch.set(TARGET, td_lambda_targets(config.gamma, config.lmbda, greatest, reward, done, terminated))

    def minibatch_loss(self, rows: TensorDictBase) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Half the squared error of the value of the action taken."""
        values = self.network(*[rows.get(key) for key in self.policy.network_keys])
        value, target = action_value(values, rows.get(self.policy.action_key)), rows.get(TARGET).squeeze(-1)
        loss = 0.5 * q_loss(value, target, "l2")
        return loss, {"loss": loss, "value": value.mean(), "error": (value - target).abs().mean()}

    def measure(self, batch: TensorDictBase, metrics: DeviceMetrics, guard: NumericalGuard) -> None:
        """The probability of a random action."""
        metrics.add("train/epsilon", self.policy.epsilon, reduce="last")

    def probe_rows(self, rows: TensorDictBase) -> TensorDictBase:
        """Rows with targets of 0."""
        return rows.set(TARGET, torch.zeros(len(rows), 1, device=rows.device))


def make_pqn_policy(env: EnvBase, config: PQNConfig) -> EpsilonGreedy:
    """Epsilon-greedy on a perceptron with layer norm before each activation: writes ``action``."""
    spec, inputs = single_choice(env), observation_inputs(env, config)
    sizes = [inputs.size, *config.widths]
    layers = hidden_layers(sizes, config.activation, layer_norm=config.layer_norm)
    layers.append(nn.Linear(sizes[-1], int(cast("Any", spec.space).n)))
    network: nn.Module = MixedSequential(*layers, precision=config.precision).to(env.device)
    network = normalized(network, inputs, config, env.device)
    network = inputs.network(network, precision=config.precision, device=env.device)
    schedule = {"eps_start": config.eps_start, "eps_end": config.eps_end, "decay_frames": config.eps_frames}
    return EpsilonGreedy(network, spec=spec, in_keys=inputs.keys, action_key="action", write_values=False, **schedule)


class PQNTrainer(OnPolicyTrainer):
    """:class:`OnPolicyTrainer` of :class:`PQN`; ``policy=`` takes an :class:`EpsilonGreedy` of your own."""

    algorithm_class: ClassVar[type[OnPolicyAlgorithm]] = PQN
