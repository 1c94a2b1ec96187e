"""Perceptrons inside of any ``nn.Sequential``, found by their layers and run as one kernel."""

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchrl_perf.functional.chain import fused_chain, runs_as_chain
from torchrl_perf.modules.aligned import AlignedLinear
from torchrl_perf.runtime.precision import autocast, widened
from torchrl_perf.runtime.upstream.modules import has_hooks
from torchrl_perf.runtime.upstream.tensors import is_transformed

__all__ = ["Chain", "chain_of", "fuse_sequential", "lacks_kernel", "run_chain"]

_ACTIVATIONS: dict[type[nn.Module], tuple[str, Callable[[Any], bool]]] = {
    nn.Tanh: ("tanh", lambda layer: True),
    nn.ReLU: ("relu", lambda layer: True),
    nn.ELU: ("elu", lambda layer: layer.alpha == 1.0),
    nn.LeakyReLU: ("leaky_relu", lambda layer: layer.negative_slope == 0.01),
    nn.SiLU: ("silu", lambda layer: True),
    nn.GELU: ("gelu", lambda layer: layer.approximate == "none"),
    nn.Mish: ("mish", lambda layer: True),
}
"""Their names, and whether a layer is what the kernels compute: that of other constants is not."""


class Chain(NamedTuple):
    """Linear layers among others, with one activation between each two of them."""

    start: int
    """The first layer of it."""
    stop: int
    """One behind the last, which is linear."""
    activation: str
    eps: float
    """Of layer norm before the activations; 0 without it."""


def chain_of(layers: Sequence[nn.Module]) -> Chain | None:
    """The first run of at least two linear layers that a kernel takes together; None where there is none."""
    for start, layer in enumerate(layers):
        found = _chain_from(layers, start) if _is_linear(layer) else None
        if found is not None:
            return found
    return None


def _chain_from(layers: Sequence[nn.Module], start: int) -> Chain | None:
    found: Chain | None = None
    at = start + 1
    while True:
        eps = cast("nn.LayerNorm", layers[at]).eps if at < len(layers) and _is_norm(layers[at]) else 0.0
        after = at + (1 if eps else 0)
        if after + 1 >= len(layers) or not _is_linear(layers[after + 1]):
            return found
        name, is_known = _ACTIVATIONS.get(type(layers[after]), ("", bool))
        if not name or not is_known(layers[after]) or has_hooks(layers[after]):
            return found
        if found is not None and (found.activation, found.eps) != (name, eps):
            return found
        at = after + 2
        found = Chain(start, at, name, eps)


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) in (nn.Linear, AlignedLinear) and cast("Any", layer).bias is not None and not has_hooks(layer)


def _is_norm(layer: nn.Module) -> bool:
    """Whether it is a layer norm of one dim with gain and shift."""
    if type(layer) is not nn.LayerNorm or has_hooks(layer):
        return False
    return len(layer.normalized_shape) == 1 and layer.bias is not None and layer.eps > 0


def run_chain(layers: Sequence[nn.Module], chain: Chain, x: Tensor, precision: str) -> Tensor | None:
    """The layers of a chain as one kernel; None where it does not take them: see :func:`runs_as_chain`.

    Args:
        layers: of which the chain is a part.
        chain: what :func:`chain_of` found.
        x: ``[*, IN]``, the input of its first layer.
        precision: of the products; ``"ieee"`` is left to the layers.
    """
    if not x.is_cuda or precision == "ieee" or is_transformed():
        return None
    parts = [part for part in layers[chain.start : chain.stop] if isinstance(part, nn.Linear | nn.LayerNorm)]
    params = [tensor for part in parts for tensor in (part.weight, part.bias)]
    if not runs_as_chain(x, params, chain.eps):
        return None
    y = fused_chain(x.reshape(-1, x.shape[-1]), params, chain.activation, chain.eps, precision)
    return y.view(*x.shape[:-1], y.shape[-1])


def lacks_kernel(network: nn.Module) -> bool:
    """Whether a network is an ``nn.Sequential`` of several linear layers no two of which a kernel takes together."""
    if not isinstance(network, nn.Sequential):
        return False
    linear = [layer for layer in network if isinstance(layer, nn.Linear)]
    is_single = all(layer.weight.dtype == torch.float32 for layer in linear)
    return len(linear) > 1 and (not is_single or chain_of(list(network)) is None)


def fuse_sequential(network: nn.Module, precision: str) -> bool:
    """Makes an ``nn.Sequential`` run its perceptron as one kernel, where it has one; layers and state stay.

    Only its ``forward`` is changed, which copies keep.

    Args:
        network: changed in place.
        precision: of the products.

    Returns:
        Whether it was changed: a class of its own, and layers that no kernel takes, are left alone.
    """
    changed: Any = network
    if getattr(network, "chain_precision", None) is not None:
        return True
    if type(network) is not nn.Sequential or chain_of(list(network)) is None:
        return False
    changed.chain_precision, changed.layered, changed.fuses = precision, network.forward, True
    changed.forward = types.MethodType(_fused_forward, network)
    return True


def _fused_forward(self: Any, input: Tensor) -> Tensor:
    """``forward`` of a network that :func:`fuse_sequential` was given."""
    layers = list(self)
    chain = chain_of(layers) if self.fuses and input.is_cuda else None
    if chain is None:
        return self.layered(input)
    with autocast(self.chain_precision, input.device):
        value = input
        for layer in layers[: chain.start]:
            value = layer(value)
        fused = run_chain(layers, chain, value, self.chain_precision)
        value = value if fused is None else fused
        for layer in layers[chain.start if fused is None else chain.stop :]:
            value = layer(value)
    return widened(value)
