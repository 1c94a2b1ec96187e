"""Multilayer perceptrons, whose layers run as one kernel where possible."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchrl_perf.functional.mlp import fusable, fused_mlp
from torchrl_perf.modules.chains import find
from torchrl_perf.modules.mixed import MixedSequential

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "mish": nn.Mish,
    "leaky_relu": nn.LeakyReLU,
}
"""Layers by the names of activations."""
SMALL = ("tanh", "relu")  # activations of the kernel of small networks
LAYERS = 5  # of them: three linear ones, and activations between


def hidden_layers(
    sizes: Sequence[int],
    activation: str,
    *,
    layer_norm: bool = False,
    linear: Callable[..., nn.Module] = nn.Linear,
    device: torch.device | str | None = None,
) -> list[nn.Module]:
    """Linear layers of these sizes, each with its activation, and with layer norm between the two where it is asked.

    Args:
        sizes: of the input and of each hidden layer.
        activation: one of :data:`ACTIVATIONS`.
        layer_norm: normalise the units of a layer before its activation.
        linear: makes a layer.
        device: of the parameters.

    Raises:
        ValueError: for an unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation: expected one of {sorted(ACTIVATIONS)}, received {activation!r}. Remedy: one of these."
        )
    layers: list[nn.Module] = []
    for rows, columns in itertools.pairwise(sizes):
        layers.append(linear(rows, columns, device=device))
        layers += [nn.LayerNorm(columns, device=device)] if layer_norm else []
        layers.append(ACTIVATIONS[activation]())
    return layers


class FusedMLP(MixedSequential):
    """Linear layers with an activation between each two: an ``nn.Sequential`` that runs as one Triton kernel on CUDA.

    The layers, their names and the ``state_dict`` are those of the plain ``nn.Sequential``; only the execution differs.
    Two hidden layers of one width, 32, 64 or 128, with ``"tanh"`` or ``"relu"``, at most 128 inputs and 64 outputs, and
    no gradient for the input run as :func:`~torchrl_perf.functional.mlp.fused_mlp`, and all others with a hidden layer
    as :func:`~torchrl_perf.functional.chain.fused_chain`. Other dtypes than float32, ``"ieee"`` beyond the first kind,
    a linear map alone, any CPU input, and calls inside of a transform of ``torch.func`` run layer by layer.

    Args:
        in_features: O, size of the last dim of the input.
        out_features: size of the last dim of the output.
        hidden_size: width of both hidden layers.
        activation: one of :data:`ACTIVATIONS`.
        output_gain: gain of the orthogonal initialisation of the last layer (hidden layers: sqrt(2), biases 0), as PPO
            is usually initialised (arXiv:2005.12729).
        precision: of the matrix products: ``"tf32"``, ``"bf16"``, ``"fp16"`` or ``"ieee"``; the output is float32.
            Layer by layer it is that of :class:`MixedSequential`.
        device: of the parameters.
        hidden_sizes: widths of any number of hidden layers, in place of two of ``hidden_size``; none for a linear map.
        layer_norm: normalise the units of each hidden layer before its activation.

    Attributes:
        fuses: whether the kernel runs where there is one, as it does by default; False runs layer by layer, which
            starts sooner: Triton compiles each direction for some sizes of batch anew, about a second each.

    Raises:
        ValueError: for an unknown activation or precision.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        hidden_size: int = 64,
        activation: str = "tanh",
        output_gain: float = 1.0,
        precision: str = "tf32",
        device: torch.device | str | None = None,
        hidden_sizes: Sequence[int] | None = None,
        layer_norm: bool = False,
    ) -> None:
        sizes = [in_features, *((hidden_size, hidden_size) if hidden_sizes is None else hidden_sizes)]
        hidden = hidden_layers(sizes, activation, layer_norm=layer_norm, device=device)
        super().__init__(*hidden, nn.Linear(sizes[-1], out_features, device=device), precision=precision)
        *linear, last = [layer for layer in self if isinstance(layer, nn.Linear)]
        for layer, gain in (*((each, 2**0.5) for each in linear), (last, output_gain)):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        self.activation = activation
        self._is_small = len(linear) == 2 and not layer_norm and activation in SMALL

    def forward(self, x: Tensor) -> Tensor:
        """``[*, O]`` -> ``[*, out_features]``."""
        if not (self._is_small and self.fuses and x.is_cuda):
            return super().forward(x)
        found = find(self)  # layers may have been replaced since, or have hooks
        chain = found.chain
        if chain is None or len(found.layers) != LAYERS or (chain.start, chain.stop, chain.eps) != (0, LAYERS, 0.0):
            return super().forward(x)
        params = found.params()
        if chain.activation not in SMALL or not fusable(x, params):
            return super().forward(x)
        rows = fused_mlp(x.reshape(-1, x.shape[-1]), params, chain.activation, self.precision)
        return rows.view(*x.shape[:-1], rows.shape[-1])
