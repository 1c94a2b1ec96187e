"""The layers from features to numbers for each action: plain or noisy, duelling or not."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from torchrl_perf.functional.atoms import duel
from torchrl_perf.modules.aligned import AlignedLinear
from torchrl_perf.modules.mixed import MixedSequential, check_precision
from torchrl_perf.modules.mlp import ACTIVATIONS, FusedMLP
from torchrl_perf.modules.noisy import NoisyLinear

_NOISES = (None, "shared", "per_row")


class HeadOptions(TypedDict, total=False):
    """Choices that all networks of distributional values share, each with a default.

    Attributes:
        hidden_size: width of the hidden layers; 64.
        activation: ``"relu"`` (the default) or another of ``torchrl_perf.modules.mlp.ACTIVATIONS``.
        dueling: a value and an advantage of each action instead of plain values (arXiv:1511.06581); False.
        noisy: explore by noise in the layers (arXiv:1706.10295), ``"shared"`` by all rows or drawn ``"per_row"``; None,
            the default, for plain layers.
        precision: of the hidden layers, as for :class:`MixedSequential`; ``"tf32"``.
        device: of the parameters; the default device.
    """

    hidden_size: int
    activation: str
    dueling: bool
    noisy: Literal["shared", "per_row"] | None
    precision: str
    device: torch.device | str | None


@dataclass(frozen=True)
class HeadSettings:
    """The options of :class:`HeadOptions` with their defaults, checked.

    Raises:
        ValueError: for an unknown activation, noise or precision, or a width below 1.
    """

    hidden_size: int = 64
    activation: str = "relu"
    dueling: bool = False
    noisy: Literal["shared", "per_row"] | None = None
    precision: str = "tf32"
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation: expected one of {sorted(ACTIVATIONS)}, received {self.activation!r}. Remedy: one of "
                "these."
            )
        if self.noisy not in _NOISES:
            raise ValueError(f"noisy: expected one of {_NOISES}, received {self.noisy!r}. Remedy: one of these.")
        if self.hidden_size < 1:
            raise ValueError(
                f"hidden_size: expected at least 1, received {self.hidden_size}. Remedy: hidden_size=1 or more."
            )
        check_precision(self.precision)


def complete(options: HeadOptions) -> HeadSettings:
    """The options with their defaults.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an option out of range.
    """
    unknown = sorted(set(options) - set(HeadOptions.__annotations__))
    if unknown:
        raise TypeError(
            f"options: expected some of {sorted(HeadOptions.__annotations__)}, received {unknown}. Remedy: take the "
            "others out."
        )
    return HeadSettings(**options)


def activation(options: HeadSettings) -> nn.Module:
    """A layer of the activation that the options name."""
    return ACTIVATIONS[options.activation]()


def linear(in_features: int, out_features: int, options: HeadSettings) -> nn.Module:
    """A linear layer, noisy if the options say so."""
    noise = options.noisy
    if noise is None:
        return AlignedLinear(in_features, out_features, device=options.device)
    return NoisyLinear(in_features, out_features, noise=noise, device=options.device)


def perceptron(sizes: Sequence[int], options: HeadSettings, *, first_plain: bool) -> MixedSequential:
    """``linear, activation, ..., linear`` of these sizes.

    Args:
        sizes: of input, hidden layers and output.
        options: complete.
        first_plain: whether the first layer, which makes features, never has noise.

    Returns:
        A :class:`FusedMLP` if that gives the same network.
    """
    if options.noisy is None and len(sizes) == 4 and sizes[1] == sizes[2]:
        return FusedMLP(
            sizes[0],
            sizes[-1],
            hidden_size=sizes[1],
            activation=options.activation,
            precision=options.precision,
            device=options.device,
        )
    plain = dataclasses.replace(options, noisy=None)
    parts: list[nn.Module] = []
    for number, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        parts += [linear(rows, columns, plain if first_plain and number == 0 else options), activation(options)]
    return MixedSequential(*parts[:-1], precision=options.precision)


class ValueHead(nn.Module):
    """M numbers for each of D actions, from features: ``[*, F]`` -> ``[*, D, M]``.

    Without a trunk below it the head is a perceptron of two hidden layers, of which the first has no noise; with one,
    of one hidden layer.

    Args:
        in_features: F.
        num_actions: D.
        size: M, such as the number of atoms or quantiles.
        has_trunk: whether the features come from a trunk.
        **options: see :class:`HeadOptions`.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an option out of range, or sizes below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_actions: int,
        size: int,
        *,
        has_trunk: bool = False,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        full = complete(options)
        if min(in_features, num_actions, size) < 1:
            raise ValueError(
                f"sizes: expected at least 1 each, received {in_features}, {num_actions} and {size}. Remedy: sizes of "
                "1 or more."
            )
        self.num_actions, self.size, self.dueling = num_actions, size, full.dueling
        hidden = [full.hidden_size] * (1 if has_trunk else 2)
        outputs = (num_actions + 1 if self.dueling else num_actions) * size
        self.layers = perceptron([in_features, *hidden, outputs], full, first_plain=not has_trunk)

    def forward(self, features: Tensor) -> Tensor:
        """``[*, F]`` -> ``[*, D, M]``."""
        numbers = self.streams(features)
        if self.dueling:
            return duel(numbers, self.num_actions)
        return numbers.unflatten(-1, (self.num_actions, self.size))

    def streams(self, features: Tensor) -> Tensor:
        """``[*, F]`` -> ``[*, D M]``; with ``dueling`` ``[*, (1 + D) M]``, a value and then the advantages."""
        return self.layers(features)
