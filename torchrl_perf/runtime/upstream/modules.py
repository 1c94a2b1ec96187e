"""torch's modules: hooks, the dicts that hold their tensors, and the function that ``to`` and ``double`` apply to each."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn

from torchrl_perf.runtime.upstream.tensordicts import entries_of


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called with each call of the module, which calling its parts would leave out."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Pass all parameters and buffers through ``function``, as ``nn.Module.to`` does; torch gives no other way in."""
    module._apply(function)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether something is called with each backward pass through the module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def tensor_slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The dicts in which a module keeps its own parameters and buffers, each with a name in it and the tensor there.

    Looking into a dict is how a replaced tensor is found at each call: asking the module costs the host 3 us a name.
    """
    if isinstance(module, TensorDictParams):
        yield from _entries(module._param_td)
        return
    for holder in (module._parameters, module._buffers):
        yield from ((holder, name, tensor) for name, tensor in holder.items() if isinstance(tensor, Tensor))


def _entries(tensordict: TensorDictBase) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    holder = entries_of(tensordict)
    for name, value in holder.items():
        if isinstance(value, TensorDictBase):
            yield from _entries(value)
        elif isinstance(value, Tensor):
            yield holder, name, value


def replica(module: nn.Module, aliases: Mapping[int, Tensor]) -> nn.Module:
    """A shallow copy of a module and its children that has other parameters, as ``nn.DataParallel`` makes them.

    Args:
        module: left as it is.
        aliases: what stands for a parameter, by its ``id``; parameters in a ``TensorDictParams`` stay.
    """
    return _replica(module, aliases, {})


def _replica(part: nn.Module, aliases: Mapping[int, Tensor], made: dict[int, nn.Module]) -> nn.Module:
    if isinstance(part, TensorDictParams):
        return part
    if id(part) in made:
        return made[id(part)]
    copy = made[id(part)] = cast("Any", part).__new__(type(part))
    attributes = copy.__dict__ = dict(part.__dict__)
    for name, value in part.__dict__.items():
        if isinstance(value, nn.Module):  # kept without being registered
            attributes[name] = _replica(value, aliases, made)
    attributes["_parameters"] = {
        name: param if param is None else aliases.get(id(param), param) for name, param in part._parameters.items()
    }
    attributes["_modules"] = {
        name: child if child is None else _replica(child, aliases, made) for name, child in part._modules.items()
    }
    return copy
