"""Parameters under other objects while a graph is recorded, so that no autograd node of an earlier call is met.

Autograd keeps one node for each parameter that sums its gradient, on the stream where it was made. One that an earlier
eager call left behind would pull that stream into the recording. An alias has the memory of the parameter, and a node,
a version and a history of its own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn

__all__ = ["aliased", "aliases_of", "called_with", "substituted"]

_ALIASES: ContextVar[Mapping[int, Tensor] | None] = ContextVar("torchrl_perf_aliases", default=None)


def aliased(tensor: Tensor) -> Tensor:
    """The same memory as a leaf of its own: no history, and a version that only it counts."""
    return tensor.data.requires_grad_(tensor.requires_grad)


def aliases_of(tensors: Iterator[Tensor]) -> dict[int, Tensor]:
    """An alias of each tensor that needs a gradient, by the ``id`` of the tensor."""
    return {id(tensor): aliased(tensor) for tensor in tensors if tensor.requires_grad}


@contextmanager
def _in_place(aliases: Mapping[int, Tensor]) -> Iterator[None]:
    token = _ALIASES.set(aliases)
    try:
        yield
    finally:
        _ALIASES.reset(token)


def substituted(params: Any) -> Any:
    """Parameters to call a module with: themselves, or their aliases while the caller is being recorded.

    Args:
        params: ``TensorDictParams`` or a TensorDict of parameters.
    """
    aliases = _ALIASES.get()
    if aliases is None:
        return params
    found = TensorDict({}, params.batch_size)
    for key, leaf in params.items(True, True):
        found.set(key, aliases.get(id(leaf), leaf))
    return found


def called_with(module: nn.Module, aliases: Mapping[int, Tensor], tensordict: TensorDictBase) -> Any:
    """``module(tensordict)`` with the aliases in place of its parameters, which stay where they are.

    A shallow copy of the module is called, since another thread may read the parameters of the module meanwhile.
    Parameters in a ``TensorDictParams`` are left to :func:`substituted`.
    """
    with _in_place(aliases):
        return _replica(module, aliases, {})(tensordict)


def _replica(part: nn.Module, aliases: Mapping[int, Tensor], made: dict[int, nn.Module]) -> nn.Module:
    """A module of the same attributes whose parameters are aliases, and so on for its children."""
    if isinstance(part, TensorDictParams):
        return part
    if id(part) in made:
        return made[id(part)]
    copy = made[id(part)] = cast("Any", part).__new__(type(part))
    attributes = copy.__dict__ = dict(part.__dict__)
    for name, value in part.__dict__.items():
        if isinstance(value, nn.Module):
            attributes[name] = _replica(value, aliases, made)
    attributes["_parameters"] = {
        name: param if param is None else aliases.get(id(param), param) for name, param in part._parameters.items()
    }
    attributes["_modules"] = {
        name: child if child is None else _replica(child, aliases, made) for name, child in part._modules.items()
    }
    return copy
