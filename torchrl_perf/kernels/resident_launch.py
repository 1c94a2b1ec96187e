"""Launches of the kernels of perceptrons whose weights stay on chip.

Import this module only where Triton is.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from torchrl_perf.kernels.activations import ACTIVATIONS
from torchrl_perf.kernels.chain_launch import Network, padded
from torchrl_perf.kernels.launch import launch
from torchrl_perf.kernels.resident import (
    largest_kernel,
    pack_kernel,
    resident_backward_kernel,
    resident_forward_kernel,
    resident_sums_kernel,
)

ROWS = 128
"""Rows of a block, which two groups of four warps share."""
PART = 128
"""Units whose sums, of that many rows, leave room in the registers for what they are made of: half of the widest."""

PROGRAMS = 128
"""Programs that look for the largest gradients: a walk through more rows than a few would wait for memory each time."""


def half_dtype(net: Network) -> torch.dtype:
    """Of the operands of the large products."""
    return torch.bfloat16 if net.precision == "bf16" else torch.float16


def _scale(net: Network) -> int:
    """What weights are multiplied with; 1 where 16 bits are what was asked for."""
    return 1 if net.precision in ("bf16", "fp16") else 16


def _part(width: int) -> int:
    """Units of a layer that are in registers at once: all, or half of the widest."""
    return min(padded(width), PART)


def _constants(net: Network) -> dict[str, Any]:
    sizes = dict(zip(("IN", "H1", "H2", "OUT"), net.sizes, strict=True))
    pads = padded(net.sizes[0] + 1), *(padded(size) for size in net.sizes[1:])
    return sizes | dict(zip(("IN_PAD", "PAD1", "PAD2", "OUT_PAD"), pads, strict=True))


def forward(
    x: Tensor, params: list[Tensor], net: Network, start: int, keep: bool, processors: int
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, OUT]`` of ``x [B, IN]``, and what backward needs: weights and both layers' units in 16 bits.

    Args:
        x: float32, any strides.
        params: weight and bias of each layer, contiguous float32.
        net: the perceptron.
        start: where units begin, behind the weights.
        keep: whether a backward pass follows; else the second tensor is empty.
        processors: of the device.
    """
    count, (_, first, units, outputs) = x.shape[0], net.sizes
    y = x.new_empty(count, outputs)
    kept = torch.empty(start + (count * (first + units) if keep else 0), dtype=half_dtype(net), device=x.device)
    numbers = units * (first + outputs)
    launch(
        pack_kernel, (triton.cdiv(numbers, 1024),), (params[2], params[4], kept),
        {"SECOND": units * first, "LAST": outputs * units, "SPAN": 1024, "SCALE": _scale(net)},
        num_warps=4,
    )  # fmt: skip
    below = kept[start:]
    launch(
        resident_forward_kernel, (min(triton.cdiv(count, ROWS), processors),),
        (x, params[0], params[1], kept, params[3], params[5], y, below, below[count * first :], count, *x.stride()),
        {
            **_constants(net), "ROWS": ROWS, "ACT": ACTIVATIONS[net.activation], "SAVE": keep, "SCALE": _scale(net),
            "PRECISION": net.precision, "FAST": not triton.knobs.runtime.interpret,
            "PART": _part(net.sizes[2]),
        },
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return y, kept if keep else kept.new_empty(0)


def backward(
    grad: Tensor, x: Tensor, last: Tensor, net: Network, start: int, kept: Tensor, processors: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the second layer in 16 bits, what they were divided by (0-d), and two tensors of sums.

    They are ``[blocks, S]``, to be summed: of the biases of the first layer and of the last and the weights of the
    first; and of the biases of the second and the weights of the last.

    Args:
        grad: of the outputs, ``[B, OUT]`` float32, any strides; B > 0.
        x: as for :func:`forward`.
        last: weights of the last layer.
        net: the perceptron.
        start: as for :func:`forward`.
        kept: of :func:`forward`.
        processors: of the device.
    """
    inputs, first, units, outputs = net.sizes
    count, is_scaled, below = x.shape[0], _scale(net) != 1, kept[start:]
    blocks = triton.cdiv(count, ROWS)
    d = torch.empty(count, units, dtype=kept.dtype, device=x.device)
    sums = grad.new_empty(blocks, first + outputs + first * inputs)
    scale = grad.new_empty(()) if is_scaled else grad.new_ones(())
    large = grad.new_empty(PROGRAMS if is_scaled else 0, padded(outputs))
    if is_scaled:
        launch(
            largest_kernel, (PROGRAMS,), (grad, large, count, *grad.stride()),
            {"OUT": outputs, "OUT_PAD": padded(outputs), "ROWS": 256}, num_warps=4,
        )  # fmt: skip
    launch(
        resident_backward_kernel, (min(blocks, processors),),
        (
            x, grad, kept, last, below, below[count * first :], large, d, scale, sums, count, *x.stride(),
            *grad.stride(),
        ),
        {
            **_constants(net), "ROWS": ROWS, "ACT": ACTIVATIONS[net.activation], "LARGE": PROGRAMS,
            "SCALE": _scale(net), "PRECISION": net.precision, "PART1": _part(first), "PART2": _part(units),
        },
        num_warps=8, num_stages=1,
    )  # fmt: skip
    programs = min(triton.cdiv(count, 64), 2 * processors)
    lasts = grad.new_empty(programs, units + outputs * units)
    constants = _constants(net)
    launch(
        resident_sums_kernel, (programs,), (grad, last, below[count * first :], lasts, count, *grad.stride()),
        {
            **{name: constants[name] for name in ("H2", "OUT", "PAD2", "OUT_PAD")}, "ROWS": 64,
            "ACT": ACTIVATIONS[net.activation], "SCALE": _scale(net),
        },
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return d, scale, sums, lasts
