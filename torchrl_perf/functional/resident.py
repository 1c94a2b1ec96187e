"""A perceptron of two hidden layers, the weights between which stay on chip, as one differentiable function on CUDA."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.functional.twice import graphed_gradients
from torchrl_perf.kernels import processors
from torchrl_perf.runtime.upstream.tensors import at_least

ROWS = 8192
"""Rows from which it pays that the weights are read once."""
ROOM = 200 * 1024
"""Bytes of shared memory of a program: those of an H100."""
WIDEST = 256
FROM_VALUE = {"tanh": torch.tanh, "relu": torch.relu, "elu": F.elu, "leaky_relu": F.leaky_relu}
"""Activations whose slope follows from their value."""
TAKEN = {"tf32": ("tanh",), "bf16": FROM_VALUE, "fp16": FROM_VALUE}
"""Activations by precision: in TF32 those alone whose units float16 holds as exactly as TF32's products read them."""


@functools.cache
def room(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0


def stays_on_chip(x: Tensor, params: list[Tensor], activation: str, eps: float, precision: str) -> bool:
    """Whether :func:`resident_chain` takes what :func:`~torchrl_perf.functional.chain.fused_chain` was given.

    Two hidden layers of up to 256 units without layer norm, up to 31 inputs that need no gradient and 16 outputs, from
    8,192 rows on.
    """
    if eps or len(params) != 6 or x.requires_grad or activation not in TAKEN.get(precision, ()):
        return False
    if not at_least(x.shape[0], ROWS):
        return False
    widths = [weight.shape[0] for weight in params[::2]]
    return max(widths[:2]) <= WIDEST and widths[2] <= 16 and x.shape[1] < 32 and room(x.device) >= ROOM


def resident_chain(x: Tensor, params: list[Tensor], activation: str, precision: str) -> Tensor:
    """:func:`~torchrl_perf.functional.chain.chain` of two hidden layers, whose units are kept in 16 bits.

    With ``"tf32"`` the products between units are float16's, which has TF32's 10 bits, with float32 sums: weights
    may be as large as 4,094, and those below 4e-9 are 0. Gradients are divided by what none of them exceeds, so that
    they may have any size.

    Args:
        x: ``[B, IN]`` float32 on CUDA, any strides.
        params: weight and bias of each layer, contiguous float32.
        activation: one of ``TAKEN[precision]``.
        precision: ``"tf32"``, ``"bf16"``, or ``"fp16"``, for whose gradients the loss is to be scaled.
    """
    keep = torch.is_grad_enabled() and any(p.requires_grad for p in params)
    return torch.ops.torchrl_perf.resident_forward(x, params, activation, precision, keep)[0]


def _layer_by_layer(activate: Callable[[Tensor], Tensor], x: Tensor, *params: Tensor) -> Tensor:
    """What the kernels compute."""
    w1, b1, w2, b2, w3, b3 = params
    return F.linear(activate(F.linear(activate(F.linear(x, w1, b1)), w2, b2)), w3, b3)


def _network(x: Tensor, params: list[Tensor], activation: str, precision: str) -> Any:
    from torchrl_perf.kernels.chain_launch import Network  # Triton is loaded where CUDA is used, not at import

    return Network((x.shape[1], *(weight.shape[0] for weight in params[::2])), activation, 0.0, precision)


def _room_of_weights(params: list[Tensor]) -> int:
    """Numbers of the weights in 16 bits before the units, which begin at a multiple of 16."""
    return (params[2].numel() + params[4].numel() + 15) // 16 * 16


@torch.library.custom_op("torchrl_perf::resident_forward", mutates_args=())
def _forward(x: Tensor, params: list[Tensor], activation: str, precision: str, keep: bool) -> tuple[Tensor, Tensor]:
    from torchrl_perf.kernels import resident_launch as kernel

    net = _network(x, params, activation, precision)
    return kernel.forward(x, params, net, _room_of_weights(params), keep, processors(x.device))


@_forward.register_fake
def _(x: Tensor, params: list[Tensor], activation: str, precision: str, keep: bool) -> tuple[Tensor, Tensor]:
    rows, first, units, outputs = x.shape[0], *(weight.shape[0] for weight in params[::2])
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    kept = _room_of_weights(params) + rows * (first + units) if keep else 0
    return x.new_empty(rows, outputs), x.new_empty(kept, dtype=dtype)


@torch.library.custom_op("torchrl_perf::resident_backward", mutates_args=())
def _of_all(
    grad: Tensor, x: Tensor, params: list[Tensor], kept: Tensor, activation: str, precision: str, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients: of the weights between the hidden layers, if wanted, and two vectors.

    One of the biases of the first layer and of the last and of the weights of the first, another of the biases of the
    second layer and of the weights of the last.
    """
    from torchrl_perf.kernels import resident_launch as kernel

    net, start = _network(x, params, activation, precision), _room_of_weights(params)
    d, scale, of_first, of_last = kernel.backward(grad, x, params[4], net, start, kept, processors(x.device))
    product = params[2].new_empty(0)
    if wanted:
        first = net.sizes[1]
        below = kept[start : start + len(x) * first].view(len(x), first)
        product = _product(d, below)
        product = product.mul_(scale) if precision == "tf32" else product
    return product, of_first.sum(0), of_last.sum(0)


def _product(d: Tensor, below: Tensor) -> Tensor:
    """``d.T @ below`` in float32."""
    if d.is_cuda:
        return torch.mm(d.t(), below, out_dtype=torch.float32)
    return d.float().t() @ below.float()  # where Triton's interpreter runs


@_of_all.register_fake
def _(
    grad: Tensor, x: Tensor, params: list[Tensor], kept: Tensor, activation: str, precision: str, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    first, units, outputs = (weight.shape[0] for weight in params[::2])
    vectors = grad.new_empty(first + outputs + params[0].numel()), grad.new_empty(units + params[4].numel())
    return torch.empty_like(params[2]) if wanted else params[2].new_empty(0), *vectors


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, params, activation, precision, _ = inputs
    ctx.save_for_backward(x, *params, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.options = activation, precision


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | list[Tensor | None] | None, ...]:
    x, *params, kept = ctx.saved_tensors
    needs: Sequence[bool] = ctx.needs_input_grad[1]
    if torch.is_grad_enabled():  # they are to be differentiated themselves
        activate = FROM_VALUE[ctx.options[0]]
        _, *found = graphed_gradients(partial(_layer_by_layer, activate), (x, *params), (False, *needs), grad)
        return None, found, None, None, None
    product, of_first, of_last = torch.ops.torchrl_perf.resident_backward(grad, x, params, kept, *ctx.options, needs[2])
    w1, b1, _, b2, w3, b3 = params
    b1_grad, b3_grad, w1_grad = of_first.split([b1.numel(), b3.numel(), w1.numel()])
    b2_grad, w3_grad = of_last.split([b2.numel(), w3.numel()])
    grads = [w1_grad.view_as(w1), b1_grad, product, b2_grad, w3_grad.view_as(w3), b3_grad]
    return None, [grad if need else None for grad, need in zip(grads, needs, strict=True)], None, None, None


_forward.register_autograd(_backward, setup_context=_setup_context)
