"""Tiles of the kernels of perceptrons, by shape. Import this module only where Triton is."""

from torchrl_perf.kernels.chain_launch import Blocks, Network


def forward_blocks(net: Network, rows: int, keep: bool, processors: int) -> Blocks:
    """Tiles of a forward pass."""
    if rows >= 64 * processors:
        return Blocks(64, 256, 32 if net.dtype.itemsize == 4 else 64, 8, 3)
    return Blocks(32 if rows > 16 * processors else 16, 128, 32, 4, 3)


def backward_blocks(net: Network, rows: int, processors: int) -> Blocks:
    """Tiles of a backward pass."""
    return forward_blocks(net, rows, True, processors)
