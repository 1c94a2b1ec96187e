"""A three-layer perceptron as one differentiable function: fused kernels on CUDA, plain linear layers elsewhere."""

import operator
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from torchrl_perf.functional.twice import graphed_gradients
from torchrl_perf.kernels import processors
from torchrl_perf.runtime.upstream import inductor
from torchrl_perf.runtime.upstream.tensors import is_transformed

_ACTIVATION = {"tanh": torch.tanh, "relu": torch.relu}
WIDTHS = (32, 64, 128)
PRECISIONS = ("tf32", "bf16", "fp16", "ieee")


def mlp(x: Tensor, params: list[Tensor], activation: str = "tanh") -> Tensor:
    """``w3 f(w2 f(w1 x + b1) + b2) + b3``: the reference that the kernels follow.

    Args:
        x: ``[*, IN]``, any float dtype.
        params: ``[w1 [H, IN], b1 [H], w2 [H, H], b2 [H], w3 [OUT, H], b3 [OUT]]``.
        activation: ``"tanh"`` or ``"relu"``.

    Returns:
        ``[*, OUT]``.
    """
    w1, b1, w2, b2, w3, b3 = params
    act = _ACTIVATION[activation]
    return F.linear(act(F.linear(act(F.linear(x, w1, b1)), w2, b2)), w3, b3)


def fusable(x: Tensor, params: list[Tensor]) -> bool:
    """Whether :func:`fused_mlp` has a kernel for these arguments.

    It has one for CUDA, float32, contiguous parameters, no gradient for ``x``, hidden widths 32 and 64 with IN <= 128
    and OUT <= 64, and 128 with IN <= 64 and OUT <= 32: what fits on chip; none inside of a transform of ``torch.func``.
    """
    (hidden, inputs), outputs = params[0].shape, params[4].shape[0]
    return (
        x.is_cuda
        and all(tensor.dtype == torch.float32 for tensor in (x, *params))
        and hidden in WIDTHS
        and params[2].shape == (hidden, hidden)
        and inputs <= (64 if hidden == 128 else 128)
        and outputs <= (32 if hidden == 128 else 64)
        and not x.requires_grad
        and all(p.is_contiguous() for p in params)
        and not is_transformed()
    )


def fused_mlp(x: Tensor, params: list[Tensor], activation: str = "tanh", precision: str = "tf32") -> Tensor:
    """:func:`mlp` in one kernel forward and one backward (plus a sum), on CUDA.

    Args:
        x: ``[B, IN]`` float32 on CUDA, any strides.
        params: as in :func:`mlp`, contiguous.
        activation: ``"tanh"`` or ``"relu"``.
        precision: of the matrix products: ``"tf32"`` (also PyTorch's choice where TF32 is allowed, with the hardware's
            tanh), ``"bf16"`` or ``"fp16"`` (operands rounded, sums in float32; in ``"fp16"`` an operand beyond 65,504
            is infinite), or ``"ieee"`` (float32, several times slower).

    Returns:
        ``[B, OUT]`` float32. Equal to :func:`mlp` within 2e-3 of its scale (``ieee``: 1e-5, ``bf16``: 2e-2).
    """
    return torch.ops.torchrl_perf.mlp_forward(x, params, activation, precision)


@torch.library.custom_op("torchrl_perf::mlp_forward", mutates_args=())
def _mlp_forward(x: Tensor, params: list[Tensor], activation: str, precision: str) -> Tensor:
    from torchrl_perf.kernels import mlp as kernel  # Triton is loaded where CUDA is used, not at import

    return kernel.forward(x, params, activation, precision, processors(x.device))


@torch.library.custom_op("torchrl_perf::mlp_backward", mutates_args=())
def _mlp_backward(grad: Tensor, x: Tensor, params: list[Tensor], activation: str, precision: str) -> Tensor:
    from torchrl_perf.kernels import mlp as kernel

    return kernel.backward(grad, x, params, activation, precision, processors(x.device))


@_mlp_forward.register_fake
def _(x: Tensor, params: list[Tensor], activation: str, precision: str) -> Tensor:
    return x.new_empty(x.shape[0], params[4].shape[0])


@_mlp_backward.register_fake
def _(grad: Tensor, x: Tensor, params: list[Tensor], activation: str, precision: str) -> Tensor:
    return x.new_empty(sum(p.numel() for p in params))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, params, activation, precision = inputs
    ctx.save_for_backward(x, *params)
    ctx.options = (activation, precision)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | list[Tensor | None] | list[Tensor] | None, ...]:
    x, *params = ctx.saved_tensors
    if torch.is_grad_enabled():  # they are to be differentiated themselves
        needs = (False, *ctx.needs_input_grad[1])
        _, *found = graphed_gradients(
            lambda x, *params: mlp(x, list(params), ctx.options[0]), (x, *params), needs, grad
        )
        return None, found, None, None
    flat = torch.ops.torchrl_perf.mlp_backward(grad, x, params, *ctx.options)
    parts = flat.split([p.numel() for p in params])
    return None, [part.view(p.shape) for part, p in zip(parts, params, strict=True)], None, None


_mlp_forward.register_autograd(_backward, setup_context=_setup_context)


# -- two networks of one input, such as actor and critic, in one launch: compiled functions find them ------------------


@torch.library.custom_op("torchrl_perf::mlp_pair_forward", mutates_args=())
def _pair_forward(
    x: Tensor, first: list[Tensor], second: list[Tensor], activation: str, precision: str
) -> tuple[Tensor, Tensor]:
    from torchrl_perf.kernels import mlp as kernel

    y, z = kernel.forward_of((first, second), x, activation, precision, processors(x.device))
    return y, z


@torch.library.custom_op("torchrl_perf::mlp_pair_backward", mutates_args=())
def _pair_backward(
    grad: Tensor, other: Tensor, x: Tensor, first: list[Tensor], second: list[Tensor], activation: str, precision: str
) -> Tensor:
    """The gradients of the first network's parameters, and those of the second behind them."""
    from torchrl_perf.kernels import mlp as kernel

    return kernel.backward_of((grad, other), (first, second), x, activation, precision, processors(x.device))


@_pair_forward.register_fake
def _(x: Tensor, first: list[Tensor], second: list[Tensor], activation: str, precision: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], first[4].shape[0]), x.new_empty(x.shape[0], second[4].shape[0])


@_pair_backward.register_fake
def _(
    grad: Tensor, other: Tensor, x: Tensor, first: list[Tensor], second: list[Tensor], activation: str, precision: str
) -> Tensor:
    return x.new_empty(sum(p.numel() for p in (*first, *second)))


def _kind(node: Node) -> Hashable:
    """Input, sizes and options of a call of either operator; None where a compiler does not know the sizes."""
    x, params, *options = node.args[-4:]
    sizes = [size for p in cast("list[Node]", params) for size in p.meta["val"].shape]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return x, *sizes[:6], max(16, sizes[-1]), *options  # outputs may differ, in what is filled up to 16


def _join_forward(graph: Graph, first: Node, second: Node) -> tuple[Node, Node]:
    x, params, *options = first.args
    pair = inductor.call(graph, torch.ops.torchrl_perf.mlp_pair_forward.default, x, params, second.args[1], *options)
    return inductor.call(graph, operator.getitem, pair, 0), inductor.call(graph, operator.getitem, pair, 1)


def _join_backward(graph: Graph, first: Node, second: Node) -> tuple[Node, Node]:
    grad, x, params, *options = first.args
    other, _, others, *_ = second.args
    pair = torch.ops.torchrl_perf.mlp_pair_backward.default
    flat = inductor.call(graph, pair, grad, other, x, params, others, *options)
    size, whole = first.meta["val"].numel(), flat.meta["val"].numel()
    part = torch.ops.aten.slice.Tensor
    return inductor.call(graph, part, flat, 0, 0, size), inductor.call(graph, part, flat, 0, size, whole)


inductor.pair(torch.ops.torchrl_perf.mlp_forward.default, _kind, _join_forward)
inductor.pair(torch.ops.torchrl_perf.mlp_backward.default, _kind, _join_backward)
