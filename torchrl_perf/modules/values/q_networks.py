"""Networks of action values."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchrl_perf.functional.wide import widened
from torchrl_perf.modules.mlp import FusedMLP


class DuelingMLP(nn.Module):
    """Duelling network (arXiv:1511.06581) on a two-layer perceptron: ``Q = V + A - mean(A)``.

    Value and advantages are the outputs of one :class:`FusedMLP`, so that both run in its kernel. They share both
    hidden layers; in the paper each has a hidden layer of its own.

    Args:
        in_features: O, size of the last dim of the input.
        num_actions: D.
        hidden_size: width of both hidden layers.
        activation: as for :class:`FusedMLP`.
        precision: as for :class:`FusedMLP`.
        device: of the parameters.
        hidden_sizes: widths of the hidden layers, in place of two of ``hidden_size``.
        layer_norm: as for :class:`FusedMLP`.

    Raises:
        ValueError: for an unknown activation or precision.
    """

    def __init__(
        self,
        in_features: int,
        num_actions: int,
        *,
        hidden_size: int = 64,
        activation: str = "relu",
        precision: str = "tf32",
        device: torch.device | str | None = None,
        hidden_sizes: Sequence[int] | None = None,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.streams = FusedMLP(
            in_features,
            1 + num_actions,
            hidden_size=hidden_size,
            activation=activation,
            precision=precision,
            device=device,
            hidden_sizes=hidden_sizes,
            layer_norm=layer_norm,
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[*, O]`` -> ``[*, D]`` action values."""
        streams = self.streams(x)
        wide = widened(streams)
        value, advantage = wide[..., :1], wide[..., 1:]
        return (value + advantage - advantage.mean(-1, keepdim=True)).to(streams.dtype)
