"""The layer below a memory, which makes a few observed numbers features."""

from typing import ClassVar, cast

from torch import Tensor, nn

from torchrl_perf.functional.narrow import narrow_layer, runs_as_narrow
from torchrl_perf.modules.chains import lone_layer
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.runtime.upstream.modules import child_dict

__all__ = ["NarrowEncoder"]


class NarrowEncoder(MixedSequential):
    """A :class:`MixedSequential` that is one launch on CUDA where it is a linear layer of few inputs, and activation.

    So it is with at most 16 inputs and 256 units, in float32, with an activation whose slope follows from its value,
    and where the input needs no gradient: see :func:`~torchrl_perf.functional.narrow.narrow_layer`. Everything else,
    layers with hooks among it, runs layer by layer.
    """

    name_in_checkpoints: ClassVar[str] = MixedSequential.__name__

    def forward(self, input: Tensor) -> Tensor:
        """``[*, I]`` -> ``[*, H]``."""
        layers = [layer for layer in child_dict(self).values() if layer is not None]
        activation = lone_layer(layers) if self.fuses and input.is_cuda else None
        if activation is not None:
            first = cast("nn.Linear", layers[0])
            if runs_as_narrow(input, first.weight, first.bias, activation):
                rows = input.reshape(-1, input.shape[-1])
                return narrow_layer(rows, first.weight, first.bias, activation).view(*input.shape[:-1], -1)
        return super().forward(input)
