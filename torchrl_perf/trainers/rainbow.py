"""Rainbow (arXiv:1710.02298) with every step of the loop on the device."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn
from torchrl.envs import EnvBase

from torchrl_perf.functional.losses.distributional import check_support
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.values.categorical_q import CategoricalMLP
from torchrl_perf.objectives.c51 import DeviceC51Loss
from torchrl_perf.trainers.config_checks import Checks, is_count
from torchrl_perf.trainers.off_policy.algorithm import Setup
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.off_policy.value_based import ValueAlgorithm, ValueConfig, epsilon_greedy

REWARD_BOUNDS: dict[str, tuple[float, float]] = {
    "CartPole": (1.0, 1.0),
    "Acrobot": (-1.0, 0.0),
    "MountainCar": (-1.0, -1.0),
}
"""Least and greatest reward of a step, of the package's tasks with discrete actions."""


def task_support(env: str, gamma: float) -> tuple[float, float]:
    """The least and the greatest discounted return of a task, 0 included, since any step may be the last.

    Args:
        env: one of :data:`REWARD_BOUNDS`.
        gamma: discount factor, below 1.
    """
    # rounded, so that 1 / (1 - .98) is 50
    low, high = (round(bound / (1 - gamma), 9) for bound in REWARD_BOUNDS[env])
    return min(low, 0.0), max(high, 0.0)


@dataclass(frozen=True)
class RainbowConfig(ValueConfig):
    """Every choice of a Rainbow run (arXiv:1710.02298); C51 (arXiv:1707.06887) with its six parts switched off.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "rainbow"
    presets_in: ClassVar[str] = "trainers.rainbow:RAINBOW_PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:RAINBOW"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *ValueConfig.fixed_by_checkpoint,
        "noisy",
        "num_atoms",
        "v_min",
        "v_max",
    )

    not_taken: ClassVar[tuple[str, ...]] = ("layer_norm",)

    dueling: bool = True
    """Learn the state's value and the actions' advantages apart (arXiv:1511.06581)."""
    n_step: int = 3
    """Rewards that are summed before the target network's value."""
    sampler: Literal["random", "prioritized"] = "prioritized"
    """How rows are drawn: uniformly, or in proportion to priority ** alpha (arXiv:1511.05952)."""
    beta_final: float | None = None
    """Exponent of the importance weights at the end, reached linearly; None keeps it constant."""
    noisy: Literal["none", "shared", "per_row"] = "shared"
    """Noise in the layers to explore by (arXiv:1706.10295): shared by all envs, or drawn for each; none for epsilon."""
    eps_start: float = 0.0
    """Probability of a random action at the start."""
    eps_end: float = 0.0
    """Probability of a random action after eps_frames."""
    num_atoms: int = 51
    """Returns that the distribution of an action's value is spread over (M)."""
    v_min: float = 0.0
    """The least of them, discounted; the preset of a task has its own."""
    v_max: float = 100.0
    """The greatest of them, discounted; the preset of a task has its own."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("num_atoms",), is_count, "a positive integer")
        if checks.sound("v_min", "v_max") and not self.v_min < self.v_max:
            checks.add(
                "v_max",
                f"v_max: expected more than v_min = {self.v_min}, received {self.v_max}. Remedy: the least and the "
                "greatest discounted return.",
            )


RAINBOW_PRESETS: dict[str, RainbowConfig] = {
    # A return of 1 a step is at most 1 / (1 - gamma) = 50. Random actions at the start fill the buffer with failures of
    # all kinds, without which noise alone takes several times as long.
    "CartPole": RainbowConfig(
        num_envs=64,
        num_steps=4,
        total_steps=200_000,
        gamma=0.98,
        capacity=300_000,
        updates_per_iteration=16,
        minibatch_size=128,
        learning_starts=1_000,
        n_step=5,
        beta_final=1.0,
        anneal_learning_rate=True,
        target_interval=256,
        eps_start=1.0,
        eps_frames=40_000,
        hidden_size=128,
        v_max=50.0,
        log_interval=20,
    ),
}
"""Settings for each task, by env name; those of CartPole for the others, with atoms for their returns."""
for _env in ("Acrobot", "MountainCar"):
    _usual = RAINBOW_PRESETS["CartPole"]
    _low, _high = task_support(_env, _usual.gamma)
    RAINBOW_PRESETS[_env] = dataclasses.replace(_usual, env=_env, v_min=_low, v_max=_high)


class Rainbow(ValueAlgorithm):
    """C51 with double Q-learning, duelling and noisy networks, n-step returns and prioritised replay, as configured.

    The priority of a row is its cross-entropy. Atoms that cannot represent the returns of the package's task that the
    config names are refused.
    """

    config: RainbowConfig

    def build(self, setup: Setup) -> EpsilonGreedy:
        """Networks and optimiser, after a look at the atoms.

        Raises:
            ValueError: where the atoms cannot represent the task's returns.
        """
        config = self.config
        if not setup.own_env and config.env in REWARD_BOUNDS:
            check_support(config.v_min, config.v_max, REWARD_BOUNDS[config.env], config.gamma)
        return super().build(setup)

    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """Greedy on the means of a categorical network with noise."""
        return make_rainbow_policy(env, self.config)

    def make_loss(self, network: nn.Module, policy: EpsilonGreedy) -> DeviceC51Loss:
        """The cross-entropy to the projected target."""
        return DeviceC51Loss(
            network,
            gamma=self.config.gamma,
            double_dqn=self.config.double,
            in_keys=policy.network_keys,
            action_key=policy.action_key,
            mask_key=policy.mask_key,
        )


class RainbowTrainer(OffPolicyTrainer):
    """The loop of :class:`OffPolicyTrainer` on :class:`Rainbow`.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs] and discrete actions; by default the task that the config names.
        collector: collects ``[N, T]`` batches with ``policy``, such as a ``HostCollector``.
        policy: an :class:`EpsilonGreedy` on a categorical network; by default :func:`make_rainbow_policy`. Where only a
            collector is given, its policy.

    Raises:
        ValueError: at construction, for continuous actions, atoms that cannot represent the task's returns, and parts
            that do not fit each other.
    """

    algorithm_class = Rainbow


def make_rainbow_policy(env: EnvBase, config: RainbowConfig) -> EpsilonGreedy:
    """Greedy on the means of a categorical network with noise: reads ``observation``, writes ``action``.

    Raises:
        ValueError: for continuous actions.
    """
    options: dict[str, Any] = {"num_atoms": config.num_atoms, "v_min": config.v_min, "v_max": config.v_max}
    options |= {"dueling": config.dueling, "noisy": None if config.noisy == "none" else config.noisy}
    return epsilon_greedy(env, config, functools.partial(CategoricalMLP, **options))
