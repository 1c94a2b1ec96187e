"""Settings of networks that are perceptrons: depth, widths, activation, normalisation."""

from dataclasses import dataclass
from typing import Any, Literal

from torchrl_perf.modules.encoders.observations import ConvolutionKind
from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive

__all__ = [
    "CONVOLUTION_SETTINGS",
    "NETWORK_SETTINGS",
    "POLICY_SETTINGS",
    "Activation",
    "CriticNetworkSettings",
    "GaussianNetworkSettings",
    "NetworkSettings",
]

Activation = Literal["tanh", "relu", "elu", "silu", "gelu", "mish", "leaky_relu"]

CONVOLUTION_SETTINGS = ("conv_layers", "conv_features")
"""Fields of :class:`NetworkSettings` about images."""
NETWORK_SETTINGS = ("hidden_sizes", "critic_hidden_sizes", "layer_norm", *CONVOLUTION_SETTINGS)
"""Fields of the classes below, for systems whose networks are their own."""
POLICY_SETTINGS = ("shared_trunk", "policy_scale", "initial_scale")
"""Those of :class:`GaussianNetworkSettings`."""


@dataclass(frozen=True)
class NetworkSettings:
    """The hidden layers of a perceptron; ``hidden_size`` and ``activation`` are fields of the config beside it."""

    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers, such as 512 256 128; None is two of hidden_size."""
    layer_norm: bool = False
    """Normalise the units of each hidden layer before its activation (arXiv:1607.06450)."""
    conv_layers: ConvolutionKind = "auto"
    """Convolutions of images: "nature" has those of the DQN of 2015, for sides of at least 36 pixels, and "small" three
    of 3 x 3; "auto" takes "nature" where it fits, and leaves images below 8 pixels a side to the perceptron."""
    conv_features: int | None = None
    """Numbers that the convolutions of an image end in; None is 512 for "nature" and 128 for "small"."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the hidden layers."""
        size: int = getattr(self, "hidden_size")  # noqa: B009  of the config
        return (size, size) if self.hidden_sizes is None else self.hidden_sizes

    @property
    def layers(self) -> dict[str, Any]:
        """The hidden layers as arguments of :class:`~torchrl_perf.modules.FusedMLP`."""
        return {"hidden_sizes": self.widths, "layer_norm": self.layer_norm}

    def _check(self, checks: Checks) -> None:
        super()._check(checks)  # pyright: ignore[reportAttributeAccessIssue]  of the config beside it
        _check_widths(checks, "hidden_sizes")
        of_task = checks.usual("hidden_sizes")
        checks.idle(("hidden_size",), "hidden_sizes", lambda widths: widths is not None and widths == of_task)
        checks.each(("conv_features",), is_count, "a positive integer")


@dataclass(frozen=True)
class CriticNetworkSettings(NetworkSettings):
    """The same of an actor, and of critics that may be larger or smaller."""

    critic_hidden_sizes: tuple[int, ...] | None = None
    """Widths of the critics' hidden layers; None is those of the actor."""

    @property
    def critic_widths(self) -> tuple[int, ...]:
        """Widths of the critics' hidden layers."""
        return self.widths if self.critic_hidden_sizes is None else self.critic_hidden_sizes

    @property
    def critic_layers(self) -> dict[str, Any]:
        """The critics' hidden layers as arguments of :class:`~torchrl_perf.modules.FusedMLP`."""
        return {"hidden_sizes": self.critic_widths, "layer_norm": self.layer_norm}

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        _check_widths(checks, "critic_hidden_sizes")


@dataclass(frozen=True)
class GaussianNetworkSettings(CriticNetworkSettings):
    """What actor and critic of an on-policy algorithm have in common, and where the scale of the actions comes from."""

    shared_trunk: bool = False
    """One network below actor and critic, which reads the observation and ends with the last hidden layer; each has one
    linear layer of its own above it. Gradients of both losses train it."""
    policy_scale: Literal["auto", "state_independent", "state_dependent"] = "auto"
    """Scale of a Gaussian policy: learnt numbers that are the same in every state (arXiv:2006.05990), or outputs of the
    network. "auto" is the first for a continuous action, and the second for an action of several parts."""
    initial_scale: float = 1.0
    """That scale at the start where it is learnt numbers: a standard deviation in the action's own units."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("initial_scale",), is_positive, "a positive number")
        if not checks.sound("shared_trunk") or not self.shared_trunk:
            return
        if checks.sound("critic_hidden_sizes") and self.critic_hidden_sizes is not None:
            checks.add(
                "critic_hidden_sizes",
                "critic_hidden_sizes: expected None with shared_trunk, which has the critic's hidden layers, received "
                f"{self.critic_hidden_sizes}. Remedy: leave it out, or shared_trunk=False.",
            )
        if checks.sound("hidden_sizes") and self.hidden_sizes == ():
            checks.add(
                "hidden_sizes",
                "hidden_sizes: expected one width at least with shared_trunk, received (). Remedy: such as 64 64, or "
                "shared_trunk=False.",
            )


def _check_widths(checks: Checks, name: str) -> None:
    checks.each((name,), lambda sizes: all(size >= 1 for size in sizes), "positive integers, such as 64 64")
