"""What every recurrent core has in common: layers, and dropout between them."""

import abc

import torch
from torch import Tensor, nn

__all__ = ["MemoryCore", "check_bias"]

States = tuple[Tensor, ...]


class MemoryCore(nn.Module, abc.ABC):
    """Layers of one kind of cell, as functions of tensors.

    Dimension key: ``L`` layers, ``H`` hidden units, ``S`` numbers of a state.

    Args:
        input_size: I, size of the last dim of the input.
        hidden_size: H, size of the output.
        num_layers: L; each layer reads the output of the one before.
        dropout: chance that an output of a layer but the last is set to 0 in training.
        state_sizes: S of each state of a layer.

    Raises:
        ValueError: for a size or a number of layers below 1, or a chance outside of [0, 1).
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int, dropout: float, state_sizes: tuple[int, ...]
    ) -> None:
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, received {size!r}. Remedy: {name}=1.")
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise ValueError(f"dropout: expected a chance in [0, 1), received {dropout!r}. Remedy: dropout=0.")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.dropout, self.state_sizes = dropout, state_sizes

    @abc.abstractmethod
    def layer_step(self, layer: int, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One step of one layer: output ``[N, H]`` and states ``[N, S]``, of an input ``[N, *]`` and states."""

    @abc.abstractmethod
    def layer_sequence(self, layer: int, x: Tensor, states: States, begins: Tensor) -> tuple[Tensor, States]:
        """All steps of one layer: output ``[N, T, H]`` and states ``[N, T, S]``, of an input ``[N, T, *]``.

        Args:
            layer: from 0 on.
            x: input.
            states: before the first step, each ``[N, S]``.
            begins: bool ``[N, T]``; the states are 0 before a step that begins an episode.
        """

    @property
    @abc.abstractmethod
    def weight(self) -> Tensor:
        """A parameter, or what a functional call has put in its place.

        It is asked for by its name: neither ``parameters()`` finds what a functional call puts there, nor does the
        tracer of torch 2.11 look through a module's ``__dict__``.
        """

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters, and of the states."""
        return self.weight.dtype

    def step(self, x: Tensor, states: States) -> tuple[Tensor, States]:
        """One step: output ``[N, H]`` and states ``[N, L, S]``, of an input ``[N, I]`` and states ``[N, L, S]``."""
        found: list[States] = []
        for layer in range(self.num_layers):
            x = self._dropped(x) if layer else x
            x, after = self.layer_step(layer, x, tuple(state[:, layer] for state in states))
            found.append(after)
        return x, _by_layer(found, 1)

    def sequence(self, x: Tensor, states: States, begins: Tensor) -> tuple[Tensor, States]:
        """All steps: output ``[N, T, H]`` and the states after each step ``[N, T, L, S]``.

        Args:
            x: ``[N, T, I]``.
            states: before the first step, each ``[N, L, S]``.
            begins: bool ``[N, T]``, True where an episode begins.
        """
        found: list[States] = []
        for layer in range(self.num_layers):
            x = self._dropped(x) if layer else x
            x, after = self.layer_sequence(layer, x, tuple(state[:, layer] for state in states), begins)
            found.append(after)
        return x, _by_layer(found, 2)

    def _dropped(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout, self.training) if self.dropout else x

    def extra_repr(self) -> str:
        """Sizes, as torch's recurrent modules print them."""
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"


def check_bias(bias: bool) -> None:
    """Refuse what is no truth value: ``bias="no"`` would be one."""
    if not isinstance(bias, bool):
        raise ValueError(f"bias: expected True or False, received {bias!r}. Remedy: bias=True.")


def _by_layer(found: list[States], dim: int) -> States:
    """Each state of all layers in one tensor; those of one layer are not copied."""
    parts = zip(*found, strict=True)
    return tuple(each[0].unsqueeze(dim) if len(each) == 1 else torch.stack(each, dim) for each in parts)
