"""The cores whose state is a linear recurrence: minGRU and the linear recurrent unit."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrl_perf.functional.memory.linear import (
    lru_sequence,
    lru_step,
    min_gru_cell,
    min_gru_sequence,
    min_gru_step,
)
from torchrl_perf.functional.memory.min_gru_layer import min_gru_layer
from torchrl_perf.modules.memory.core import MemoryCore, States, check_bias
from torchrl_perf.runtime.upstream.modules import is_changed

__all__ = ["LRUCore", "MinGRUCore"]


LASTING = (2.0, 10_000.0)
"""Steps in which a unit's state decays by a factor e, at first: from the fastest to the slowest."""
SPREAD = 8.0
"""Standard deviation of a minGRU gate before the logistic function at first, of inputs of size 1."""
ANGLES = (0.003, 0.3)
"""Radians by which a state turns in a step, at first."""


def _between(low: float, high: float, size: int, **place: Any) -> Tensor:
    """Logarithms of numbers that are as likely in one octave as in the next, ``[size]``."""
    return torch.rand(size, **place) * math.log(high / low) + math.log(low)


class MinGRUCore(MemoryCore):
    """Layers of minGRU, each one linear map to gate and candidate, and a scan.

    The gates' biases are drawn so that states last from 2 to 10,000 steps where nothing opens a gate, each octave as
    likely (arXiv:1804.11188 draws such times evenly). Their weights are large, so that what opens one gate shuts
    another: some units take in a sign and let a thousand steps pass that they do not take in. Of gates that are all
    alike, as those of the usual first values, nothing is left of a sign after a hundred steps, and no gradient of it.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L.
        bias: of the linear maps.
        dropout: between layers.
        place: device and dtype of the parameters.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int, bias: bool, dropout: float, **place: Any
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, dropout, (hidden_size,))
        check_bias(bias)
        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        self.inputs = nn.ModuleList(nn.Linear(size, 2 * hidden_size, bias, **place) for size in sizes)
        for layer in self.inputs:
            self._open_apart(cast("nn.Linear", layer))

    @torch.no_grad()
    def _open_apart(self, layer: nn.Linear) -> None:
        """Draw weights and biases of the gates."""
        layer.weight[: self.hidden_size].normal_(std=SPREAD * layer.in_features**-0.5)
        if layer.bias is not None:
            lasting = _between(*LASTING, self.hidden_size, device=layer.bias.device, dtype=layer.bias.dtype).exp()
            layer.bias[: self.hidden_size] = -(lasting - 1).log()

    @property
    def weight(self) -> Tensor:
        """That of the first linear map, or of a layer in what stands in its place."""
        for part in self.inputs[0].modules():
            weight = getattr(part, "weight", None)
            if isinstance(weight, Tensor):
                return weight
        raise ValueError(
            f"inputs.0: expected a module with a weight, received {type(self.inputs[0]).__name__}. Remedy: a linear "
            f"layer [{self.input_size}] -> [{2 * self.hidden_size}]."
        )

    def layer_step(self, layer: int, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One step of one layer: its output and states."""
        of = self.inputs[layer]
        plain = _is_plain(of)
        state = min_gru_cell(x, states[0], of.weight, of.bias) if plain else min_gru_step(of(x), states[0])
        return state, (state,)

    def layer_sequence(self, layer: int, x: Tensor, states: States, begins: Tensor) -> tuple[Tensor, States]:
        """All steps of one layer: outputs and states."""
        of, state = self.inputs[layer], states[0]
        if _is_plain(of):
            after = min_gru_layer(x, state, begins, of.weight, of.bias)
        else:
            after = min_gru_sequence(of(x), state, begins)
        return after, (after,)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is what its parameters say: one with hooks, or another module in its place, is called."""
    return type(layer) is nn.Linear and not is_changed(layer)


class _LRULayer(nn.Module):
    """Parameters of one block: ``y = x + GLU(C s + D norm(x))`` with ``s' = diag(lambda) s + gamma B norm(x)``."""

    def __init__(self, size: int, **place: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size, **place)
        self.into = nn.Linear(size, 2 * size, bias=False, **place)
        self.out = nn.Linear(2 * size, size, bias=False, **place)
        self.skip = nn.Parameter(torch.randn(size, **place))
        self.gate = nn.Linear(size, 2 * size, **place)
        # slow and fast units alike: a ring of moduli as in the paper leaves none that last a thousand steps
        self.log_decay = nn.Parameter(-_between(*LASTING, size, **place))
        self.log_angle = nn.Parameter(_between(*ANGLES, size, **place))
        for layer, fan in ((self.into, 2 * size), (self.out, size)):
            nn.init.normal_(layer.weight, std=fan**-0.5)

    def driven(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The normed input, real and imaginary part of ``gamma B x``, decay and angle."""
        normed = self.norm(x)
        decay, angle = torch.exp(-torch.exp(self.log_decay)), torch.exp(self.log_angle)
        # |1 - lambda|: what does not change leads to states of its own size, however slow they are
        gamma = ((1 - decay) ** 2 + 4 * decay * (angle / 2).sin() ** 2).sqrt()
        real, imaginary = (self.into(normed).to(decay.dtype).unflatten(-1, (2, -1)) * gamma).unbind(-2)
        return normed, real, imaginary, decay, angle

    def read(self, x: Tensor, normed: Tensor, state: Tensor) -> Tensor:
        """The output of the block."""
        return x + nn.functional.glu(self.gate(nn.functional.gelu(self.out(state) + self.skip * normed)), -1)


class LRUCore(MemoryCore):
    """Blocks of linear recurrent units: layer norm, the unit, a gated linear unit, and a skip connection.

    A state is the real and the imaginary part of H complex numbers, S = 2 H.

    Args:
        input_size: I; a linear map takes it to H.
        hidden_size: H.
        num_layers: L.
        dropout: between layers.
        place: device and dtype of the parameters.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int, dropout: float, **place: Any) -> None:
        super().__init__(input_size, hidden_size, num_layers, dropout, (2 * hidden_size,))
        self.encoder = nn.Linear(input_size, hidden_size, **place)
        self.layers = nn.ModuleList(_LRULayer(hidden_size, **place) for _ in range(num_layers))

    @property
    def weight(self) -> Tensor:
        """That of the first layer's skip connection."""
        return cast("Tensor", self.layers[0].skip)

    def layer_step(self, layer: int, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One step of one layer: its output and states."""
        block = self.layers[layer]
        x = x if layer else self.encoder(x)
        normed, real, imaginary, decay, angle = block.driven(x)
        state = lru_step(real, imaginary, states[0], decay, angle)
        return block.read(x, normed, state), (state,)

    def layer_sequence(self, layer: int, x: Tensor, states: States, begins: Tensor) -> tuple[Tensor, States]:
        """All steps of one layer: outputs and states."""
        block = self.layers[layer]
        x = x if layer else self.encoder(x)
        normed, real, imaginary, decay, angle = block.driven(x)
        after = lru_sequence(real, imaginary, states[0], begins, decay, angle)
        return block.read(x, normed, after), (after,)
