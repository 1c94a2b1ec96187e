"""Launches of perceptrons of one shape on many rows, layer by layer.

What is kept lies as :mod:`torchrl_perf.kernels.members_launch` keeps it, whose gradients of the parameters serve here,
too. Import this module only where Triton is.
"""

import torch
import triton
from torch import Tensor

from torchrl_perf.kernels.activations import ACTIVATIONS
from torchrl_perf.kernels.chain_launch import Network, padded
from torchrl_perf.kernels.launch import launch
from torchrl_perf.kernels.layered import down_kernel, up_kernel
from torchrl_perf.kernels.members_launch import Kept, Tiles, _last

__all__ = ["ROWS", "backward", "forward", "takes"]

ROWS = 16_384
"""Rows from which a layer fills the device."""
WIDE = 512
"""Width from which layers were measured to be faster alone: with all of them in a launch such a one is two tiles."""
TILES = Tiles(128, 128, 64, 4, 3)
"""Of products; several programs of four warps share a processor, so that one multiplies while another writes."""


def takes(net: Network, rows: int) -> bool:
    """Whether layers are launches of their own: in 16 bits, without layer norm, wide, with rows enough."""
    return rows >= ROWS and net.dtype.itemsize == 2 and net.eps == 0 and max(net.sizes[1:-1], default=0) >= WIDE


def _tiles(width: int, depth: int) -> dict[str, int]:
    return {"ROWS": TILES.rows, "COLS": min(TILES.cols, padded(width)), "DEPTH": min(TILES.depth, padded(depth))}


def _of_layer(units: Tensor, net: Network, layer: int, members: int, rows: int) -> Tensor:
    """Units ``[E, B, H]`` of a hidden layer, counted from 0, in what is kept."""
    width, height = net.sizes[layer + 1], net.offsets[-1] * rows
    return units[net.offsets[layer] * rows :].as_strided((members, rows, width), (height, width, 1))


def _grid(rows: int, width: int, tiles: dict[str, int], members: int) -> tuple[int, int]:
    return triton.cdiv(rows, tiles["ROWS"]) * triton.cdiv(width, tiles["COLS"]), members


def forward(
    x: Tensor, net: Network, params: tuple[tuple[Tensor, ...], ...], members: int, sets: int, inner: bool, save: bool
) -> tuple[Tensor, Kept]:
    """Arguments and results of :func:`torchrl_perf.kernels.members_launch.forward`."""
    rows, every, layers = x.shape[1], members * sets, len(net.sizes) - 1
    weights, biases = params[:2]
    y, keeps = x.new_empty(every, rows, net.sizes[-1]), save and net.keeps_input
    units = x.new_empty(every * net.offsets[-1] * rows, dtype=net.dtype)
    inputs = torch.empty_like(units) if keeps else units
    below, share = x, every // x.shape[0]
    for layer in range(layers):
        depth, width = net.sizes[layer : layer + 2]
        is_last = layer == layers - 1
        of_w, of_b = (tuple(group[layer + layers * n] for n in range(sets)) for group in (weights, biases))
        out = y if is_last else _of_layer(units, net, layer, every, rows)
        kept = inputs if is_last else _of_layer(inputs, net, layer, every, rows)
        tiles = _tiles(width, depth)
        launch(
            up_kernel, _grid(rows, width, tiles, every),
            (below, of_w, of_b, out, kept, rows, below.stride(0), below.stride(1), out.stride(0)),
            {
                "K": depth, "N": width, "SPLIT": members, "SETS": sets, "SHARE": share, "INNER": inner, **tiles,
                "ACT": ACTIVATIONS[net.activation], "IS_LAST": is_last, "KEEP_Z": keeps and not is_last,
                "PRECISION": _last(net) if is_last else net.precision, "FAST": not triton.knobs.runtime.interpret,
            },
            num_warps=TILES.warps, num_stages=TILES.stages,
        )  # fmt: skip
        below, share = out, 1
    return y, Kept(units, inputs, y, rows)


def backward(
    g: Tensor, net: Network, params: tuple[tuple[Tensor, ...], ...], kept: Kept, inner: bool, needs_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results of :func:`torchrl_perf.kernels.members_launch.backward`."""
    members, rows = g.shape[:2]
    height, layers, weights = kept.height, len(net.sizes) - 1, params[0]
    d = kept.hidden.new_empty(members * net.offsets[-1] * height)
    dx = g.new_empty(members if needs_x else 0, rows, net.sizes[0])
    above = g
    for layer in range(layers - 1, -1 if needs_x else 0, -1):
        depth, width = net.sizes[layer + 1], net.sizes[layer]
        is_last, is_input = layer == layers - 1, layer == 0
        h, z, out = (
            dx if is_input else _of_layer(units, net, layer - 1, members, height)
            for units in (kept.hidden, kept.inputs, d)
        )
        tiles = _tiles(width, depth)
        launch(
            down_kernel, _grid(rows, width, tiles, members),
            (above, (weights[layer],), h, z, out, rows, above.stride(0), above.stride(1), h.stride(0), out.stride(0)),
            {
                "K": depth, "N": width, "INNER": inner, **tiles, "ACT": ACTIVATIONS[net.activation],
                "IS_INPUT": is_input, "KEEP_Z": net.keeps_input and not is_input,
                "PRECISION": _last(net) if is_last else net.precision,
            },
            num_warps=TILES.warps, num_stages=TILES.stages,
        )  # fmt: skip
        above = out
    return d, d, dx
