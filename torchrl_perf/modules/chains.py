"""Perceptrons inside of any ``nn.Sequential``, found by their layers and run as one kernel."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchrl_perf.functional.chain import fused_chain, runs_as_chain
from torchrl_perf.modules.aligned import AlignedLinear
from torchrl_perf.runtime.precision import autocast, widened
from torchrl_perf.runtime.upstream.modules import child_dict, hook_dicts, is_changed, param_dict
from torchrl_perf.runtime.upstream.tensors import is_transformed

__all__ = [
    "Chain",
    "ChainSequential",
    "Found",
    "chain_of",
    "class_name",
    "find",
    "fuse_sequential",
    "lacks_kernel",
    "lone_layer",
    "run_chain",
]

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
_CONSTANTS = {nn.ELU: "alpha", nn.LeakyReLU: "negative_slope", nn.GELU: "approximate", nn.LayerNorm: "eps"}


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


def lone_layer(layers: Sequence[nn.Module]) -> str | None:
    """Name of the activation of one linear layer, where the layers are the two, and are what their classes say."""
    if len(layers) != 2 or not _is_linear(layers[0]) or is_changed(layers[1]):
        return None
    name, is_known = _ACTIVATIONS.get(type(layers[1]), ("", bool))
    return name if name and is_known(layers[1]) else None


def _chain_from(layers: Sequence[nn.Module], start: int) -> Chain | None:
    found: Chain | None = None
    at = start + 1
    while True:
        eps = cast("nn.LayerNorm", layers[at]).eps if at < len(layers) and _is_norm(layers[at]) else 0.0
        after = at + (1 if eps else 0)
        if after + 1 >= len(layers) or not _is_linear(layers[after + 1]):
            return found
        name, is_known = _ACTIVATIONS.get(type(layers[after]), ("", bool))
        if not name or not is_known(layers[after]) or is_changed(layers[after]):
            return found
        if found is not None and (found.activation, found.eps) != (name, eps):
            return found
        at = after + 2
        found = Chain(start, at, name, eps)


def _is_linear(layer: nn.Module) -> bool:
    return type(layer) in (nn.Linear, AlignedLinear) and _is_whole(layer)


def _is_norm(layer: nn.Module) -> bool:
    """Whether it is a layer norm of one dim with gain and shift."""
    if type(layer) is not nn.LayerNorm or not _is_whole(layer):
        return False
    return len(layer.normalized_shape) == 1 and layer.eps > 0


def _is_whole(layer: nn.Module) -> bool:
    """Whether a layer has weight and bias as parameters, and a call of it is what its class says."""
    params = param_dict(layer)
    return params.get("weight") is not None and params.get("bias") is not None and not is_changed(layer)


class Found:
    """What :func:`chain_of` says of an ``nn.Sequential``, for as long as its layers are what they were.

    To ask the layers takes the host some 40 us; to see that they are the same, some 3.

    Args:
        network: whose layers are looked at.
        opens: whether those of an ``nn.Sequential`` in it stand in its place, where all linear ones are one chain then.

    Attributes:
        layers: of the network.
        chain: of them, or None.
    """

    def __init__(self, network: nn.Module, opens: bool = False) -> None:
        self.layers, self._inner = _children(network), cast("list[nn.Module]", [])
        self.chain = chain_of(self.layers)
        if opens:
            layers, inner = _opened(self.layers)
            chain = chain_of(layers) if inner else None
            if chain is not None and not any(map(_has_linear, layers[: chain.start] + layers[chain.stop :])):
                self.layers, self._inner, self.chain = layers, inner, chain
        self._children = [_children(each) for each in (network, *self._inner)]
        watched = [*self.layers, *self._inner]
        self._hooks = hook_dicts(*watched)
        self._hooked = [bool(hooks) for hooks in self._hooks]
        self._own_forward = ["forward" in layer.__dict__ for layer in watched]
        self._kinds = [type(layer) for layer in watched]
        named = [
            (layer, _CONSTANTS[kind]) for layer, kind in zip(watched, self._kinds, strict=True) if kind in _CONSTANTS
        ]
        self._constants = [(layer, name, getattr(layer, name)) for layer, name in named]
        chain = self.layers[self.chain.start : self.chain.stop] if self.chain is not None else []
        parts = [layer for layer in chain if isinstance(layer, nn.Linear | nn.LayerNorm)]
        # by name: they lie in the order in which they were registered, which differs once one has been replaced
        self._slots = [(param_dict(part), name) for part in parts for name in ("weight", "bias")]

    def holds(self, network: nn.Module) -> bool:
        """Whether the network's layers, their hooks, constants and parameters are still those."""
        holders = (network, *self._inner)
        if any(list(child_dict(each).values()) != of for each, of in zip(holders, self._children, strict=True)):
            return False
        watched = [*self.layers, *self._inner]
        if [type(layer) for layer in watched] != self._kinds:
            return False
        if [bool(hooks) for hooks in self._hooks] != self._hooked:
            return False
        if ["forward" in layer.__dict__ for layer in watched] != self._own_forward:
            return False
        if any(holder.get(name) is None for holder, name in self._slots):
            return False
        return all(getattr(layer, name) == value for layer, name, value in self._constants)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a network looks for its own: copied and saved, this is None."""
        return type(None), ()

    def params(self) -> list[Tensor]:
        """Those of the chain, as :func:`~torchrl_perf.functional.chain.chain` takes them."""
        return [cast("Tensor", holder[name]) for holder, name in self._slots]


def _children(network: nn.Module) -> list[nn.Module]:
    return [layer for layer in child_dict(network).values() if layer is not None]


def _opened(layers: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Layers, with those of each ``nn.Sequential`` among them in its place, and what was opened so."""
    found: list[nn.Module] = []
    inner: list[nn.Module] = []
    for layer in layers:
        if type(layer) not in (nn.Sequential, ChainSequential) or is_changed(layer):
            found.append(layer)
            continue
        more, deeper = _opened(_children(layer))
        found += more
        inner += [layer, *deeper]
    return found, inner


def _has_linear(layer: nn.Module) -> bool:
    return any(isinstance(part, nn.Linear) for part in layer.modules())


def find(network: nn.Module, opens: bool = False) -> Found:
    """The chain of an ``nn.Sequential``, looked for anew only where its layers have changed; see :class:`Found`."""
    if torch.compiler.is_compiling():
        return Found(network, opens)
    found: Found | None = network.__dict__.get("found_chain")
    if found is None or not found.holds(network):
        found = network.__dict__["found_chain"] = Found(network, opens)
    return found


def run_chain(found: Found, x: Tensor, precision: str) -> Tensor | None:
    """The layers of a chain as one kernel; None where it does not take them: see :func:`runs_as_chain`.

    Args:
        found: with a chain.
        x: ``[*, IN]``, the input of its first layer.
        precision: of the products; ``"ieee"`` is left to the layers.
    """
    if not x.is_cuda or precision == "ieee" or is_transformed():
        return None
    chain, params = cast("Chain", found.chain), found.params()
    if not runs_as_chain(x, params, chain.eps):
        return None
    y = fused_chain(x.reshape(-1, x.shape[-1]), params, chain.activation, chain.eps, precision)
    return y.view(*x.shape[:-1], y.shape[-1])


def lacks_kernel(network: nn.Module) -> bool:
    """Whether a network has several linear layers of its own no two of which a kernel takes together.

    Those of an ``nn.Sequential``, also where each is in another one inside of it, and of a module of a user's class,
    whose ``forward`` calls them.
    """
    if not isinstance(network, nn.Sequential):
        if type(network).__module__.partition(".")[0] in _KNOWN:
            return False
        return sum(isinstance(layer, nn.Linear) for layer in _children(network)) > 1
    linear = []
    for layer in _children(network):
        inside = [part for part in _opened([layer])[0] if isinstance(part, nn.Linear)]
        linear += inside if len(inside) == 1 else []
    if len(linear) < 2:
        return False
    # the package's own networks run their chain by themselves, and do not look into others inside of them
    runs_chain = hasattr(network, "fuses") and not isinstance(network, ChainSequential)
    is_single = all(layer.weight.dtype == torch.float32 for layer in linear)
    has_chain = Found(network, opens=not runs_chain).chain is not None
    return not (is_single and has_chain and (runs_chain or _is_fusible(network)))


class ChainSequential(nn.Sequential):
    """The class of an ``nn.Sequential`` that :func:`fuse_sequential` was given; copied, saved and cut, it stays one.

    One of a class of its own, such as TorchRL's ``MLP``, becomes one of a class derived from both: its ``forward``
    runs, and what that calls of ``nn.Sequential`` is this one's.

    Attributes:
        chain_precision: of the products; None runs layer by layer, as in a part that was cut out.
        fuses: whether the kernel runs; False runs layer by layer.
    """

    chain_precision: str | None = None
    fuses = True
    name_in_checkpoints: ClassVar[str] = nn.Sequential.__name__

    def forward(self, input: Tensor) -> Tensor:
        """``[*, IN]`` -> the output of the last layer."""
        precision = self.chain_precision
        found = find(self, opens=True) if self.fuses and input.is_cuda and precision is not None else None
        if found is None or found.chain is None or precision is None:
            return super().forward(input)
        layers, chain = found.layers, found.chain
        with autocast(precision, input.device):
            value = input
            for layer in layers[: chain.start]:
                value = layer(value)
            fused = run_chain(found, value, precision)
            value = value if fused is None else fused
            for layer in layers[chain.start if fused is None else chain.stop :]:
                value = layer(value)
        return widened(value)

    def _get_name(self) -> str:
        return class_name(self)


def class_name(module: nn.Module) -> str:
    """Name of a module's class in checkpoints: of one that only runs another's layers in its own way, the other's.

    So it is of a network that :func:`fuse_sequential` was given, which has a ``name_in_checkpoints``.
    """
    return getattr(type(module), "name_in_checkpoints", type(module).__name__)


_KNOWN = ("torch", "torchrl_perf", "tensordict", "torchrl")
"""Packages whose modules are no user's."""


def _is_fusible(network: nn.Sequential) -> bool:
    """Whether the class of an ``nn.Sequential`` may be changed: it has no other form in files, nor a bound forward."""
    kind: Any = type(network)
    if isinstance(network, ChainSequential) or kind is nn.Sequential:
        return "forward" not in network.__dict__
    is_plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    own = kind.__module__.partition(".")[0] == "torchrl_perf" or type(kind) is not type
    return is_plain and not own and "forward" not in network.__dict__ and not hasattr(kind, "chain_precision")


@functools.cache
def _fused_class(kind: type[nn.Sequential]) -> type[nn.Sequential]:
    """One derived from a user's class and from :class:`ChainSequential`; it cannot be imported, but is made anew."""

    def reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _blank, (kind,), *object.__reduce_ex__(self, max(2, protocol))[2:]

    names = {"name_in_checkpoints": kind.__name__, "__reduce_ex__": reduced, "__module__": kind.__module__}
    return type(kind.__name__, (kind, ChainSequential), names)


def _blank(kind: type[nn.Sequential]) -> nn.Sequential:
    """One of the class derived from this, without its state."""
    fused: Any = _fused_class(kind)
    return cast("nn.Sequential", fused.__new__(fused))


def fuse_sequential(network: nn.Module, precision: str) -> bool:
    """Makes an ``nn.Sequential`` run its perceptron as one kernel, where it has one; layers and state stay.

    Only its class is changed, as torch's parametrisations do: a function of one network, bound to it, would stay that
    of the first in a copy, and could not be saved.

    Args:
        network: changed in place.
        precision: of the products.

    Returns:
        Whether it was changed: a ``forward`` of one network's own, and layers that no kernel takes, are left alone.
    """
    if isinstance(network, ChainSequential) and network.chain_precision is not None:
        return True
    if not isinstance(network, nn.Sequential) or not _is_fusible(network):
        return False
    if Found(network, opens=True).chain is None:
        return False
    changed: Any = network
    if not isinstance(network, ChainSequential):
        kind = type(network)
        changed.__class__ = ChainSequential if kind is nn.Sequential else _fused_class(kind)
    changed.chain_precision = precision
    return True
