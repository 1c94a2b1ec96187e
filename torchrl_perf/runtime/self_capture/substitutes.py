"""Parameters under other objects while a graph is recorded, so that no autograd node of an earlier call is met.

Autograd keeps one node for each parameter that sums its gradient, on the stream where it was made. One that an earlier
eager call left behind would pull that stream into the recording. An alias has the memory of the parameter, and a node,
a version and a history of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_perf.runtime.upstream.modules import replica

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


def called_with(
    method: Callable[[Any, TensorDictBase], Any],
    module: nn.Module,
    aliases: Mapping[int, Tensor],
    tensordict: TensorDictBase,
) -> Any:
    """``method(module, tensordict)`` with the aliases in place of the parameters, which stay where they are.

    A shallow copy of the module is called, since another thread may read the parameters of the module meanwhile.
    Parameters in a ``TensorDictParams`` are left to :func:`substituted`.
    """
    with _in_place(aliases):
        return method(replica(module, aliases), tensordict)
