"""Networks whose layers the kernels for few rows take, found by their layers."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from torchrl_perf.functional.members import Members
from torchrl_perf.modules.chains import chain_of
from torchrl_perf.modules.ensemble import EnsembleMLP
from torchrl_perf.modules.mixed import MixedSequential
from torchrl_perf.runtime.upstream.modules import is_changed

__all__ = ["members_of_ensemble", "members_of_layers"]

WIDEST = 1024
"""Units of a layer up to which it is served."""


def members_of_ensemble(network: nn.Module) -> Members | None:
    """An :class:`EnsembleMLP` for the kernels; None for another network, and for one that they do not serve."""
    if type(network) is not EnsembleMLP or is_changed(network):
        return None
    norms = (list(network.gains), list(network.shifts)) if network.layer_norm else ((), ())
    found = Members(
        list(network.weights), list(network.biases), *norms, activation=network.activation,
        eps=1e-5 if network.layer_norm else 0.0, precision=network.precision,
    )  # fmt: skip
    return found if _is_served(found) else None


def members_of_layers(network: nn.Module) -> tuple[Members, list[nn.Module]] | None:
    """A :class:`MixedSequential` that begins with a perceptron, for the kernels, and its layers behind that.

    None for another network, and for one that they do not serve.
    """
    if type(network) is not MixedSequential or is_changed(network) or not network.fuses:
        return None
    layers = list(network)
    chain = chain_of(layers)
    if chain is None or chain.start > 0:
        return None
    linear = [cast("nn.Linear", layer) for layer in layers[: chain.stop] if isinstance(layer, nn.Linear)]
    norms = [cast("nn.LayerNorm", layer) for layer in layers[: chain.stop] if isinstance(layer, nn.LayerNorm)]
    found = Members(
        [layer.weight for layer in linear], [cast("Any", layer.bias) for layer in linear],
        [layer.weight for layer in norms], [cast("Any", layer.bias) for layer in norms],
        activation=chain.activation, eps=chain.eps, precision=network.precision, inner=True,
    )  # fmt: skip
    rest = layers[chain.stop :]
    learns = any(True for layer in rest for _ in layer.parameters())
    return None if learns or not _is_served(found) else (found, rest)


def _is_served(found: Members) -> bool:
    """Whether all is float32, contiguous and of one layer alone, and each is narrow enough.

    Full float32 is left to the layers; of a parameter that stands twice there would be two gradients.
    """
    params: Sequence[torch.Tensor] = found.params
    return (
        found.precision != "ieee"
        and len({id(param) for param in params}) == len(params)
        and len(found.widths) > 2
        and max(found.widths) <= WIDEST
        and all(p.dtype == torch.float32 and p.is_contiguous() for p in params)
    )
