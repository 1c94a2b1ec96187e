"""Learning the quantiles of action values, IQN and QR-DQN, with every step of the loop on the device."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn
from torchrl.envs import EnvBase

from torchrl_perf.functional.losses.risk import Risk, check_risk
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.modules.values.quantile import ImplicitQuantileMLP, QuantileMLP
from torchrl_perf.objectives.quantile import QuantileDQNLoss
from torchrl_perf.trainers.config_checks import Checks, is_count
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.off_policy.value_based import ValueAlgorithm, ValueConfig, epsilon_greedy


@dataclass(frozen=True)
class QuantileConfig(ValueConfig):
    """What IQN and QR-DQN have in common.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    not_taken: ClassVar[tuple[str, ...]] = ("layer_norm",)

    double: bool = False
    """Let the online network choose the next action that the target network values (arXiv:1509.06461)."""
    greedy: Literal["mean", "per_quantile"] = "mean"
    """Next action of a target: the best by the mean of its quantiles, or another one for each quantile."""
    kappa: float = 1.0
    """Temporal difference up to which the quantile loss is quadratic; 0 is nowhere."""
    risk: Literal["none", "cvar", "wang", "power"] = "none"
    """Distortion of the distribution that actions are chosen by; learning stays neutral."""
    risk_eta: float = 1.0
    """Parameter of the distortion: cvar's share of the worst outcomes; wang's and power's bias, averse below 0."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("kappa",), lambda value: value >= 0, "a number of at least 0")
        checks.idle(("risk_eta",), "risk", lambda risk: risk == "none")
        if checks.sound("risk", "risk_eta"):
            try:
                check_risk(self.distortion)
            except ValueError as error:
                checks.add("risk_eta", f"risk_eta: {str(error).removeprefix('eta: ')}")
        if checks.sound("greedy", "double") and self.greedy == "per_quantile" and self.double:
            checks.add("greedy", "greedy: expected 'mean' with double, received 'per_quantile'. Remedy: double=False.")

    @property
    def distortion(self) -> Risk | None:
        """The risk to act on, None for none."""
        return None if self.risk == "none" else Risk(self.risk, self.risk_eta)


@dataclass(frozen=True)
class IQNConfig(QuantileConfig):
    """Every choice of a run of implicit quantile networks (arXiv:1806.06923).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "iqn"
    presets_in: ClassVar[str] = "trainers.iqn:IQN_PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:QUANTILES"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*QuantileConfig.fixed_by_checkpoint, "num_cosines")

    num_taus: int = 8
    """Quantiles of the action taken, drawn for each row (K)."""
    num_target_taus: int = 8
    """Quantiles of the next action that each of them is compared with."""
    num_action_taus: int = 32
    """Quantiles whose mean is acted on."""
    num_cosines: int = 64
    """Features of a quantile's level."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        counts = ("num_taus", "num_target_taus", "num_action_taus", "num_cosines")
        checks.each(counts, is_count, "a positive integer")


@dataclass(frozen=True)
class QRDQNConfig(QuantileConfig):
    """Every choice of a run of quantile regression DQN (arXiv:1710.10044).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "qr-dqn"
    presets_in: ClassVar[str] = "trainers.iqn:QR_DQN_PRESETS"
    blueprint_in: ClassVar[str] = "trainers.blueprints:QUANTILES"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*QuantileConfig.fixed_by_checkpoint, "num_quantiles")

    num_quantiles: int = 32
    """Quantiles of each action's value (K)."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("num_quantiles",), is_count, "a positive integer")


# Long n-step returns reach the end of an episode before it is forgotten how it came about: with 5 steps in place of 20
# these runs end near 400. Differences up to 10 are averaged, so that rare failures count in the mean of the quantiles.
_CARTPOLE: dict[str, Any] = {
    "num_envs": 64,
    "num_steps": 4,
    "total_steps": 150_000,
    "gamma": 0.99,
    "capacity": 300_000,
    "updates_per_iteration": 16,
    "minibatch_size": 128,
    "learning_starts": 1_000,
    "n_step": 20,
    "double": True,
    "kappa": 10.0,
    "anneal_learning_rate": True,
    "target_interval": 256,
    "eps_end": 0.03,
    "eps_frames": 40_000,
    "log_interval": 20,
}

IQN_PRESETS: dict[str, IQNConfig] = {
    # with ReLU and the usual step size these runs end between 440 and 485
    "CartPole": IQNConfig(**_CARTPOLE, learning_rate=2.5e-3, hidden_size=128, activation="tanh"),
}
"""Settings for each task, by env name. They solve it in about two minutes on two CPU cores."""

QR_DQN_PRESETS: dict[str, QRDQNConfig] = {"CartPole": QRDQNConfig(**_CARTPOLE, num_quantiles=16, hidden_size=128)}
"""Settings for each task, by env name. They solve it in about two minutes on two CPU cores."""


class IQN(ValueAlgorithm):
    """IQN (arXiv:1806.06923), and with a :class:`QRDQNConfig` QR-DQN (arXiv:1710.10044).

    Levels are drawn on the device in each update, anew in each replay of a graph. An update that is split for want of
    memory draws them anew for each part.
    """

    config: IQNConfig | QRDQNConfig

    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """Epsilon-greedy on the means of quantiles, or on a risk."""
        return make_quantile_policy(env, self.config)

    def make_loss(self, network: nn.Module, policy: EpsilonGreedy) -> QuantileDQNLoss:
        """The quantile regression loss of a network."""
        config = self.config
        return QuantileDQNLoss(
            network,
            gamma=config.gamma,
            double_dqn=config.double,
            kappa=config.kappa,
            num_taus=(config.num_taus, config.num_target_taus) if isinstance(config, IQNConfig) else (1, 1),
            greedy=config.greedy,
            in_keys=policy.network_keys,
            action_key=policy.action_key,
            mask_key=policy.mask_key,
        )


class IQNTrainer(OffPolicyTrainer):
    """The loop of :class:`OffPolicyTrainer` on :class:`IQN`: IQN or QR-DQN, as the kind of config says.

    Args:
        config: every choice of the run.
        env: a TorchRL env with batch_size [num_envs] and discrete actions; by default the task that the config names.
        collector: collects ``[N, T]`` batches with ``policy``, such as a ``HostCollector``.
        policy: an :class:`EpsilonGreedy` on a network of quantiles; by default :func:`make_quantile_policy`. Where only
            a collector is given, its policy.

    Raises:
        ValueError: at construction, for continuous actions, and for parts that do not fit each other.
    """

    algorithm_class = IQN


def make_quantile_policy(env: EnvBase, config: IQNConfig | QRDQNConfig) -> EpsilonGreedy:
    """Epsilon-greedy on the means of quantiles, or on a risk: reads ``observation``, writes ``action``.

    Raises:
        ValueError: for continuous actions.
    """
    options: dict[str, Any] = {"dueling": config.dueling, "risk": config.distortion}
    if isinstance(config, IQNConfig):
        options |= {"num_cosines": config.num_cosines, "num_action_taus": config.num_action_taus}
        return epsilon_greedy(env, config, functools.partial(ImplicitQuantileMLP, **options))
    options["num_quantiles"] = config.num_quantiles
    return epsilon_greedy(env, config, functools.partial(QuantileMLP, **options))
