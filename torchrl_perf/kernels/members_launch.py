"""Launches of the kernels of several perceptrons of one shape.

Import this module only where Triton is.
"""

import itertools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from torchrl_perf.kernels.activations import ACTIVATIONS
from torchrl_perf.kernels.chain_launch import Network, padded
from torchrl_perf.kernels.launch import launch
from torchrl_perf.kernels.members import backward_kernel, forward_kernel, gradients_kernel, total_kernel

__all__ = ["MANY_ROWS", "Kept", "Tiles", "backward", "forward", "gradients", "tiles_of"]

MANY_ROWS = 4096
"""Rows from which products are made by programs of many rows, with weights that are converted beforehand."""
PROGRAMS = 528
"""Programs of gradients from many rows: four for each multiprocessor of an H100."""
BLOCK = 256
"""Numbers of a program that adds parts of gradients."""
WIDEST_NORM = 1024
"""Units of a layer that are normalised in the registers of a program."""


class Tiles(NamedTuple):
    """Tiles of a launch: rows of a program, units and depth of a product, warps and stages of loads ahead."""

    rows: int = 16
    cols: int = 128
    depth: int = 32
    warps: int = 4
    stages: int = 3
    splits: int = 1
    """Parts of the sums over rows, each of a program of its own."""


class Kept(NamedTuple):
    """What a forward pass keeps for the backward pass, member after member and layer after layer."""

    hidden: Tensor
    """Units, ``[E * H * B]``."""
    inputs: Tensor
    """What the activations were applied to, or normalised units before gain and shift; any tensor without both."""
    scale: Tensor
    """What normalised units were multiplied with, ``[E * (L - 1) * B]``; any tensor without layer norm."""
    height: int
    """B."""


def tiles_of(way: str, net: Network, rows: int, members: int = 1) -> Tiles:
    """Tiles of the launches ``"forward"``, ``"backward"`` and ``"gradients"``, by a rule of the shape.

    Args:
        way: which launch.
        net: the perceptron.
        rows: B.
        members: E.
    """
    deeper = 2 if net.dtype.itemsize == 2 else 1
    if way == "gradients":
        return _tiles_of_gradients(net, rows, members, deeper)
    if net.precision == "ieee":
        return Tiles(16, 64, 32, 4, 2)
    if net.eps:
        return Tiles(16, 256, 16 * deeper, 8, 2)
    if rows >= MANY_ROWS:
        return Tiles(64, 128, 32 * deeper, 4, 4) if way == "forward" else Tiles(128, 256, 32 * deeper, 8, 3)
    return Tiles(16, 256, 32 * deeper, 4, 3)


def _tiles_of_gradients(net: Network, rows: int, members: int, deeper: int) -> Tiles:
    if rows < MANY_ROWS:
        return Tiles(32 * deeper, 32, 64, 4, 3)
    wide = Tiles(32 * deeper, 128, 128, 8, 3)
    tiles = _places(net, members, wide, _apart(net, rows)).tiles[-1] * members
    return wide._replace(splits=max(1, min(32, PROGRAMS // tiles, rows // (16 * wide.rows))))


def _products(net: Network, widths: tuple[int, ...], depths: tuple[int, ...], tiles: Tiles) -> dict[str, Any]:
    """Constants of the products of a launch; of a layer that is normalised all units are made at once."""
    whole = net.eps > 0
    cols = tuple(padded(width) if whole else min(tiles.cols, padded(width)) for width in widths)
    return {
        "SIZES": net.sizes, "OFFSETS": net.offsets, "ROWS": tiles.rows, "COLS": cols,
        "DEPTHS": tuple(min(tiles.depth, padded(depth)) for depth in depths),
    }  # fmt: skip


def _last(net: Network) -> str:
    """Precision of the last layer, whose values 16 bits would make coarse."""
    return "tf32" if net.precision in ("bf16", "fp16") else net.precision


def forward(
    x: Tensor, net: Network, params: tuple[tuple[Tensor, ...], ...], members: int, sets: int, inner: bool, save: bool,
    tiles: Tiles,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """Outputs ``[E, B, OUT]`` of E members, and what backward needs.

    Args:
        x: ``[G, B, IN]`` float32, dense rows; each G-th part of the members reads one of the inputs.
        net: the perceptron.
        params: weights, biases, gains and shifts of the layers, those of a second set behind those of the first.
        members: of one set.
        sets: 1 or 2.
        inner: whether weights lie as ``[OUT, IN]`` and not ``[IN, OUT]``.
        save: whether there will be a backward pass.
        tiles: of this launch.
    """
    rows, every, hidden = x.shape[1], members * sets, net.offsets[-1]
    y = x.new_empty(every, rows, net.sizes[-1])
    units = x.new_empty(every * hidden * rows, dtype=net.dtype)
    keeps = save and (net.keeps_input or net.eps > 0)
    inputs = torch.empty_like(units) if keeps else units
    scale = x.new_empty(every * (len(net.sizes) - 2) * rows) if save and net.eps else y
    launch(
        forward_kernel, (triton.cdiv(rows, tiles.rows), every),
        (x, *params, y, units, inputs, scale, rows, x.stride(0), x.stride(1)),
        {
            **_products(net, net.sizes[1:], net.sizes[:-1], tiles), "SPLIT": members, "SETS": sets,
            "SHARE": every // x.shape[0], "INNER": inner, "ACT": ACTIVATIONS[net.activation], "NORM": net.eps > 0,
            "EPS": net.eps, "KEEP_Z": net.keeps_input, "SAVE": save, "PRECISION": net.precision, "LAST": _last(net),
            "FAST": net.precision != "ieee" and not triton.knobs.runtime.interpret,
        },
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y, Kept(units, inputs, scale, rows)


def backward(
    g: Tensor, net: Network, params: tuple[tuple[Tensor, ...], ...], kept: Kept, inner: bool, needs_x: bool,
    tiles: Tiles,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients before the activations, of normalised units, and of the inputs ``[E, B, IN]``.

    Args:
        g: of the outputs of the first E members and B rows, ``[E, B, OUT]`` float32 with dense rows.
        net: the perceptron.
        params: those of the first set, as for :func:`forward`.
        kept: of the forward pass.
        inner: as for :func:`forward`.
        needs_x: whether the gradient of the inputs is asked for; else it is empty.
        tiles: of this launch.
    """
    members, rows = g.shape[:2]
    weights, _, gains, shifts = params
    d = kept.hidden.new_empty(members * net.offsets[-1] * kept.height)
    e = torch.empty_like(d) if net.eps else d
    dx = g.new_empty(members if needs_x else 0, rows, net.sizes[0])
    launch(
        backward_kernel, (triton.cdiv(rows, tiles.rows), members),
        (
            g, weights, gains, shifts, kept.hidden, kept.inputs, kept.scale, d, e, dx, rows, kept.height, g.stride(0),
            g.stride(1),
        ),
        {
            **_products(net, net.sizes, net.sizes[1:], tiles), "INNER": inner, "ACT": ACTIVATIONS[net.activation],
            "NORM": net.eps > 0, "KEEP_Z": net.keeps_input, "NEEDS_X": needs_x, "PRECISION": net.precision,
            "LAST": _last(net),
        },
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return d, e, dx


class _Places(NamedTuple):
    """Where the tiles of the gradients' launch, and their squares, are."""

    cols: tuple[int, ...]
    depths: tuple[int, ...]
    tiles: tuple[int, ...]
    """The first tile of each layer, and how many there are."""
    counts: tuple[int, ...]
    """Squares of each parameter of a member."""
    places: tuple[int, ...]
    """The first square of each parameter of all members, and how many there are."""


def _apart(net: Network, rows: int) -> tuple[bool, ...]:
    """Layers the gradients of whose weights are cuBLAS's: wide ones from many rows."""
    is_many, last = rows >= MANY_ROWS and net.dtype.itemsize == 2, len(net.sizes) - 2
    # between hidden layers, both in 16 bits
    return tuple(is_many and 0 < n < last and min(p) >= 128 for n, p in enumerate(itertools.pairwise(net.sizes)))


def _places(net: Network, members: int, tiles: Tiles, apart: tuple[bool, ...]) -> _Places:
    cols = tuple(min(tiles.cols, padded(width)) for width in net.sizes[1:])
    depths = tuple(min(tiles.depth, padded(width)) for width in net.sizes[:-1])
    counts, of_layers = [], []
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(net.sizes)):
        down, across = triton.cdiv(outputs, cols[layer]), triton.cdiv(inputs, depths[layer])
        of_layers.append(down if apart[layer] else down * across)
        vectors = 3 if net.eps and layer < len(net.sizes) - 2 else 1
        counts += [down * across, *[down] * vectors]
    firsts = tuple(itertools.accumulate(of_layers, initial=0))
    return _Places(
        cols, depths, firsts, tuple(counts), tuple(itertools.accumulate([members * n for n in counts], initial=0))
    )


def gradients(
    x: Tensor, g: Tensor, d: Tensor, e: Tensor, net: Network, params: tuple[tuple[Tensor, ...], ...], kept: Kept,
    inner: bool, tiles: Tiles,
) -> tuple[tuple[tuple[Tensor, ...], ...], Tensor, tuple[int, ...]]:  # fmt: skip
    """Gradients of all parameters, in the form of ``params``, sums of squares of parts of them, and whose those are.

    Args:
        x: as for :func:`forward`, of the first set.
        g: as for :func:`backward`.
        d: what :func:`backward` gave.
        e: likewise.
        net: the perceptron.
        params: those of the first set, which tell the shapes.
        kept: of the forward pass.
        inner: as for :func:`forward`.
        tiles: of this launch.

    Returns:
        Beside gradients and squares the first square of each parameter, layer after layer, and how many there are.
    """
    members, rows = g.shape[:2]
    apart = _apart(net, rows)
    places = _places(net, members, tiles, apart)
    learnt = params if net.eps else params[:2]
    parts = tuple(
        tuple(
            p.new_empty(1 if group is params[0] and apart[n] else tiles.splits, *p.shape) for n, p in enumerate(group)
        )
        for group in learnt
    )
    for layer in [n for n, is_apart in enumerate(apart) if is_apart]:
        _products_of_rows(
            layer, d, kept, net, inner, parts[0][layer][0].view(members, *params[0][layer].shape[-2:]), rows
        )
    squares = g.new_empty(places.places[-1])
    launch(
        gradients_kernel, (places.tiles[-1], members, tiles.splits),
        (
            x, g, d, e, kept.hidden, kept.inputs, *parts, *params[len(learnt) :], squares, rows, kept.height,
            x.stride(0), x.stride(1), g.stride(0), g.stride(1),
        ),
        {
            "SIZES": net.sizes, "OFFSETS": net.offsets, "TILES": places.tiles, "PLACES": places.places,
            "COUNTS": places.counts, "SHARE": members // x.shape[0], "INNER": inner, "ROWS": tiles.rows,
            "COLS": places.cols, "DEPTHS": places.depths, "SPLITS": tiles.splits, "APART": apart,
            "NORM": net.eps > 0, "PRECISION": net.precision, "LAST": _last(net),
        },
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if tiles.splits > 1 or any(apart):
        return _totals(parts, len(net.sizes) - 1)
    return tuple(tuple(part[0] for part in group) for group in parts), squares, places.places


def _products_of_rows(
    layer: int, d: Tensor, kept: Kept, net: Network, inner: bool, out: Tensor, rows: int
) -> None:  # fmt: skip
    """Gradients of the weights of a hidden layer with a hidden layer below, ``[E, OUT, IN]`` or ``[E, IN, OUT]``."""
    inputs, outputs = net.sizes[layer], net.sizes[layer + 1]
    for member in range(out.shape[0]):
        above, below = (
            units.narrow(0, (member * net.offsets[-1] + net.offsets[n]) * kept.height, rows * width).view(rows, width)
            for units, n, width in ((d, layer, outputs), (kept.hidden, layer - 1, inputs))
        )
        left, right = (above, below) if inner else (below, above)
        if out.is_cuda:
            out[member].copy_(torch.mm(left.t(), right, out_dtype=torch.float32))
        else:
            torch.mm(left.float().t(), right.float(), out=out[member])


def _totals(
    parts: tuple[tuple[Tensor, ...], ...], layers: int
) -> tuple[tuple[tuple[Tensor, ...], ...], Tensor, tuple[int, ...]]:
    """What :func:`gradients` returns, from parts of the sums over rows."""
    found = tuple(tuple(torch.empty_like(part[0]) for part in group) for group in parts)
    pairs = [(group[n], out[n]) for n in range(layers) for group, out in zip(parts, found, strict=True)
             if n < len(group)]  # fmt: skip
    sizes = tuple(out.numel() for _, out in pairs)
    first = tuple(itertools.accumulate([triton.cdiv(size, BLOCK) for size in sizes], initial=0))
    squares = parts[0][0].new_empty(first[-1])
    splits = tuple(part.shape[0] for part, _ in pairs)
    launch(
        total_kernel, (first[-1],), (squares, tuple(part for part, _ in pairs), tuple(out for _, out in pairs)),
        {
            "FIRST": first[:-1], "SIZES": sizes, "SPLITS": splits, "MOST": triton.next_power_of_2(max(splits)),
            "BLOCK": BLOCK,
        },
        num_warps=4,
    )  # fmt: skip
    return found, squares, first
