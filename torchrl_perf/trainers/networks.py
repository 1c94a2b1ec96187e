"""Settings of networks that are perceptrons: depth, widths, activation, normalisation."""

from dataclasses import dataclass
from typing import Any, Literal

from torchrl_perf.trainers.config_checks import Checks

__all__ = ["NETWORK_SETTINGS", "Activation", "CriticNetworkSettings", "NetworkSettings"]

Activation = Literal["tanh", "relu", "elu", "silu", "gelu"]

NETWORK_SETTINGS = ("hidden_sizes", "critic_hidden_sizes", "layer_norm")
"""Fields of the classes below, for systems whose networks are their own."""


@dataclass(frozen=True)
class NetworkSettings:
    """The hidden layers of a perceptron; ``hidden_size`` and ``activation`` are fields of the config beside it."""

    hidden_sizes: tuple[int, ...] | None = None
    """Widths of the hidden layers, such as 512 256 128; None is two of hidden_size."""
    layer_norm: bool = False
    """Normalise the units of each hidden layer before its activation (arXiv:1607.06450)."""

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


def _check_widths(checks: Checks, name: str) -> None:
    checks.each((name,), lambda sizes: all(size >= 1 for size in sizes), "positive integers, such as 64 64")
