"""Launches of perceptrons of one shape on many rows, layer by layer.

What is kept lies as :mod:`torchrl_perf.kernels.members_launch` keeps it, whose gradients of the parameters serve here,
too. Import this module only where Triton is.
"""

from typing import Any, Literal

import torch
import triton
from torch import Tensor

from torchrl_perf.kernels.activations import ACTIVATIONS
from torchrl_perf.kernels.chain_launch import Network, padded
from torchrl_perf.kernels.launch import launch
from torchrl_perf.kernels.layered import down_kernel, finish_kernel, slope_kernel, up_kernel
from torchrl_perf.kernels.members_launch import Kept, Tiles, _last

__all__ = ["ROWS", "WAY", "backward", "forward", "takes"]

WAY: Literal["own", "cublas", "none"] = "own"
"""Whose the products between hidden layers are; ``"none"`` leaves all rows to the kernels of all layers."""
ROWS = 16_384
"""Rows from which a layer fills the device."""
PRECISIONS = ("bf16", "fp16")
"""Precisions that layers are launches of their own in."""
WIDE = 128
"""Widths of both sides from which a product may be cuBLAS's."""
BLOCK = 2048
"""Numbers of a program that goes over a layer."""
TILES = Tiles(128, 128, 64, 4, 3)
"""Of products; several programs of four warps share a processor, so that one multiplies while another writes."""


def takes(net: Network, rows: int) -> bool:
    """Whether layers are launches of their own: in these precisions, without layer norm, with rows enough."""
    return WAY != "none" and rows >= ROWS and net.precision in PRECISIONS and net.eps == 0


def _tiles(net: Network, width: int, depth: int) -> dict[str, int]:
    deep = TILES.depth * 2 // net.dtype.itemsize  # as many bytes
    return {"ROWS": TILES.rows, "COLS": min(TILES.cols, padded(width)), "DEPTH": min(deep, padded(depth))}


def _is_cublas(width: int, depth: int) -> bool:
    return WAY == "cublas" and min(width, depth) >= WIDE


def _of_layer(units: Tensor, net: Network, layer: int, members: int, rows: int) -> Tensor:
    """Units ``[E, B, H]`` of a hidden layer, counted from 0, in what is kept."""
    width, height = net.sizes[layer + 1], net.offsets[-1] * rows
    return units.as_strided((members, rows, width), (height, width, 1), net.offsets[layer] * rows)


def _grid(rows: int, width: int, tiles: dict[str, int], members: int) -> tuple[int, int]:
    return triton.cdiv(rows, tiles["ROWS"]) * triton.cdiv(width, tiles["COLS"]), members


def _shared(net: Network) -> dict[str, Any]:
    return {"ACT": ACTIVATIONS[net.activation], "KEEP_Z": net.keeps_input}


def forward(
    x: Tensor, net: Network, params: tuple[tuple[Tensor, ...], ...], members: int, sets: int, inner: bool, save: bool
) -> tuple[Tensor, Kept]:
    """Arguments and results of :func:`torchrl_perf.kernels.members_launch.forward`."""
    rows, every, layers = x.shape[1], members * sets, len(net.sizes) - 1
    weights, biases = params[:2]
    y = x.new_empty(every, rows, net.sizes[-1])
    units = x.new_empty(every * net.offsets[-1] * rows, dtype=net.dtype)
    keeps = save and net.keeps_input
    inputs = torch.empty_like(units) if keeps else units
    shared = {"SPLIT": members, "SETS": sets, **_shared(net), "KEEP_Z": keeps, "FAST": not _is_interpreted()}
    below, share = x, every // x.shape[0]
    for layer in range(layers):
        depth, width = net.sizes[layer : layer + 2]
        is_last = layer == layers - 1
        of_w, of_b = (tuple(group[layer + layers * n] for n in range(sets)) for group in (weights, biases))
        out = y if is_last else _of_layer(units, net, layer, every, rows)
        kept = inputs if is_last else _of_layer(inputs, net, layer, every, rows)
        if layer > 0 and not is_last and _is_cublas(width, depth):
            for number, weight in enumerate(of_w):
                part = slice(number * members, (number + 1) * members)
                matrix = weight.view(members, *weight.shape[-2:])
                torch.bmm(below[part], matrix.mT if inner else matrix, out=out[part])
            launch(
                finish_kernel, (triton.cdiv(rows * width, BLOCK), every),
                (out, of_b, kept, rows * width, out.stride(0)), {"N": width, **_order(shared, "finish")},
                num_warps=8,
            )  # fmt: skip
        else:
            tiles = _tiles(net, width, depth)
            launch(
                up_kernel, _grid(rows, width, tiles, every),
                (below, of_w, of_b, out, kept, rows, below.stride(0), below.stride(1), out.stride(0)),
                {
                    "K": depth, "N": width, "SPLIT": members, "SETS": sets, "SHARE": share, "INNER": inner, **tiles,
                    "ACT": shared["ACT"], "IS_LAST": is_last, "KEEP_Z": keeps and not is_last,
                    "PRECISION": _last(net) if is_last else net.precision, "FAST": shared["FAST"],
                },
                num_warps=TILES.warps, num_stages=TILES.stages,
            )  # fmt: skip
        below, share = out, 1
    return y, Kept(units, inputs, y, rows)


def _is_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def _order(shared: dict[str, Any], kind: str) -> dict[str, Any]:
    """Constants of a kernel that goes over a layer."""
    names = ("SPLIT", "SETS") if kind == "finish" else ()
    last = ("ACT", "KEEP_Z", "FAST") if kind == "finish" else ("ACT", "KEEP_Z")
    return {**{name: shared[name] for name in names}, "BLOCK": BLOCK, **{name: shared[name] for name in last}}


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
        weight = weights[layer]
        h, z, out = (
            dx if is_input else _of_layer(units, net, layer - 1, members, height)
            for units in (kept.hidden, kept.inputs, d)
        )
        if not is_last and not is_input and _is_cublas(width, depth):
            matrix = weight.view(members, *weight.shape[-2:])
            torch.bmm(above[:, :rows], matrix if inner else matrix.mT, out=out[:, :rows])
            launch(
                slope_kernel, (triton.cdiv(rows * width, BLOCK), members),
                (out, h, z, rows * width, out.stride(0), h.stride(0)), _order(_shared(net), "slope"), num_warps=8,
            )  # fmt: skip
        else:
            tiles = _tiles(net, width, depth)
            launch(
                down_kernel, _grid(rows, width, tiles, members),
                (above, (weight,), h, z, out, rows, above.stride(0), above.stride(1), h.stride(0), out.stride(0)),
                {
                    "K": depth, "N": width, "INNER": inner, **tiles, "ACT": ACTIVATIONS[net.activation],
                    "IS_INPUT": is_input, "KEEP_Z": net.keeps_input and not is_input,
                    "PRECISION": _last(net) if is_last else net.precision,
                },
                num_warps=TILES.warps, num_stages=TILES.stages,
            )  # fmt: skip
        above = out
    return d, d, dx
