"""Tiles of the kernels of perceptrons, by a rule of the shape: the same in every run and on every rank.

Of those measured on an H200 (14 kinds, 256-256 and 512-256-128, 2,048 to 65,536 rows) they are the fastest, or within a
tenth of it. Import this module only where Triton is.
"""

from torchrl_perf.kernels.chain_launch import Blocks, Network, padded

__all__ = ["ROOM", "blocks_for"]

ROOM = 200 * 1024
"""Bytes of shared memory of a program that the large tiles need: those of an H100; other cards get small ones."""
MANY_ROWS = 8192
"""Rows from which the device is full of programs of 64 rows."""


def blocks_for(direction: str, net: Network, rows: int, room: int) -> Blocks:
    """Tiles of a launch.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        net: the perceptron.
        rows: B.
        room: bytes of shared memory that a program may have.
    """
    if room < ROOM or net.precision == "ieee":
        return Blocks(32, 64, 32, 4, 2)
    blocks = _few(direction, net, rows) if rows < MANY_ROWS else _many(direction, net)
    return blocks._replace(depth=2 * blocks.depth) if net.dtype.itemsize == 2 else blocks


def _few(direction: str, net: Network, rows: int) -> Blocks:
    if rows > 2048 and direction == "forward" and max(net.sizes[1:-1], default=0) > 256:
        return Blocks(32, 256, 32, 8, 3)
    if rows > 2048:
        return Blocks(32, 128, 32, 4, 3)
    if direction == "forward" and max(net.sizes[1:-1], default=0) <= 256:
        return Blocks(16, 256, 32, 8, 3)
    return Blocks(16, 128, 32, 4, 3)


def _many(direction: str, net: Network) -> Blocks:
    inputs, *hidden, outputs = net.sizes
    if net.eps:
        return Blocks(64, 128, 32, 4, 3)
    if len(hidden) > 1 and padded(inputs) == padded(outputs) == 16:  # both are on chip, whole, as are 256 units
        if direction == "forward" and hidden[1] <= 256:
            return Blocks(128, 256, 32, 8, 3, pair=True)
        if direction == "backward" and hidden[-2] <= 256:
            return Blocks(64, 256, 32, 4, 2, pair=True)
    return Blocks(64, 128, 32, 4, 3, registers=168)
