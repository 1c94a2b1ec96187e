"""Settings that algorithms of discrete action values share."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive, is_share
from torchrl_perf.trainers.off_policy_config import OffPolicyConfig


@dataclass(frozen=True)
class ValueConfig(OffPolicyConfig):
    """A run that learns a value for each discrete action and acts on the greatest, or at random now and then.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *OffPolicyConfig.fixed_by_checkpoint,
        "hidden_size",
        "activation",
        "dueling",
    )

    double: bool = True
    """Let the online network choose the next action that the target network values (arXiv:1509.06461)."""
    dueling: bool = False
    """Learn the state's value and the actions' advantages apart (arXiv:1511.06581)."""
    learning_rate: float = 1e-3
    """Adam's step size at the start."""
    anneal_learning_rate: bool = False
    """Lower the learning rate linearly to 0 over the run."""
    max_grad_norm: float = 10.0
    """Largest norm of the gradient."""
    tau: float = 1.0
    """Share of the online network that goes into the target network at each of its updates; 1 copies it."""
    target_interval: int = 100
    """Updates between two updates of the target network."""
    eps_start: float = 1.0
    """Probability of a random action at the start."""
    eps_end: float = 0.05
    """Probability of a random action after eps_frames."""
    eps_frames: int = 50_000
    """Frames in which that probability falls, linearly; those before learning_starts count."""
    hidden_size: int = 64
    """Width of the network's hidden layers."""
    activation: Literal["tanh", "relu"] = "relu"
    """Activation of the hidden layers."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("hidden_size", "target_interval", "eps_frames"), is_count, "a positive integer")
        checks.each(("learning_rate", "max_grad_norm"), is_positive, "a positive number")
        checks.each(("eps_start", "eps_end"), is_share, "a number in [0, 1]")
        checks.each(("tau",), lambda value: 0 < value <= 1, "a number in (0, 1]")
