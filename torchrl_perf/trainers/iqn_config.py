"""Settings of runs that learn the quantiles of action values: IQN and QR-DQN."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchrl_perf.functional.risk import Risk, check_risk
from torchrl_perf.trainers.config_checks import Checks, is_count
from torchrl_perf.trainers.value_config import ValueConfig


@dataclass(frozen=True)
class QuantileConfig(ValueConfig):
    """What IQN and QR-DQN have in common.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

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
    presets_in: ClassVar[str] = "trainers.iqn_config:IQN_PRESETS"
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
    presets_in: ClassVar[str] = "trainers.iqn_config:QR_DQN_PRESETS"
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
