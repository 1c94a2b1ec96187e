"""torch: tensors over parts of a memory, the current stream and the modes, without what asking for them costs.

A part is some 5 us of host time by ``as_strided`` and ``.data``, a stream 9 us by ``torch.cuda.current_stream``, on a
path whose whole length is some 100 us.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
for _key in (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA):
    _TRACKING = _TRACKING | torch._C.DispatchKeySet(_key)

Piece = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset, the last two in elements."""


def pieces_of(memory: Tensor, dtype: torch.dtype, pieces: Sequence[Piece]) -> list[Tensor]:
    """Tensors over parts of a memory, which count as tensors of their own: no views, with versions of their own.

    A view would refuse ``loss += ...``, and a write to one would count as a write to all.

    Args:
        memory: uint8 ``[bytes]``, a multiple of the element's size.
        dtype: of the tensors.
        pieces: where each lies.
    """
    with torch._C._ExcludeDispatchKeyGuard(_TRACKING):
        elements = memory.view(dtype)
        return [elements.as_strided(*piece) for piece in pieces]


def current_stream(device: torch.device) -> int:
    """The handle of the current stream of a CUDA device with an index."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def apply_plain(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` outside of functorch's transforms, which that would look for in each argument."""
    return super(torch.autograd.Function, function).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


def under_a_mode() -> bool:
    """Whether a dispatch mode, or a transform of functorch, sees the operations that follow."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def has_gradient_hooks(param: Tensor) -> bool:
    """Whether something waits for the gradient of a leaf: hooks that change it, or that are called once it is there."""
    return bool(param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None))


def call_gradient_hooks(param: Tensor) -> None:
    """Call what waits until the gradient of a leaf is there, as a backward pass does once it has put it there."""
    for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)


def cut_graphs(params: Iterable[Tensor]) -> None:
    """Give each leaf a new node for its gradients, so that graphs which others hold of it no longer reach this one.

    Such a node keeps the stream on which it was made, for as long as any graph through the leaf lives: a copy of a
    parameter by ``clone()`` is enough. A gradient that is computed on another stream then makes the node's own stream
    wait, which the recording of a CUDA graph refuses. Values, gradients and hooks of the leaf stay, and the graphs that
    are held still end in it. A new node comes with the next use of a leaf whose data had another dtype meanwhile.

    Args:
        params: leaves, or tensors that are left alone: those without a gradient, and what no leaf is.
    """
    for param in params:
        if param.is_leaf and param.requires_grad:
            kept = param.data
            param.data = kept.new_empty(0, dtype=torch.float64 if kept.dtype != torch.float64 else torch.float32)
            param.data = kept


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward differentiation is active, also while a compiler traces.

    Operators of ours have no rules for them, and a derivative of 0 in their place.
    """
    return torch._C._are_functorch_transforms_active() or carries_tangents()


def carries_tangents() -> bool:
    """Whether forward differentiation is active, ``torch.func.jvp`` too: a kernel would leave tangents behind."""
    return torch.autograd.forward_ad._current_level >= 0


def at_least(size: int, least: int) -> bool:
    """Whether a size is known to be at least this; one that a compiler learns from data alone is not."""
    if not torch.compiler.is_compiling():
        return size >= least
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # it takes a while to import

    return guard_or_false(size >= least)
