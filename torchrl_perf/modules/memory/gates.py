"""The cores of GRU and LSTM, whose parameters have the names, shapes and first values of torch's."""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from torchrl_perf.functional.memory.gru import gru_cell, gru_sequence
from torchrl_perf.functional.memory.lstm import lstm_cell, lstm_sequence
from torchrl_perf.modules.memory.core import MemoryCore, States, check_bias
from torchrl_perf.runtime.upstream.tensors import is_transformed

__all__ = ["GRUCore", "GatedCore", "LSTMCore"]


class GatedCore(MemoryCore):
    """Parameters ``weight_ih_l0``, ``weight_hh_l0``, ``bias_ih_l0``, ``bias_hh_l0``, ... as ``nn.GRU`` has them.

    They are drawn in the order of torch's modules: after one seed both have equal weights. They are plain parameters,
    never views of one buffer, so that optimisers and functional calls may replace them.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L.
        bias: whether there are biases.
        dropout: between layers.
        place: device and dtype of the parameters.
    """

    num_gates: ClassVar[int]
    """Rows of a weight in units of H."""
    num_states: ClassVar[int]
    """States of a layer, each ``[N, H]``."""
    kind: ClassVar[type[nn.RNNBase]]
    """torch's module with the same parameters."""

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int, bias: bool, dropout: float, **place: Any
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, dropout, (hidden_size,) * self.num_states)
        check_bias(bias)
        self.bias = bias
        bound, rows = hidden_size**-0.5, self.num_gates * hidden_size
        for layer in range(num_layers):
            shapes = {"weight_ih": (rows, hidden_size if layer else input_size), "weight_hh": (rows, hidden_size)}
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if bias else {}
            for name, shape in shapes.items():
                value = torch.empty(shape, **place).uniform_(-bound, bound)
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(value))

    @property
    def weight(self) -> Tensor:
        """That of the inputs of the first layer."""
        return cast("Tensor", self.weight_ih_l0)

    @classmethod
    def of(cls, rnn: nn.RNNBase) -> "GatedCore":
        """A core with the parameters of one of torch's modules themselves, not copies.

        Raises:
            ValueError: for a module of another kind, one that reads backwards in time, or one with projections.
        """
        cls._check(rnn)
        core = cls(rnn.input_size, rnn.hidden_size, rnn.num_layers, rnn.bias, rnn.dropout, device="meta")
        for name, parameter in rnn.named_parameters():
            core.register_parameter(name, parameter)
        return core

    @torch.no_grad()
    def load_rnn(self, rnn: nn.RNNBase) -> None:
        """Copy the parameters of one of torch's modules.

        Raises:
            ValueError: for a module of another kind or of other sizes.
        """
        self._check(rnn)
        own, given = dict(self.named_parameters()), dict(rnn.named_parameters())
        expected, received = ({name: list(p.shape) for name, p in each.items()} for each in (own, given))
        if expected != received:
            raise ValueError(
                f"load_rnn: expected parameters {expected}, received {received}. Remedy: a module with equal "
                "input_size, hidden_size, num_layers and bias."
            )
        for name, parameter in own.items():
            parameter.copy_(given[name])

    @classmethod
    def _check(cls, rnn: nn.RNNBase) -> None:
        mode = cls.kind.__name__
        if not isinstance(rnn, nn.RNNBase) or rnn.mode != mode:
            raise ValueError(f"expected a torch.nn.{mode}, received {type(rnn).__name__}. Remedy: torch.nn.{mode}.")
        if rnn.bidirectional or rnn.proj_size:
            raise ValueError(
                f"expected a torch.nn.{mode} that reads forwards and has no projection, received bidirectional="
                f"{rnn.bidirectional}, proj_size={rnn.proj_size}. Remedy: False and 0; a policy cannot read the future."
            )

    def _parameters_of(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """``W_i``, ``W_h``, ``b_i`` and ``b_h`` of a layer."""
        weights = getattr(self, f"weight_ih_l{layer}"), getattr(self, f"weight_hh_l{layer}")
        if not self.bias:
            return *weights, None, None
        return *weights, getattr(self, f"bias_ih_l{layer}"), getattr(self, f"bias_hh_l{layer}")


def _inputs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What gates get of the inputs; the sequence finds the gradient of the bias, but in transforms of torch.func."""
    return nn.functional.linear(x, weight, bias if bias is None or is_transformed() else bias.detach())


class GRUCore(GatedCore):
    """``nn.GRU`` with resets."""

    num_gates = 3
    num_states = 1
    kind = nn.GRU

    def layer_step(self, layer: int, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One step of one layer: its output and states."""
        state = gru_cell(x, states[0], *self._parameters_of(layer))
        return state, (state,)

    def layer_sequence(self, layer: int, x: Tensor, states: States, begins: Tensor) -> tuple[Tensor, States]:
        """All steps of one layer: outputs and states."""
        weight_ih, weight, bias_ih, bias = self._parameters_of(layer)
        after = gru_sequence(_inputs(x, weight_ih, bias_ih), states[0], begins, weight, bias, bias_ih)
        return after, (after,)


class LSTMCore(GatedCore):
    """``nn.LSTM`` with resets."""

    num_gates = 4
    num_states = 2
    kind = nn.LSTM

    def layer_step(self, layer: int, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One step of one layer: its output and states."""
        state, cell = lstm_cell(x, *states, *self._parameters_of(layer))
        return state, (state, cell)

    def layer_sequence(self, layer: int, x: Tensor, states: States, begins: Tensor) -> tuple[Tensor, States]:
        """All steps of one layer: outputs and states."""
        weight_ih, weight, bias_ih, bias = self._parameters_of(layer)
        after, cells = lstm_sequence(_inputs(x, weight_ih, bias_ih), *states, begins, weight, bias, bias_ih)
        return after, (after, cells)
