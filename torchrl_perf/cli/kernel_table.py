"""What ``torchrl-perf doctor --kernels`` prints: times of perceptrons on this GPU, and the tiles of their kernels."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrl_perf.functional.chain import chain_tiles
from torchrl_perf.functional.members import Members
from torchrl_perf.functional.mlp import fusable
from torchrl_perf.functional.resident import stays_on_chip
from torchrl_perf.modules import FusedMLP
from torchrl_perf.modules.ensemble import EnsembleMLP
from torchrl_perf.modules.member_networks import members_of_ensemble
from torchrl_perf.runtime import Acceleration, capture, time_cuda

__all__ = ["CRITICS", "SHAPES", "kernel_table"]

SHAPES = (
    (65_536, 4, (64, 64), 2, "tanh"),
    (65_536, 4, (256, 256), 2, "tanh"),
    (24_576, 48, (512, 256, 128), 12, "elu"),
    (8_192, 23, (512, 512), 1, "relu"),
    (8_192, 23, (1024, 1024), 1, "silu"),
)
"""Rows, inputs, hidden widths, outputs and activation."""
CRITICS = (
    (256, 2, 23, (256, 256), "relu", "tf32"),
    (256, 5, 23, (256, 256), "relu", "tf32"),
    (8_192, 2, 23, (512, 256, 128), "relu", "bf16"),
    (32_768, 2, 23, (512, 256, 128), "relu", "bf16"),
)
"""Rows, members of an ensemble of critics, inputs, hidden widths, activation and precision."""


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
    head = f"{'rows':>7} {'network':24} {'activation':10} {'precision':9} {'kernel':>8} {'layers':>8}  us"
    yield f"{head}  tiles of forward and backward: rows, units, depth, warps, stages, registers, pair"
    for rows, inputs, hidden, outputs, activation in SHAPES:
        for precision in precisions:
            net = FusedMLP(
                inputs, outputs, hidden_sizes=hidden, activation=activation, precision=precision, device=device
            )
            x = torch.randn(rows, inputs, device=device)
            times = []
            for net.fuses in (True, False):
                times.append(_time(partial(_gradients, net, x), precision, device))
            yield f"{_line(rows, (inputs, *hidden, outputs), activation, precision, times)}      {_tiles(net, x)}"
    for rows, size, inputs, hidden, activation, precision in CRITICS:
        net = EnsembleMLP(
            size, inputs, 1, hidden_sizes=hidden, activation=activation, precision=precision, device=device
        )
        members, x = cast("Members", members_of_ensemble(net)), torch.randn(rows, inputs, device=device)
        passes = (partial(_of_members, members, x), partial(_gradients, net, x))
        times = [_time(call, precision, device) for call in passes]
        line = _line(rows, (inputs, *hidden, 1), activation, precision, times, f"{size} x ")
        yield f"{line}      {' '.join(map(str, members.tiles(rows)))}"
    yield "tiles of critics: of forward, backward and gradients; rows, units, depth, warps, stages, parts of the rows"


def _time(call: Callable[[], object], precision: str, device: torch.device | str) -> float:
    """Microseconds of a call in a graph."""
    with Acceleration(precision).active(device):  # pyright: ignore[reportArgumentType]
        return time_cuda(capture(call, audit=False), 20).median


def _line(
    rows: int, sizes: Sequence[int], activation: str, precision: str, times: Sequence[float], members: str = ""
) -> str:
    """A network and both of its times."""
    shape = members + "-".join(map(str, sizes))
    return f"{rows:>7} {shape:24} {activation:10} {precision:9} {times[0]:8.1f} {times[1]:8.1f}"


def _of_members(net: Members, x: Tensor) -> tuple[Any, ...]:
    """All gradients of an ensemble, as an update of critics asks for them."""
    y, kept = net.forward(x[None])
    return net.backward(torch.ones_like(y), kept, x[None])


def _gradients(net: nn.Module, x: Tensor) -> tuple[Any, ...]:
    return torch.autograd.grad(net(x).sum(), list(net.parameters()))


def _tiles(net: FusedMLP, x: Tensor) -> str:
    """The tiles of a network; nothing for one whose weights lie on chip."""
    params = [tensor for layer in net if isinstance(layer, nn.Linear) for tensor in (layer.weight, layer.bias)]
    if (len(params) == 6 and fusable(x, params)) or stays_on_chip(x, params, net.activation, 0.0, net.precision):
        return "weights on chip"
    return " ".join(map(str, chain_tiles(x, params, net.activation, precision=net.precision)))
