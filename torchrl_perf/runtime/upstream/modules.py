"""torch's modules: whether hooks are registered, and the function that ``to`` and ``double`` apply to each tensor."""

from collections.abc import Callable

from torch import Tensor, nn


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called with each call of the module, which calling its parts would leave out."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Pass all parameters and buffers through ``function``, as ``nn.Module.to`` does; torch gives no other way in."""
    module._apply(function)
