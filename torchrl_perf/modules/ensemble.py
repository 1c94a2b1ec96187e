"""K multilayer perceptrons of one shape that run as one chain of batched matrix products."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.chain import ACTIVATIONS
from torchrl_perf.modules.aligned import aligned_affine
from torchrl_perf.modules.mixed import check_precision
from torchrl_perf.runtime.precision import autocast


class EnsembleMLP(nn.Module):
    """K independent perceptrons, ``linear, activation, ..., linear``, as batched matrix products.

    Parameters: ``weights[i] [K, IN_i, OUT_i]`` and ``biases[i] [K, 1, OUT_i]``, each member initialised independently
    as in ``nn.Linear`` (uniform within ``1 / sqrt(IN_i)``). The output of member k is that of an ``nn.Sequential`` with
    the weights ``weights[i][k].T`` and biases ``biases[i][k, 0]``.

    Args:
        num_members: K.
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output.
        hidden_sizes: widths of the hidden layers.
        activation: one of :data:`~torchrl_perf.functional.chain.ACTIVATIONS`.
        precision: of the matrix products of the hidden layers: ``"bf16"`` and ``"fp16"`` round the operands, ``"tf32"``
            and ``"ieee"`` leave them alone. The last layer and the output are float32.
        device: of the parameters.
        layer_norm: normalise the units of each hidden layer before its activation, with ``gains[i]`` and ``shifts[i]``,
            ``[K, 1, OUT_i]``.

    Raises:
        ValueError: for sizes below 1, an unknown activation or precision.
    """

    def __init__(
        self,
        num_members: int,
        in_features: int,
        out_features: int,
        *,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "relu",
        precision: str = "tf32",
        device: torch.device | str | None = None,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation: expected one of {sorted(ACTIVATIONS)}, received {activation!r}. Remedy: one of these."
            )
        sizes = [in_features, *hidden_sizes, out_features]
        if min(num_members, *sizes) < 1:
            raise ValueError(
                f"num_members and sizes: expected at least 1, received {num_members} and {sizes}. Remedy: sizes of 1 "
                "or more."
            )
        self.num_members = num_members
        self.activation = activation
        self.precision = check_precision(precision)
        pairs = list(itertools.pairwise(sizes))
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.empty(num_members, rows, columns, device=device)) for rows, columns in pairs]
        )
        self.biases = nn.ParameterList(
            [nn.Parameter(torch.empty(num_members, 1, columns, device=device)) for _, columns in pairs]
        )
        self.layer_norm = layer_norm
        if layer_norm:
            ones = [torch.ones(num_members, 1, width, device=device) for width in hidden_sizes]
            self.gains = nn.ParameterList([nn.Parameter(each) for each in ones])
            self.shifts = nn.ParameterList([nn.Parameter(torch.zeros_like(each)) for each in ones])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all members anew."""
        with torch.no_grad():
            for gain, shift in zip(self.gains, self.shifts, strict=True) if self.layer_norm else ():
                gain.fill_(1.0)
                shift.zero_()
            for weight, bias in zip(self.weights, self.biases, strict=True):
                bound = 1 / math.sqrt(weight.shape[1])
                weight.uniform_(-bound, bound)
                bias.uniform_(-bound, bound)

    def forward(self, x: Tensor, *, per_member: bool = False) -> Tensor:
        """``[*, IN]``, seen by all members, -> ``[K, *, OUT]``.

        Args:
            x: ``[*, IN]``; with ``per_member`` ``[K, *, IN]``.
            per_member: whether ``x`` holds a separate input for each member.

        Raises:
            ValueError: with ``per_member``, for a first dim that is not K.
        """
        if per_member and (x.ndim < 2 or x.shape[0] != self.num_members):
            raise ValueError(
                f"x: expected [K, *, IN] with K = {self.num_members}, received {list(x.shape)}. Remedy: x.expand(K, "
                "...) for one input to all members."
            )
        batch = x.shape[1:-1] if per_member else x.shape[:-1]
        if per_member:
            hidden = x.reshape(self.num_members, -1, x.shape[-1])
        else:
            hidden = x.reshape(-1, x.shape[-1]).expand(self.num_members, -1, -1)
        product = _compiled_layer if torch.compiler.is_compiling() else _layer
        *layers, last = zip(self.weights, self.biases, strict=True)
        with autocast(self.precision, x.device):
            for number, layer in enumerate(layers):
                units = product(hidden, *layer)
                hidden = ACTIVATIONS[self.activation](self._normalized(units, number) if self.layer_norm else units)
        if self.precision in ("bf16", "fp16"):
            with torch.autocast(x.device.type, enabled=False):
                hidden = product(hidden.to(last[0].dtype), *last)
        else:
            hidden = product(hidden, *last)
        return hidden.view(self.num_members, *batch, hidden.shape[-1])

    def _normalized(self, units: Tensor, number: int) -> Tensor:
        """The units ``[K, B, H]`` of a layer after layer norm, each member's with its own gains and shifts."""
        plain = nn.functional.layer_norm(units, units.shape[-1:])
        return plain * self.gains[number] + self.shifts[number]

    def extra_repr(self) -> str:
        """Sizes and activation."""
        sizes = [self.weights[0].shape[1], *(weight.shape[2] for weight in self.weights)]
        return f"{self.num_members} x {sizes}, activation={self.activation}"


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias, x, weight)


def _compiled_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A layer in a form for compilers, which fuse all but the matrix products into the kernels around them.

    One output is a sum that needs no matrix product, forward or backward. ``baddbmm`` would copy the bias to the output
    first.
    """
    if weight.shape[-1] == 1:
        return (x * weight.transpose(1, 2)).sum(-1, keepdim=True) + bias
    return aligned_affine(x, weight, bias)


class EnsembleQ(nn.Module):
    """K action values ``Q_k(s, a)``: an :class:`EnsembleMLP` on the concatenation of its inputs.

    It is called with tensors, or with a TensorDict as a module of TorchRL: then it reads ``in_keys`` and writes
    ``out_keys``, ``[*, K]``. With K = 1 it is a Q network of TorchRL's losses; :meth:`critics` gives the K networks of
    an ensemble as the list of critics that these take.

    Args:
        num_members: K.
        in_features: size of observations and action together.
        hidden_sizes: widths of the hidden layers.
        activation: as for :class:`EnsembleMLP`.
        precision: as for :class:`EnsembleMLP`.
        device: of the parameters.
        in_keys: what is read from a TensorDict, in this order; "observation" and "action" by default.
        out_keys: the key that is written; "state_action_value" by default.
        layer_norm: as for :class:`EnsembleMLP`.

    Raises:
        ValueError: as :class:`EnsembleMLP`, and for another number of out_keys than one.
    """

    def __init__(
        self,
        num_members: int,
        in_features: int,
        *,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "relu",
        precision: str = "tf32",
        device: torch.device | str | None = None,
        in_keys: Sequence[NestedKey] = ("observation", "action"),
        out_keys: Sequence[NestedKey] = ("state_action_value",),
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        if len(out_keys) != 1:
            raise ValueError(f"out_keys: expected one key, received {list(out_keys)}. Remedy: out_keys of one key.")
        self.in_keys, self.out_keys = list(in_keys), list(out_keys)
        options = {"hidden_sizes": hidden_sizes, "activation": activation, "precision": precision}
        self._options: dict[str, Any] = {**options, "layer_norm": layer_norm}
        self.net = EnsembleMLP(num_members, in_features, 1, device=device, **self._options)

    def forward(self, *inputs: Tensor | TensorDictBase) -> Any:
        """Observations ``[*, O]`` and action ``[*, D]`` -> ``[*, K]``, a view with the members outermost in memory.

        Called with one TensorDict, it returns that TensorDict with the values written.
        """
        if len(inputs) == 1 and isinstance(inputs[0], TensorDictBase):
            tensordict = inputs[0]
            return tensordict.set(self.out_keys[0], self._values([tensordict.get(key) for key in self.in_keys]))
        return self._values(cast("Sequence[Tensor]", inputs))

    def _values(self, inputs: Sequence[Tensor]) -> Tensor:
        return self.net(torch.cat(list(inputs), -1)).squeeze(-1).movedim(0, -1)

    def critics(self) -> "list[EnsembleQ]":
        """K ensembles of one, with copies of the members' parameters: the ``qvalue_network`` of TorchRL's losses."""
        keys: dict[str, Any] = {"in_keys": self.in_keys, "out_keys": self.out_keys}
        weights, shared = list(self.net.weights), list(self.net.parameters())
        found = []
        for k in range(self.net.num_members):
            one = EnsembleQ(1, weights[0].shape[1], device=weights[0].device, **self._options, **keys)
            one.to(weights[0].dtype)
            with torch.no_grad():
                for mine, theirs in zip(one.net.parameters(), shared, strict=True):
                    mine.copy_(theirs[k : k + 1])
            found.append(one)
        return found
