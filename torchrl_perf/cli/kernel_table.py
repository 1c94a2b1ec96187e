"""What ``torchrl-perf doctor --kernels`` prints: times of perceptrons on this GPU, and the tiles of their kernels."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_perf.functional.chain import chain_tiles
from torchrl_perf.functional.mlp import fusable
from torchrl_perf.functional.resident import stays_on_chip
from torchrl_perf.modules import FusedMLP
from torchrl_perf.runtime import Acceleration, capture, time_cuda

__all__ = ["SHAPES", "kernel_table"]

SHAPES = (
    (65_536, 4, (64, 64), 2, "tanh"),
    (65_536, 4, (256, 256), 2, "tanh"),
    (24_576, 48, (512, 256, 128), 12, "elu"),
    (8_192, 23, (512, 512), 1, "relu"),
    (8_192, 23, (1024, 1024), 1, "silu"),
)
"""Rows, inputs, hidden widths, outputs and activation."""


def kernel_table(device: torch.device | str, precisions: tuple[str, ...] = ("tf32", "bf16")) -> Iterator[str]:
    """Lines of the table: microseconds of a forward and a backward pass in a graph, as a kernel and layer by layer.

    Args:
        device: a CUDA device.
        precisions: of the products.

    Raises:
        ValueError: without CUDA.
    """
    if not torch.cuda.is_available():
        raise ValueError("kernels: expected a CUDA device, received none. Remedy: leave --kernels out.")
    head = f"{'rows':>7} {'network':22} {'activation':10} {'precision':9} {'kernel':>8} {'layers':>8}  us"
    yield f"{head}  tiles of forward and backward: rows, units, depth, warps, stages, registers, pair"
    for rows, inputs, hidden, outputs, activation in SHAPES:
        for precision in precisions:
            net = FusedMLP(
                inputs, outputs, hidden_sizes=hidden, activation=activation, precision=precision, device=device
            )
            x = torch.randn(rows, inputs, device=device)
            times = []
            for net.fuses in (True, False):
                with Acceleration(precision).active(device):  # pyright: ignore[reportArgumentType]
                    times.append(time_cuda(capture(lambda net=net, x=x: _gradients(net, x), audit=False), 20).median)
            shape = "-".join(map(str, (inputs, *hidden, outputs)))
            line = f"{rows:>7} {shape:22} {activation:10} {precision:9} {times[0]:8.1f} {times[1]:8.1f}"
            yield f"{line}      {_tiles(net, x)}"


def _gradients(net: FusedMLP, x: Tensor) -> tuple[Any, ...]:
    return torch.autograd.grad(net(x).sum(), list(net.parameters()))


def _tiles(net: FusedMLP, x: Tensor) -> str:
    """The tiles of a network; nothing for one whose weights lie on chip."""
    params = [tensor for layer in net if isinstance(layer, nn.Linear) for tensor in (layer.weight, layer.bias)]
    if (len(params) == 6 and fusable(x, params)) or stays_on_chip(x, params, net.activation, 0.0, net.precision):
        return "weights on chip"
    return " ".join(map(str, chain_tiles(x, params, net.activation, precision=net.precision)))
