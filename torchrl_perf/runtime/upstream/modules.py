"""torch's modules: hooks, the dicts that hold their tensors, shallow copies, and what ``to`` does with each tensor."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from torchrl_perf.runtime.upstream.tensordicts import entries_of


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called with each call of the module, or each pass back through it.

    Calling its parts would leave that out.
    """
    return any(map(bool, hook_dicts(module)))


def is_changed(module: nn.Module) -> bool:
    """Whether a call of a module does more than its class says: by hooks, or by a ``forward`` of this one alone."""
    return has_hooks(module) or "forward" in module.__dict__


def param_dict(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict in which a module keeps its own parameters: what a function of other parameters is given stands there.

    Looking into it takes the host a third of what asking the module does.
    """
    return module._parameters


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Pass all parameters and buffers through ``function``, as ``nn.Module.to`` does; torch gives no other way in."""
    module._apply(function)


def hook_dicts(*modules: nn.Module) -> list[dict[int, Any]]:
    """The dicts of the hooks of modules, of calls and of backward passes: empty where there is none.

    The last four hold those that ``torch.nn.modules.module.register_module_forward_hook`` and its like give to all
    modules there are.
    """
    found: list[Any] = []
    for module in modules:
        found += module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    found += of_all._global_forward_hooks, of_all._global_forward_pre_hooks
    found += of_all._global_backward_hooks, of_all._global_backward_pre_hooks
    return found


def child_dict(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict in which a module keeps its registered children."""
    return module._modules


def tensor_slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The dicts in which a module keeps its own parameters and buffers, each with a name in it and the tensor there.

    Looking into a dict is how a replaced tensor is found at each call: asking the module costs the host 3 us a name.
    """
    waiting = [module._parameters, module._buffers]
    if isinstance(module, TensorDictParams):
        waiting = [entries_of(module._param_td)]
    while waiting:
        holder = cast("dict[str, Any]", waiting.pop())
        for name, value in holder.items():
            if isinstance(value, TensorDictBase):
                waiting.append(entries_of(value))
            elif isinstance(value, Tensor):
                yield holder, name, value


def replica(module: nn.Module, aliases: Mapping[int, Tensor]) -> nn.Module:
    """A shallow copy of a module and its children that has other parameters, as ``nn.DataParallel`` makes them.

    Args:
        module: left as it is.
        aliases: what stands for a parameter, by its ``id``; parameters in a ``TensorDictParams`` stay.
    """
    made: dict[int, nn.Module] = {}

    def copied(part: nn.Module) -> nn.Module:
        if isinstance(part, TensorDictParams):
            return part
        if id(part) in made:
            return made[id(part)]
        copy = made[id(part)] = cast("Any", part).__new__(type(part))
        attributes = copy.__dict__ = dict(part.__dict__)
        kept = {name: value for name, value in attributes.items() if isinstance(value, nn.Module)}  # not registered
        attributes |= {name: copied(value) for name, value in kept.items()}
        params = part._parameters.items()
        attributes["_parameters"] = {name: None if p is None else aliases.get(id(p), p) for name, p in params}
        children = part._modules.items()
        attributes["_modules"] = {name: None if child is None else copied(child) for name, child in children}
        return copy

    return copied(module)
