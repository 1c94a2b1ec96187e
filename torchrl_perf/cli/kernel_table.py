"""What ``torchrl-perf doctor --kernels`` prints: times of perceptrons on this GPU, and the tiles that were chosen."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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
    yield f"{'rows':>7} {'network':22} {'activation':10} {'precision':9} {'kernel':>8} {'layers':>8}  us"
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
            yield f"{rows:>7} {shape:22} {activation:10} {precision:9} {times[0]:8.1f} {times[1]:8.1f}"
    yield from _chosen()


def _gradients(net: FusedMLP, x: Tensor) -> tuple[Any, ...]:
    return torch.autograd.grad(net(x).sum(), list(net.parameters()))


def _chosen() -> Iterator[str]:
    from torchrl_perf.kernels.chain_blocks import TABLE

    yield ""
    yield "tiles chosen: rows, units, depth of a product, warps, stages, registers, pair; us of each that was tried"
    for (direction, _, *shape, rows), choice in TABLE.items():
        tried = ", ".join(f"{tuple(blocks)} {time:.1f}" for blocks, time in choice.microseconds.items())
        yield f"{rows:>7} {' '.join(map(str, shape))} {direction}: {tuple(choice.blocks)} of {tried}"
