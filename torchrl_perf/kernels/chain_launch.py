"""Launches of the kernels of perceptrons of any depth and width.

Import this module only where Triton is.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from torchrl_perf.kernels.activations import ACTIVATIONS, FROM_VALUE
from torchrl_perf.kernels.chain import backward_kernel, forward_kernel
from torchrl_perf.kernels.launch import launch

Norms = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


class Blocks(NamedTuple):
    """Tiles of a launch: rows of a program, units and depth of a product, warps, stages of loads ahead, registers."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    registers: int = 255
    """Most of a thread: fewer let several programs share a processor, and wait for memory in turn."""
    pair: bool = False
    """Whether the units next to the inputs, or outputs, are made where the next layer needs them."""


class Network(NamedTuple):
    """What a launch needs to know of a perceptron beside its tensors."""

    sizes: tuple[int, ...]
    """Of the input, the hidden layers and the output."""
    activation: str
    eps: float
    """Of layer norm; 0 without it."""
    precision: str

    @property
    def offsets(self) -> tuple[int, ...]:
        """Sum of the widths before each hidden layer, and of all."""
        return tuple(itertools.accumulate(self.sizes[1:-1], initial=0))

    @property
    def keeps_input(self) -> bool:
        """Whether the slope of the activation needs what it was applied to."""
        return self.activation not in FROM_VALUE

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden units that are kept and of their gradients."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)


def height(rows: int) -> int:
    """Rows that a kept layer has room for, so that each layer begins at a multiple of 16 numbers."""
    return (rows + 15) // 16 * 16


def padded(size: int, least: int = 16) -> int:
    """The next power of two, of at least what a product of tiles needs."""
    return max(least, triton.next_power_of_2(size))


def _constants(net: Network, widths: Sequence[int], depths: Sequence[int], blocks: Blocks) -> dict[str, Any]:
    pads = tuple(padded(width) for width in net.sizes[1:-1])
    return {
        "SIZES": net.sizes,
        "OFFSETS": net.offsets,
        "COLS": tuple(min(blocks.cols, padded(width)) for width in widths),
        "DEPTHS": tuple(min(blocks.depth, padded(depth)) for depth in depths),
        "PADS": pads,
        "ROWS": blocks.rows,
        "NORM_ROWS": max(1, min(blocks.rows, 4096 // max(pads, default=16))),
        "ACT": ACTIVATIONS[net.activation],
        "NORM": net.eps > 0,
        "EPS": net.eps,
    }


def _pair(net: Network, blocks: Blocks, small: int, widths: Sequence[int]) -> int:
    """Padded inputs, or outputs, of a launch that makes the units next to them; 0 for one that does not.

    Args:
        net: the perceptron.
        blocks: of the launch.
        small: inputs or outputs.
        widths: of the hidden layers, without the one next to those: the tiles hold all units of the first.
    """
    fits = blocks.pair and not net.eps and len(widths) > 0 and padded(small) <= 64 and blocks.cols >= widths[0]
    return padded(small) if fits else 0


def _is_fast(net: Network) -> bool:
    """Whether tanh is the hardware's, which Triton's interpreter does not have."""
    return net.precision != "ieee" and not triton.knobs.runtime.interpret


def forward(
    x: Tensor,
    net: Network,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...],
    norms: Norms,
    keep: bool,
    blocks: Blocks,
    processors: int,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, OUT]`` of ``x [B, IN]`` float32, and what backward needs: hidden units, then inputs of activations.

    Args:
        x: any strides.
        net: the perceptron.
        weights: of the layers, contiguous ``[OUT, IN]``, float32 or in ``net.dtype``.
        biases: of the layers.
        norms: gains and shifts of the hidden layers' layer norm, else any tensors.
        keep: whether there will be a backward pass.
        blocks: of this launch.
        processors: of the device.
    """
    rows = x.shape[0]
    y = x.new_empty(rows, net.sizes[-1])
    tiles = triton.cdiv(rows, blocks.rows)
    programs = tiles if keep else min(tiles, 4 * processors)
    space = height(rows) if keep else programs * blocks.rows
    kept = x.new_empty(space * net.offsets[-1] * (2 if net.keeps_input or net.eps else 1), dtype=net.dtype)
    if rows:
        launch(
            forward_kernel, (programs,),
            (x, weights, biases, *norms, y, kept, kept[space * net.offsets[-1] :] if net.keeps_input or net.eps
             else kept, rows, x.stride(0), x.stride(1)),
            {
                **_constants(net, net.sizes[1:], net.sizes[:-1], blocks), "KEEP_Z": net.keeps_input, "SAVE": keep,
            "PAIR": _pair(net, blocks, net.sizes[0], net.sizes[2:-1]),
                "PRECISION": net.precision, "FAST": _is_fast(net),
            },
            num_warps=blocks.warps, num_stages=blocks.stages, maxnreg=blocks.registers,
        )  # fmt: skip
    return y, kept if keep else kept.new_empty(0)


def backward(
    grad: Tensor,
    x: Tensor,
    net: Network,
    transposed: tuple[Tensor, ...],
    norms: Norms,
    kept: Tensor,
    needs_x: bool,
    on_chip: tuple[bool, bool],
    blocks: Blocks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients before the activations, of the vectors of parameters, and of the input.

    Args:
        grad: of the outputs, ``[B, OUT]`` float32, any strides; B > 0.
        x: as for :func:`forward`.
        net: the perceptron.
        transposed: weights, contiguous ``[IN, OUT]``.
        norms: as for :func:`forward`.
        kept: what :func:`forward` kept.
        needs_x: whether the gradient of the input is asked for; else it is empty.
        on_chip: whether the gradients of the first layer's weights, and of the last one's, are asked for.
        blocks: of this launch.

    Returns:
        ``d``: of what the hidden layers' linear maps gave, one layer after the other, each ``[height(B), H]``;
        ``[programs, S]`` whose sum is that of the biases, gains and shifts, and of the weights of the last and of the
        first layer where they are asked for, in this order; and ``[B, IN]``.
    """
    rows, hidden, outputs = grad.shape[0], net.offsets[-1], net.sizes[-1]
    d = kept.new_empty(height(rows) * hidden)
    dx = grad.new_empty(rows if needs_x else 0, net.sizes[0])
    tiles = triton.cdiv(rows, blocks.rows)
    of_first, of_last = on_chip
    parts = (outputs * net.sizes[-2] if of_last else 0) + (net.sizes[0] * net.sizes[1] if of_first else 0)
    sums = grad.new_empty(tiles, hidden * (3 if net.eps else 1) + outputs + parts)
    launch(
        backward_kernel, (tiles,),
        (
            x, grad, transposed, *norms, kept,
            kept[height(rows) * hidden :] if net.keeps_input or net.eps else kept,
            d, dx, sums, rows, *x.stride(), *grad.stride(),
        ),
        {
            **_constants(net, net.sizes, net.sizes[1:], blocks), "KEEP_Z": net.keeps_input, "NEEDS_X": needs_x,
            "PAIR": _pair(net, blocks, outputs, net.sizes[1:-2][::-1]),
            "IN_PAD": padded(net.sizes[0]) if of_first else 0, "OUT_PAD": padded(outputs) if of_last else 0,
            "PRECISION": net.precision, "FAST": _is_fast(net),
        },
        num_warps=blocks.warps, num_stages=blocks.stages, maxnreg=blocks.registers,
    )  # fmt: skip
    return d, sums, dx
