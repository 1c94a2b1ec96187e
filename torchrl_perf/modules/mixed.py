"""Layers one after the other, the hidden ones in 16 bits."""

import torch
from torch import Tensor, nn

from torchrl_perf.modules.chains import find, run_chain
from torchrl_perf.modules.noisy import NoisyLinear
from torchrl_perf.runtime.precision import PRECISIONS, autocast, widened


def check_precision(precision: str) -> str:
    """Returns a name that is one of the precisions.

    Raises:
        ValueError: for another one.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected one of {PRECISIONS}, received {precision!r}. Remedy: one of these.")
    return precision


class MixedSequential(nn.Sequential):
    """``nn.Sequential`` whose hidden layers run in ``precision`` and whose last linear (or noisy) layer is in float32.

    With ``"bf16"`` and ``"fp16"`` the layers before the last linear one run under autocast. The last layer and those
    after it cost little in float32, and values of 16 bits would be coarse: the neighbours of 1,000 are 996 and 1,004.
    Parameters, names and ``state_dict`` are those of ``nn.Sequential``. On CUDA linear layers with one activation
    between each two run as one kernel, :func:`~torchrl_perf.functional.chain.fused_chain`, in ``precision`` and with a
    float32 output. For ``"ieee"``, in other dtypes than float32, and inside of a transform of ``torch.func`` all run
    layer by layer.

    Args:
        *layers: the modules.
        precision: ``"tf32"``, ``"bf16"``, ``"fp16"`` or ``"ieee"``.

    Attributes:
        fuses: whether kernels run where there are some, as they do by default; False runs layer by layer, which starts
            sooner: Triton compiles each direction for some sizes of batch anew, about a second each.

    Raises:
        ValueError: for an unknown precision.
    """

    def __init__(self, *layers: nn.Module, precision: str = "tf32") -> None:
        super().__init__(*layers)
        self.precision = check_precision(precision)
        linear = [number for number, layer in enumerate(layers) if isinstance(layer, nn.Linear | NoisyLinear)]
        self._first_float32 = linear[-1] if linear else len(layers)
        self.fuses = True

    def forward(self, input: Tensor) -> Tensor:
        """``[*, IN]`` -> the output of the last layer, in the dtype of its parameters."""
        found = find(self) if self.fuses and input.is_cuda else None
        if found is not None and found.chain is not None:
            layers, chain = found.layers, found.chain
            before = self._layers(layers, 0, chain.start, input)
            y = run_chain(found, before, self.precision)
            if y is not None:
                return self._layers(layers, chain.stop, len(layers), y)
        layers = list(self)
        return self._layers(layers, 0, len(layers), input)

    def _layers(self, layers: list[nn.Module], start: int, stop: int, value: Tensor) -> Tensor:
        """Some of the layers, one after the other."""
        if self.precision not in ("bf16", "fp16"):
            for layer in layers[start:stop]:
                value = layer(value)
            return value
        middle = min(max(self._first_float32, start), stop)
        with autocast(self.precision, value.device):
            for layer in layers[start:middle]:
                value = layer(value)
        if middle == stop < len(layers):
            return value
        with torch.autocast(value.device.type, enabled=False):
            value = _as_parameters(layers, middle, value)
            for layer in layers[middle:stop]:
                value = layer(value)
        return value


def _as_parameters(layers: list[nn.Module], number: int, value: Tensor) -> Tensor:
    """The input of a layer in the dtype of its parameters, which may differ in a network that was converted."""
    parameter = next(layers[number].parameters(), None) if number < len(layers) else None
    return widened(value) if parameter is None else value.to(parameter.dtype)
