"""Tiles of the kernels of perceptrons: by rule for few rows, and the fastest of some, measured once, for many.

Import this module only where Triton is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchrl_perf.kernels.chain_launch import Blocks, Network, padded

__all__ = ["MANY_ROWS", "TABLE", "Choice", "blocks_for"]

MANY_ROWS = 4096
"""Rows from which tiles are measured."""
GAIN = 0.9
"""Share of the rule's time below which others are taken: noise must not choose, since sums over other tiles of rows are
rounded differently."""
LARGE = (
    Blocks(64, 128, 32, 8, 3, 128),
    Blocks(64, 256, 32, 8, 3, pair=True),
    Blocks(128, 256, 32, 8, 3, pair=True),
    Blocks(128, 128, 32, 8, 3),
)
"""The first is the rule's."""


class Choice(NamedTuple):
    """Tiles that were chosen for a shape."""

    blocks: Blocks
    microseconds: dict[Blocks, float]
    """Of those that were tried; what does not fit on the device is missing."""


TABLE: dict[tuple[Any, ...], Choice] = {}
"""What was measured in this process: by direction, device, hidden widths, inputs and outputs rounded up, activation,
layer norm, precision and rows."""

Timer = Callable[[Callable[[], Any]], float]


def blocks_for(
    direction: str, net: Network, x: torch.Tensor, run: Callable[[Blocks], Any], timer: Timer | None
) -> Blocks:
    """Tiles of a launch.

    They are measured at the first call for a shape of at least :data:`MANY_ROWS` rows, outside of graphs: the warm-up
    of a capture decides for it, and a shape that only a graph has seen follows the rule.

    Args:
        direction: ``"forward"``, ``"inference"`` or ``"backward"``.
        net: the perceptron.
        x: the input, ``[B, IN]``.
        run: the launch.
        timer: microseconds of a call; None follows the rule.
    """
    rows = x.shape[0]
    if rows < MANY_ROWS:
        tall = 16 if rows <= 2048 else 32
        return Blocks(tall, 128, 32, 4, 3)
    key = (direction, x.device, *_shape(net), rows)
    known = TABLE.get(key)
    if known is not None:
        return known.blocks
    candidates = [_deeper(blocks) if net.dtype.itemsize == 2 else blocks for blocks in LARGE]
    if timer is None or not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return candidates[0]
    times: dict[Blocks, float] = {}
    for blocks in candidates:
        try:
            times[blocks] = timer(lambda blocks=blocks: run(blocks))
        except Exception as error:  # Triton's own class, which its releases move
            if "OutOfResources" not in type(error).__name__:
                raise
    fastest = min(times, key=times.__getitem__)
    rule = times.get(candidates[0])
    chosen = fastest if rule is None or times[fastest] < GAIN * rule else candidates[0]
    TABLE[key] = Choice(chosen, times)
    return chosen


def _deeper(blocks: Blocks) -> Blocks:
    """The same tiles in bytes for numbers of 16 bits."""
    return blocks._replace(depth=2 * blocks.depth)


def _shape(net: Network) -> tuple[Any, ...]:
    """What tiles depend on: networks that differ in a few outputs share a choice."""
    inputs, *hidden, outputs = net.sizes
    return padded(inputs), *hidden, padded(outputs), net.activation, net.eps > 0, net.precision
