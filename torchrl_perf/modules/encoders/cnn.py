"""Features of images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from torchrl_perf.modules.mixed import check_precision
from torchrl_perf.runtime.precision import autocast

Layout = Literal["CHW", "HWC"]


@dataclass(frozen=True)
class ConvLayer:
    """One convolution, followed by ReLU.

    Attributes:
        channels: of the output.
        kernel: height and width in pixels.
        stride: in pixels.
        padding: in pixels, on each side.
    """

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0


NATURE_LAYERS = (ConvLayer(32, 8, 4), ConvLayer(64, 4, 2), ConvLayer(64, 3, 1))
"""The convolutions of the DQN of 2015 (doi:10.1038/nature14236), for images of 84 x 84."""


class ConvNet(nn.Module):
    """Convolutions with ReLU, then one linear layer with ReLU: a trunk for images of any batch shape.

    Images of uint8 are divided by 255 on the device, so that they are stored and copied as bytes; others are taken as
    they are. The size of the flattened map is computed at construction: no layer is lazy.

    Args:
        in_shape: of one image, in the order of ``layout``.
        layers: the convolutions.
        out_features: F, width of the linear layer; None leaves it out and gives the flattened map.
        layout: ``"CHW"`` or ``"HWC"``, the order of the dims of an image.
        channels_last: keep weights and maps with the channels innermost in memory, which is what tensor cores take.
        precision: of the convolutions and the layer: ``"tf32"``, ``"bf16"``, ``"fp16"`` or ``"ieee"``; the output is
            float32.
        device: of the parameters.

    Attributes:
        out_features: F.

    Raises:
        ValueError: for sizes below 1, an unknown layout or precision, an image that is too small for the layers.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        *,
        layers: Sequence[ConvLayer] = NATURE_LAYERS,
        out_features: int | None = 512,
        layout: Layout = "CHW",
        channels_last: bool = False,
        precision: str = "tf32",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if layout not in ("CHW", "HWC"):
            raise ValueError(f"layout: expected 'CHW' or 'HWC', received {layout!r}.")
        if len(in_shape) != 3 or min(in_shape) < 1 or not layers or (out_features is not None and out_features < 1):
            raise ValueError(
                f"expected an image of three dims, a layer and at least one feature, received in_shape {in_shape}, "
                f"{len(layers)} layers and out_features {out_features}."
            )
        self.in_shape, self.layout, self.precision = tuple(in_shape), layout, check_precision(precision)
        channels, *size = in_shape if layout == "CHW" else (in_shape[2], *in_shape[:2])
        parts: list[nn.Module] = []
        for layer in layers:
            size = [_mapped(side, layer, in_shape) for side in size]
            parts += [
                nn.Conv2d(channels, layer.channels, layer.kernel, layer.stride, layer.padding, device=device),
                nn.ReLU(),
            ]
            channels = layer.channels
        self.convolutions = nn.Sequential(*parts)
        self.channels_last = channels_last
        if channels_last:
            self.convolutions.to(memory_format=torch.channels_last)  # pyright: ignore
        flat = channels * size[0] * size[1]
        self.out_features = flat if out_features is None else out_features
        self.linear = None if out_features is None else nn.Linear(flat, out_features, device=device)

    def forward(self, image: Tensor) -> Tensor:
        """Images ``[*, C, H, W]`` or ``[*, H, W, C]``, uint8 or float -> ``[*, F]`` in the dtype of the parameters.

        Raises:
            ValueError: for images of another size.
        """
        if image.shape[-3:] != self.in_shape:
            raise ValueError(
                f"image: expected [*, {', '.join(map(str, self.in_shape))}] ({self.layout}), received "
                f"{list(image.shape)}. Remedy: in_shape and layout of the env's images."
            )
        rows = image.reshape(-1, *self.in_shape)
        if self.layout == "HWC":
            rows = rows.movedim(-1, -3)
        if rows.dtype == torch.uint8:
            rows = rows.to(torch.float32) / 255.0
        dtype = next(self.convolutions.parameters()).dtype
        if rows.dtype != dtype and not torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(dtype)
        if self.channels_last:
            rows = rows.contiguous(memory_format=torch.channels_last)
        with autocast(self.precision, rows.device):
            maps = self.convolutions(rows).flatten(1)
            features = maps if self.linear is None else self.linear(maps).relu()
        return features.to(dtype).view(*image.shape[:-3], self.out_features)


def _mapped(side: int, layer: ConvLayer, in_shape: Sequence[int]) -> int:
    """Height or width of the map that a layer makes of one of ``side`` pixels."""
    if min(layer.channels, layer.kernel, layer.stride) < 1 or layer.padding < 0:
        raise ValueError(f"layers: expected sizes of at least 1, received {layer}.")
    mapped = (side + 2 * layer.padding - layer.kernel) // layer.stride + 1
    if mapped < 1:
        raise ValueError(
            f"layers: expected an image that is large enough, received in_shape {list(in_shape)}, of which {side} "
            f"pixels reach {layer}. Remedy: fewer layers, or smaller kernels and strides."
        )
    return mapped
