"""A linear layer of few inputs with its activation as one operator, as encoders of short observations are.

On CUDA it is one launch forwards and two backwards. As a matrix product of two inputs it is five: cuBLAS wants its
depth padded and then splits it. Dimension key: ``I`` inputs, ``H`` units.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.functional.twice import graphed_gradients
from torchrl_perf.kernels import has_triton, matmul_takes_tf32
from torchrl_perf.runtime.upstream.tensors import is_transformed

__all__ = ["FROM_VALUE", "narrow_layer", "runs_as_narrow"]

MOST_INPUTS, MOST_UNITS = 16, 256
FROM_VALUE = {"tanh": torch.tanh, "relu": torch.relu, "elu": F.elu, "leaky_relu": F.leaky_relu}
"""Activations whose slope follows from their value, the one thing that is kept for the backward pass."""


def runs_as_narrow(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> bool:
    """Whether :func:`narrow_layer` is kernels for these: float32 on CUDA, few inputs, and no gradient of them.

    Args:
        x: ``[*, I]``, I at most 16.
        weight: ``[H, I]``, H at most 256.
        bias: ``[H]``.
        activation: a name of :data:`FROM_VALUE`.
    """
    hidden, size = weight.shape
    return (
        has_triton()
        and activation in FROM_VALUE
        and size <= MOST_INPUTS
        and hidden <= MOST_UNITS
        and all(each.is_cuda and each.dtype == torch.float32 for each in (x, weight, bias))
        and x.numel() > 0
        and not x.requires_grad
        and not is_transformed()
    )


def narrow_layer(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    """``f(W x + b)``.

    Args:
        x: ``[B, I]`` without a gradient.
        weight: ``[H, I]``.
        bias: ``[H]``.
        activation: f, a name of :data:`FROM_VALUE`.

    Returns:
        ``[B, H]``; products in float32, those of the weights' gradient in the precision of PyTorch's own on CUDA.
    """
    return torch.ops.torchrl_perf.narrow_layer(x, weight, bias, activation)


def _reference(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    return FROM_VALUE[activation](F.linear(x, weight, bias))


@torch.library.custom_op("torchrl_perf::narrow_layer", mutates_args=())
def _layer(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    if not x.is_cuda:
        return _reference(x, weight, bias, activation)
    from torchrl_perf.kernels import narrow  # Triton is loaded where CUDA is used, not at import

    return narrow.forward(x, weight.contiguous(), bias.contiguous(), activation)


@torch.library.custom_op("torchrl_perf::narrow_layer_backward", mutates_args=())
def _layer_backward(grad: Tensor, y: Tensor, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        from torchrl_perf.kernels import narrow

        return narrow.backward(grad, y, x, activation, "tf32" if matmul_takes_tf32() else "ieee")
    d = grad * _slope(y, activation)
    return d.t() @ x, d.sum(0)


def _slope(y: Tensor, activation: str) -> Tensor:
    """The slope of an activation where its value is y."""
    if activation == "tanh":
        return 1 - y * y
    below = {"relu": torch.zeros_like(y), "elu": y + 1, "leaky_relu": torch.full_like(y, 0.01)}[activation]
    return torch.where(y > 0, 1.0, below)


@_layer.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_layer_backward.register_fake
def _(grad: Tensor, y: Tensor, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape[1], x.shape[1]), y.new_empty(y.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.activation = inputs
    ctx.save_for_backward(output, x, weight, bias)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, x, weight, bias = ctx.saved_tensors
    if torch.is_grad_enabled():  # they are to be differentiated themselves
        found = graphed_gradients(
            lambda *of: _reference(*of, ctx.activation), (x, weight, bias), ctx.needs_input_grad[:3], grad
        )
        return *found, None
    of_weight, of_bias = torch.ops.torchrl_perf.narrow_layer_backward(grad, y, x, ctx.activation)
    return None, of_weight, of_bias, None


_layer.register_autograd(_gradients, setup_context=_setup_context)
