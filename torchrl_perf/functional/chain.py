"""A perceptron of any depth and width as one differentiable function: a kernel for all its layers on CUDA."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.functional import resident
from torchrl_perf.functional.twice import graphed_gradients
from torchrl_perf.kernels import processors

ACTIVATIONS = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "mish": F.mish,
}
"""Functions by the names of activations."""
WIDEST_NORM = 4096
SMALL = 32
"""Outputs, and in 16 bits also inputs, up to which the gradient of a layer's weights is our own kernel's."""
ON_CHIP = 8192
"""Numbers of such a gradient up to which the backward pass sums it on chip, as it goes through the rows."""


def chain(x: Tensor, params: list[Tensor], activation: str = "tanh", eps: float = 0.0) -> Tensor:
    """Linear maps with an activation between each two of them: the reference that the kernels follow.

    Args:
        x: ``[*, IN]``, any float dtype.
        params: weight ``[OUT, IN]`` and bias ``[OUT]`` of each layer; with layer norm gain and shift ``[OUT]`` after
            those of each layer but the last.
        activation: one of :data:`ACTIVATIONS`.
        eps: of layer norm before each activation (arXiv:1607.06450); 0 for none.

    Returns:
        ``[*, OUT]``.
    """
    weights, biases, (gains, shifts) = _parts(params, eps)
    for number, (weight, bias) in enumerate(zip(weights[:-1], biases[:-1], strict=True)):
        x = F.linear(x, weight, bias)
        if eps:
            x = F.layer_norm(x, x.shape[-1:], gains[number], shifts[number], eps)
        x = ACTIVATIONS[activation](x)
    return F.linear(x, weights[-1], biases[-1])


def _parts(params: list[Tensor], eps: float) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Any]:
    """Weights, biases, and gains and shifts of layer norm (biases in their place where there is none)."""
    step = 4 if eps else 2
    weights, biases = tuple(params[::step]), tuple(params[1::step])
    return weights, biases, (tuple(params[2::4]), tuple(params[3::4])) if eps else (biases, biases)


def runs_as_chain(x: Tensor, params: list[Tensor], eps: float = 0.0) -> bool:
    """Whether :func:`fused_chain` takes these arguments: float32 on CUDA, contiguous parameters whose sizes fit.

    Layer norm is taken up to 4,096 units a layer.
    """
    weights, biases, (gains, shifts) = _parts(params, eps)
    sizes = [x.shape[-1], *(w.shape[0] for w in weights)]
    return (
        x.is_cuda
        and x.dtype == torch.float32
        and all(p.dtype == torch.float32 and p.is_cuda and p.is_contiguous() for p in params)
        and all(
            w.shape == (after, before) for w, (before, after) in zip(weights, itertools.pairwise(sizes), strict=True)
        )
        and all(
            v.shape == (size,) for each in (biases, gains, shifts) for v, size in zip(each, sizes[1:], strict=False)
        )
        and (not eps or max(sizes[1:-1], default=1) <= WIDEST_NORM)
    )


def fused_chain(
    x: Tensor, params: list[Tensor], activation: str = "tanh", eps: float = 0.0, precision: str = "tf32"
) -> Tensor:
    """:func:`chain` in one kernel forward, and one backward beside the products for the weights' gradients, on CUDA.

    Args:
        x: ``[B, IN]`` float32 on CUDA, any strides.
        params: as in :func:`chain`, contiguous float32.
        activation: one of :data:`ACTIVATIONS`.
        eps: as in :func:`chain`.
        precision: of the matrix products: ``"tf32"``, ``"bf16"`` or ``"fp16"`` (operands rounded, hidden units kept in
            16 bits, sums in float32), or ``"ieee"`` (float32, many times slower). In ``"fp16"`` gradients below 6e-5
            lose bits, as those of a mean over many rows do: scale the loss, as the trainers do.

    Large batches of two hidden layers up to 256 wide run as :func:`~torchrl_perf.functional.resident.resident_chain`.

    Returns:
        ``[B, OUT]`` float32. Equal to :func:`chain` within 2e-3 of its scale (``ieee``: 1e-5, ``bf16``: 2e-2).
        Gradients that are differentiated once more are those of :func:`chain`.
    """
    if resident.stays_on_chip(x, params, activation, eps, precision):
        return resident.resident_chain(x, params, activation, precision)
    keep = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in params))
    return torch.ops.torchrl_perf.chain_forward(x, params, activation, eps, precision, keep)[0]


def _network(x: Tensor, weights: tuple[Tensor, ...], activation: str, eps: float, precision: str) -> Any:
    from torchrl_perf.kernels.chain_launch import Network  # Triton is loaded where CUDA is used, not at import

    return Network((x.shape[1], *(w.shape[0] for w in weights)), activation, eps, precision)


def chain_tiles(
    x: Tensor, params: list[Tensor], activation: str = "tanh", eps: float = 0.0, precision: str = "tf32"
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tiles of :func:`fused_chain` for these arguments, forward and backward.

    Each is rows of a program, units and depth of a product, warps, stages of loads ahead, registers, and whether units
    next to inputs or outputs are made where the next layer needs them. It needs Triton.
    """
    from torchrl_perf.kernels import chain_blocks

    net, room = _network(x, _parts(params, eps)[0], activation, eps, precision), resident.room(x.device)
    forward, backward = (chain_blocks.blocks_for(way, net, x.shape[0], room) for way in ("forward", "backward"))
    return tuple(forward), tuple(backward)


@torch.library.custom_op("torchrl_perf::chain_forward", mutates_args=())
def _chain_forward(
    x: Tensor, params: list[Tensor], activation: str, eps: float, precision: str, keep: bool
) -> tuple[Tensor, Tensor]:
    from torchrl_perf.kernels import chain_blocks
    from torchrl_perf.kernels import chain_launch as kernel

    weights, *vectors = _parts(params, eps)
    net = _network(x, weights, activation, eps, precision)
    if net.dtype != torch.float32 and x.shape[0] >= 4096:  # fewer rows are done before the weights are converted
        weights = tuple(w.to(net.dtype) for w in weights)
    blocks = chain_blocks.blocks_for("forward", net, x.shape[0], resident.room(x.device))
    return kernel.forward(x, net, weights, *vectors, keep, blocks, processors(x.device))


@_chain_forward.register_fake
def _(
    x: Tensor, params: list[Tensor], activation: str, eps: float, precision: str, keep: bool
) -> tuple[Tensor, Tensor]:
    weights, *_ = _parts(params, eps)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    copies = 2 if eps or activation in ("silu", "gelu", "mish") else 1
    hidden = sum(w.shape[0] for w in weights[:-1])
    space = (x.shape[0] + 15) // 16 * 16 * hidden * copies
    return x.new_empty(x.shape[0], weights[-1].shape[0]), x.new_empty(space if keep else 0, dtype=dtype)


def _on_chip(weights: Sequence[Tensor], eps: float, wanted: Sequence[bool]) -> tuple[bool, bool]:
    """Whether the backward pass itself gives the gradients of the first layer's weights, and of the last one's."""
    if eps or len(weights) < 2:
        return False, False
    (first, inputs), (outputs, last) = weights[0].shape, weights[-1].shape
    of_first = wanted[0] and inputs <= SMALL and inputs * first <= ON_CHIP
    return bool(of_first), bool(wanted[-1] and outputs <= SMALL and outputs * last <= ON_CHIP)


def _apart(weights: Sequence[Tensor], eps: float, wanted: Sequence[bool]) -> list[int]:
    """Numbers of the layers whose weights' gradients are wanted, and not given by the backward pass itself."""
    of_first, of_last = _on_chip(weights, eps, wanted)
    return [number for number in range(of_first, len(weights) - of_last) if wanted[number]]


def _sums(weights: Sequence[Tensor], eps: float, wanted: Sequence[bool]) -> list[int]:
    """Sizes of what is summed on chip: of biases, gains and shifts, and of the weights of the last and first layer."""
    of_first, of_last = _on_chip(weights, eps, wanted)
    widths = [w.shape[0] for w in weights]
    products = [weights[-1].numel()] * of_last + [weights[0].numel()] * of_first
    return [*widths, *(widths[:-1] * 2 if eps else []), *products]


@torch.library.custom_op("torchrl_perf::chain_backward", mutates_args=())
def _chain_backward(
    grad: Tensor, x: Tensor, params: list[Tensor], kept: Tensor, activation: str, eps: float, precision: str,
    needs_x: bool, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """The gradients of the weights that are not summed on chip, all that are in one vector, and that of the input."""
    from torchrl_perf.kernels import chain_blocks
    from torchrl_perf.kernels import chain_launch as kernel

    weights, _, norms = _parts(params, eps)
    left = _apart(weights, eps, wanted)
    rows = x.shape[0]
    if rows == 0:
        zeros = [torch.zeros_like(weights[number]) for number in left]
        return [*zeros, grad.new_zeros(sum(_sums(weights, eps, wanted))), x.new_zeros(0, x.shape[1])]
    net = _network(x, weights, activation, eps, precision)
    transposed = tuple(w.t().contiguous().to(net.dtype) if n or needs_x else w for n, w in enumerate(weights))
    blocks = chain_blocks.blocks_for("backward", net, rows, resident.room(x.device))
    on_chip = _on_chip(weights, eps, wanted)
    d, sums, dx = kernel.backward(grad, x, net, transposed, norms, kept, needs_x, on_chip, blocks)
    height = kernel.height(rows)
    spans = [(height * start, width) for start, width in zip(net.offsets, net.sizes[1:-1], strict=False)]
    above = [*(d[at : at + rows * width].view(rows, width) for at, width in spans), grad]
    below = [x, *(kept[at : at + rows * width].view(rows, width) for at, width in spans)]
    products = [_weight_gradient(above[number], below[number], precision) for number in left]
    return [*products, sums.sum(0) if sums.shape[0] > 1 else sums[0], dx]


def _weight_gradient(d: Tensor, a: Tensor, precision: str) -> Tensor:
    """``d.T @ a`` in float32."""
    from torchrl_perf.kernels.outer import outer

    is_16_bit = precision in ("bf16", "fp16")
    if min(d.shape[1], a.shape[1] if is_16_bit else SMALL + 1) <= SMALL or not d.is_cuda:
        return outer(d, a, precision, processors(d.device))
    if is_16_bit:
        dtype = d.dtype if d.dtype != torch.float32 else a.dtype
        return torch.mm(d.to(dtype).t(), a.to(dtype), out_dtype=torch.float32)
    return torch.mm(d.t(), a)


@_chain_backward.register_fake
def _(
    grad: Tensor, x: Tensor, params: list[Tensor], kept: Tensor, activation: str, eps: float, precision: str,
    needs_x: bool, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    weights, *_ = _parts(params, eps)
    products = [torch.empty_like(weights[number]) for number in _apart(weights, eps, wanted)]
    vector = grad.new_empty(sum(_sums(weights, eps, wanted)))
    return [*products, vector, x.new_empty(x.shape[0] if needs_x else 0, x.shape[1])]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, params, *options, _ = inputs
    ctx.save_for_backward(x, *params, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.options = options


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | list[Tensor | None] | None, ...]:
    x, *params, kept = ctx.saved_tensors
    activation, eps, precision = ctx.options
    weights, *_ = _parts(params, eps)
    needs_x, needs = ctx.needs_input_grad[:2]
    if torch.is_grad_enabled():  # they are to be differentiated themselves
        of_x, *of_params = graphed_gradients(
            lambda x, *params: chain(x, list(params), activation, eps), (x, *params), (needs_x, *needs), grad
        )
        return of_x, of_params, None, None, None, None
    wanted = list(needs[:: 4 if eps else 2])
    *products, vector, dx = torch.ops.torchrl_perf.chain_backward(
        grad, x, params, kept, activation, eps, precision, needs_x, wanted
    )
    parts = list(vector.split(_sums(weights, eps, wanted)))
    of_weights = dict(zip(_apart(weights, eps, wanted), products, strict=True))
    of_first, of_last = _on_chip(weights, eps, wanted)
    count = len(weights)
    if of_first:
        of_weights[0] = parts.pop().view_as(weights[0])
    if of_last:
        of_weights[count - 1] = parts.pop().view_as(weights[-1])
    grads: list[Tensor | None] = []
    for number in range(count):
        grads += [of_weights.get(number), parts[number]]
        grads += [parts[count + number], parts[2 * count - 1 + number]] if eps and number < count - 1 else []
    grads = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return (dx if needs_x else None), grads, None, None, None, None


_chain_forward.register_autograd(_backward, setup_context=_setup_context)
