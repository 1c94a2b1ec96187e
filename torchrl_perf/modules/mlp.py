"""Multilayer perceptron whose layers run as one kernel where possible."""

import torch
from torch import Tensor, nn

from torchrl_perf.functional.mlp import fusable, fused_mlp
from torchrl_perf.modules.mixed import MixedSequential

_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


class FusedMLP(MixedSequential):
    """Linear, activation, linear, activation, linear: an ``nn.Sequential`` that runs as one Triton kernel on CUDA.

    The layers, their names and the ``state_dict`` are those of the plain ``nn.Sequential``; only the execution differs.
    The fused path is taken for float32 CUDA inputs that need no gradient, ``hidden_size`` 32, 64 or 128, at
    most 128 inputs and 64 outputs; anything else, and any CPU input, runs layer by layer.

    Args:
        in_features: O, size of the last dim of the input.
        out_features: size of the last dim of the output.
        hidden_size: width of both hidden layers.
        activation: ``"tanh"`` or ``"relu"``.
        output_gain: gain of the orthogonal initialisation of the last layer (hidden layers: sqrt(2), biases 0), as PPO
            is usually initialised (arXiv:2005.12729).
        precision: of the matrix products: ``"tf32"``, ``"bf16"``, ``"fp16"`` or ``"ieee"``; the output is float32.
            Layer by layer it is that of :class:`MixedSequential`.
        device: of the parameters.

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
    ) -> None:
        if activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation: expected one of {sorted(_ACTIVATIONS)}, received {activation!r}. Remedy: one of these."
            )
        act = _ACTIVATIONS[activation]
        super().__init__(
            nn.Linear(in_features, hidden_size, device=device),
            act(),
            nn.Linear(hidden_size, hidden_size, device=device),
            act(),
            nn.Linear(hidden_size, out_features, device=device),
            precision=precision,
        )
        for layer, gain in ((self[0], 2**0.5), (self[2], 2**0.5), (self[4], output_gain)):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        self.activation, self.fuses = activation, True

    def forward(self, x: Tensor) -> Tensor:
        """``[*, O]`` -> ``[*, out_features]``."""
        params = [self[0].weight, self[0].bias, self[2].weight, self[2].bias, self[4].weight, self[4].bias]
        if not (self.fuses and fusable(x, params)):
            return super().forward(x)
        rows = fused_mlp(x.reshape(-1, x.shape[-1]), params, self.activation, self.precision)
        return rows.view(*x.shape[:-1], rows.shape[-1])
