"""A layer of minGRU (arXiv:2410.01201) over sequences: the map of its inputs and the recurrence as one operator.

On CUDA a narrow layer of few streams is one launch a direction, and what the map gives never lies in memory. Everything
else is a matrix product and :func:`~torchrl_perf.functional.memory.linear.min_gru_sequence`. Dimension key: ``I``
inputs, ``H`` hidden units.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrl_perf.functional.memory.linear import min_gru_sequence, min_gru_slopes
from torchrl_perf.functional.memory.rows import dense, grad_or_none
from torchrl_perf.kernels import fits_one_layer, layer_kernels, matmul_takes_tf32
from torchrl_perf.runtime.upstream.tensors import is_transformed

__all__ = ["min_gru_layer"]


def min_gru_layer(x: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """All steps of ``[N, T]`` sequences; a row's state is 0 before each step that begins an episode.

    Args:
        x: ``[N, T, I]``.
        initial: h before the first step, ``[N, H]``.
        begins: bool ``[N, T]``, True where an episode begins.
        weight: of gate and candidate, ``[2 H, I]``.
        bias: ``[2 H]``, or None.

    Returns:
        h of each step, ``[N, T, H]``, in ``initial``'s dtype.
    """
    if not is_transformed() and fits_one_layer(x, initial, weight, bias):
        return torch.ops.torchrl_perf.min_gru_layer(x, initial.contiguous(), begins, weight, bias)
    return _parts(x, initial, begins, weight, bias)


def _parts(x: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same of the map and the sequence."""
    return min_gru_sequence(torch.nn.functional.linear(x, weight, bias), initial, begins)


def _precision() -> str:
    """That of PyTorch's own matrix products on CUDA."""
    return "tf32" if matmul_takes_tf32() else "ieee"


@torch.library.custom_op("torchrl_perf::min_gru_layer", mutates_args=())
def _layer(x: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if kernels := layer_kernels(x):
        return kernels.forward(x, initial, begins, weight.contiguous(), dense(bias), _precision())
    return _parts(x, initial, begins, weight, bias)


@torch.library.custom_op("torchrl_perf::min_gru_layer_backward", mutates_args=())
def _layer_backward(
    grad: Tensor, states: Tensor, x: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if kernels := layer_kernels(x):
        return kernels.backward(grad, states, x, initial, begins, weight.contiguous(), dense(bias), _precision())
    slopes = torch.ops.torchrl_perf.min_gru_sequence_backward
    return _slopes(slopes, grad, states, x, initial, begins, weight, bias)


def _slopes(
    of_sequence: Callable[..., tuple[Tensor, Tensor]], grad: Tensor, states: Tensor, x: Tensor, initial: Tensor,
    begins: Tensor, weight: Tensor, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, first state, weight and bias of those of a sequence."""
    inputs = torch.nn.functional.linear(x, weight, bias)
    of_inputs, of_initial = of_sequence(grad, states, inputs, initial, begins)
    rows = of_inputs.flatten(0, 1)
    return of_inputs @ weight, of_initial, rows.t() @ x.flatten(0, 1), rows.sum(0)


@_layer.register_fake
def _(x: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:2], len(weight) // 2)


@_layer_backward.register_fake
def _(
    grad: Tensor, states: Tensor, x: Tensor, initial: Tensor, begins: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = x.shape, initial.shape, weight.shape, weight.shape[:1]
    return tuple(x.new_empty(shape) for shape in shapes)  # pyright: ignore[reportReturnType]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, *(each for each in inputs if each is not None))
    ctx.has_bias = inputs[-1] is not None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    known = ctx.saved_tensors if ctx.has_bias else (*ctx.saved_tensors, None)
    if torch.is_grad_enabled():  # they are to be differentiated themselves
        found = _slopes(min_gru_slopes, grad, *known)
    else:
        found = torch.ops.torchrl_perf.min_gru_layer_backward(grad, *known)
    of_x, of_initial, of_weight, of_bias = found
    return of_x, of_initial, None, of_weight, grad_or_none(of_bias, ctx.has_bias)


_layer.register_autograd(_gradients, setup_context=_setup_context)
