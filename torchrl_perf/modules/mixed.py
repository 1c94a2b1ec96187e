"""Layers one after the other, the hidden ones in 16 bits."""

import torch
from torch import Tensor, nn

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
    Parameters, names and ``state_dict`` are those of ``nn.Sequential``; so is everything for ``"tf32"`` and ``"ieee"``.

    Args:
        *layers: the modules.
        precision: ``"tf32"``, ``"bf16"``, ``"fp16"`` or ``"ieee"``.

    Raises:
        ValueError: for an unknown precision.
    """

    def __init__(self, *layers: nn.Module, precision: str = "tf32") -> None:
        super().__init__(*layers)
        self.precision = check_precision(precision)
        linear = [number for number, layer in enumerate(layers) if isinstance(layer, nn.Linear | NoisyLinear)]
        self._first_float32 = linear[-1] if linear else len(layers)

    def forward(self, input: Tensor) -> Tensor:
        """``[*, IN]`` -> the output of the last layer, in the dtype of its parameters."""
        if self.precision not in ("bf16", "fp16"):
            return super().forward(input)
        layers = list(self)
        with autocast(self.precision, input.device):
            for layer in layers[: self._first_float32]:
                input = layer(input)
        with torch.autocast(input.device.type, enabled=False):
            input = _as_parameters(layers, self._first_float32, input)
            for layer in layers[self._first_float32 :]:
                input = layer(input)
        return input


def _as_parameters(layers: list[nn.Module], number: int, value: Tensor) -> Tensor:
    """The input of a layer in the dtype of its parameters, which may differ in a network that was converted."""
    parameter = next(layers[number].parameters(), None) if number < len(layers) else None
    return widened(value) if parameter is None else value.to(parameter.dtype)
