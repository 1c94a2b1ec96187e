"""A value for each cell of a map, by convolutions alone."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_perf.modules.mixed import check_precision
from torchrl_perf.runtime.precision import autocast, widened

__all__ = ["ConvQMap"]

LARGEST_GROUPS = 4
ACTIVATIONS = {"relu": F.relu, "tanh": torch.tanh}


class ConvQMap(nn.Module):
    """Fully convolutional action values: one for each cell of a map of any height and width.

    A 3 x 3 convolution; residual blocks of two 3 x 3 convolutions each, the first of block ``b`` dilated by ``2 **
    (b % 3)``, so that a cell sees 11 cells far after three blocks; a linear layer for each cell. Group
    normalisation (arXiv:1803.08494) follows each convolution: it knows no batch, so that online and target network,
    one map and many, give the same. The map's mean features go back to each cell in each block. With ``dueling``
    the map's value, of those features, and the cells' advantages are learnt apart (arXiv:1511.06581).

    Args:
        in_channels: C, planes of a map.
        hidden_size: channels of the hidden maps.
        blocks: number of residual blocks.
        activation: ``"relu"`` or ``"tanh"``.
        dueling: learn value and advantages apart.
        precision: of the convolutions, ``"tf32"``, ``"bf16"``, ``"fp16"`` or ``"ieee"``; the output is float32.
        device: of the parameters.

    Attributes:
        in_channels: C.

    Raises:
        ValueError: for sizes below 1, a negative number of blocks, an unknown activation or precision.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        hidden_size: int = 32,
        blocks: int = 3,
        activation: str = "relu",
        dueling: bool = False,
        precision: str = "tf32",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if min(in_channels, hidden_size) < 1 or blocks < 0:
            raise ValueError(
                f"expected in_channels and hidden_size of at least 1 and blocks of at least 0, received {in_channels}, "
                f"{hidden_size} and {blocks}."
            )
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, received {activation!r}.")
        self.in_channels, self.precision = in_channels, check_precision(precision)
        self.activation = activation
        self.stem = nn.Conv2d(in_channels, hidden_size, 3, padding=1, device=device)
        self.stem_norm = _norm(hidden_size, device)
        self.blocks = nn.ModuleList(
            _Block(hidden_size, dilation=2 ** (number % 3), activation=activation, device=device)
            for number in range(blocks)
        )
        self.head = nn.Conv2d(hidden_size, 1, 1, bias=not dueling, device=device)  # the mean would take it away
        self.value = nn.Linear(hidden_size, 1, device=device) if dueling else None

    def forward(self, planes: Tensor) -> Tensor:
        """Maps ``[*, C, H, W]`` -> values ``[*, H * W]`` in the parameters' dtype, cell ``row * W + column``.

        Raises:
            ValueError: for maps with another number of planes.
        """
        if planes.ndim < 3 or planes.shape[-3] != self.in_channels:
            raise ValueError(
                f"planes: expected [*, {self.in_channels}, H, W], received {list(planes.shape)}. Remedy: in_channels "
                "of the env's planes, without landscape planes twice."
            )
        rows = planes.reshape(-1, *planes.shape[-3:])
        with autocast(self.precision, rows.device):
            maps = ACTIVATIONS[self.activation](self.stem_norm(self.stem(rows)))
            for block in self.blocks:
                maps = block(maps)
            values = widened(self.head(maps).flatten(1))
            if self.value is not None:
                values = values - values.mean(-1, keepdim=True) + self.value(maps.mean((-2, -1)))
        cells = math.prod(planes.shape[-2:])
        return values.to(self.head.weight.dtype).view(*planes.shape[:-3], cells)


class _Block(nn.Module):
    """``x + conv(conv(x) + mean)``, normalised; maps ``[B, C, H, W]`` to the same."""

    def __init__(self, channels: int, *, dilation: int, activation: str, device: torch.device | str | None) -> None:
        super().__init__()
        self.activation = activation
        self.first = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation, device=device)
        self.first_norm = _norm(channels, device)
        self.whole = nn.Linear(channels, channels, device=device)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, device=device)
        self.second_norm = _norm(channels, device)

    def forward(self, maps: Tensor) -> Tensor:
        active = ACTIVATIONS[self.activation]
        whole = self.whole(maps.mean((-2, -1))).unsqueeze(-1).unsqueeze(-1)
        inner = active(self.first_norm(self.first(maps)) + whole)
        return active(maps + self.second_norm(self.second(inner)))


def _norm(channels: int, device: torch.device | str | None) -> nn.GroupNorm:
    groups = next(groups for groups in range(LARGEST_GROUPS, 0, -1) if channels % groups == 0)
    return nn.GroupNorm(groups, channels, device=device)
