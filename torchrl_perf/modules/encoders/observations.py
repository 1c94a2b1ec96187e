"""Features of observations that are more than one vector: images, choices, and numbers of any shape."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchrl_perf.functional.wide import widened
from torchrl_perf.modules.encoders.cnn import NATURE_LAYERS, ConvLayer, ConvNet, Layout

__all__ = ["ConvolutionKind", "EncodedCritic", "EncodedInputs", "ObservationEncoder", "ObservationPart"]

SMALL_LAYERS = (ConvLayer(32, 3, 2, 1), ConvLayer(64, 3, 2, 1), ConvLayer(64, 3, 1, 1))
NATURE_SIDE = 36  # pixels, the least of which the layers of the DQN of 2015 leave anything
FEATURES = {"nature": 512, "small": 128}
LAYERS = {"nature": NATURE_LAYERS, "small": SMALL_LAYERS}
ConvolutionKind = Literal["auto", "nature", "small"]


class ObservationPart(NamedTuple):
    """One entry of an observation."""

    kind: Literal["numbers", "image", "choices"]
    """Numbers of any shape; an image; indices, each of which becomes one-hot."""
    shape: tuple[int, ...]
    """Of one observation."""
    choices: tuple[int, ...] = ()
    """Alternatives of each index."""
    conv_layers: ConvolutionKind = "auto"
    """Convolutions of an image; "auto" chooses by its size."""
    conv_features: int | None = None
    """Numbers that an image becomes; None is what its convolutions usually end in."""

    @property
    def features(self) -> int:
        """Numbers that the entry becomes."""
        if self.kind == "image":
            return self.conv_features or FEATURES[self._layers]
        return sum(self.choices) if self.kind == "choices" else math.prod(self.shape)

    @property
    def layout(self) -> Layout:
        """The order of an image's dims: the channels are the smaller of the first and the last."""
        return "HWC" if len(self.shape) == 3 and self.shape[-1] < self.shape[0] else "CHW"

    @property
    def image_shape(self) -> tuple[int, ...]:
        """With a dim of channels."""
        return self.shape if len(self.shape) == 3 else (1, *self.shape)

    @property
    def _is_large(self) -> bool:
        height, width = self.image_shape[1:] if self.layout == "CHW" else self.image_shape[:2]
        return min(height, width) >= NATURE_SIDE

    @property
    def _layers(self) -> str:
        if self.conv_layers != "auto":
            return self.conv_layers
        return "nature" if self._is_large else "small"

    def convolutions(self, precision: str, device: torch.device | str | None) -> ConvNet:
        """The network of an image: the DQN's of 2015, or three layers of 3 x 3 for fewer than 36 pixels.

        Raises:
            ValueError: for "nature" where the image has fewer.
        """
        if self._layers == "nature" and not self._is_large:
            raise ValueError(
                f"conv_layers: expected images of at least {NATURE_SIDE} x {NATURE_SIDE} pixels for 'nature', received "
                f"{list(self.shape)}. Remedy: conv_layers='small', or 'auto'."
            )
        layers = LAYERS[self._layers]
        options = {"layers": layers, "out_features": self.features, "precision": precision, "device": device}
        return ConvNet(self.image_shape, layout=self.layout, **options)


class ObservationEncoder(nn.Module):
    """The features of all parts of an observation, one after the other.

    Images go through convolutions of their own, bytes of other shapes are divided by 255, indices become one-hot, and
    everything else is flattened.

    Args:
        parts: of the observation, in the order of the inputs.
        precision: of the convolutions.
        device: of the parameters.

    Attributes:
        out_features: F.
    """

    def __init__(
        self,
        parts: Sequence[ObservationPart],
        *,
        precision: str = "tf32",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.out_features = sum(part.features for part in self.parts)
        images = [(number, part) for number, part in enumerate(self.parts) if part.kind == "image"]
        self.images = nn.ModuleDict({str(number): part.convolutions(precision, device) for number, part in images})

    def forward(self, *inputs: Tensor) -> Tensor:
        """Entries ``[*, *shape]`` -> ``[*, F]``."""
        found = [self._features(number, value) for number, value in enumerate(inputs)]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def _features(self, number: int, value: Tensor) -> Tensor:
        part = self.parts[number]
        if part.kind == "image":
            image = value if len(part.shape) == 3 else value.unsqueeze(-3)
            return cast("ConvNet", self.images[str(number)])(image)
        if part.kind == "choices":
            values = value.unsqueeze(-1) if not part.shape else value.flatten(-len(part.shape))
            columns = [_one_hot(values[..., place], size) for place, size in enumerate(part.choices)]
            return torch.cat(columns, -1)
        flat = value.unsqueeze(-1) if not part.shape else value.flatten(-len(part.shape))
        return flat.to(torch.float32) / 255.0 if flat.dtype == torch.uint8 else _as_float(flat)


def _as_float(value: Tensor) -> Tensor:
    return widened(value) if value.dtype.is_floating_point else value.to(torch.float32)


def _one_hot(index: Tensor, size: int) -> Tensor:
    """``[*]`` int64 -> ``[*, size]`` float32; an index out of range is all 0. Never waits for the host."""
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).to(torch.float32)


class EncodedInputs(nn.Module):
    """A network of one vector that is called with the parts of an observation.

    Args:
        encoder: makes features ``[*, F]`` of the parts.
        network: maps ``[*, F]`` to anything.
    """

    def __init__(self, encoder: ObservationEncoder, network: nn.Module) -> None:
        super().__init__()
        self.encoder, self.network = encoder, network

    def forward(self, *inputs: Tensor) -> Tensor:
        """Entries ``[*, *shape]`` -> the network's output."""
        return self.network(self.encoder(*inputs))


class EncodedCritic(EncodedInputs):
    """:class:`EncodedInputs` whose network is called with features and an action, the last of the inputs."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Entries ``[*, *shape]`` and the action ``[*, D]`` -> the network's output."""
        *observations, action = inputs
        return self.network(self.encoder(*observations), action)
