"""Tiles of the perceptrons' kernels follow from the shape."""

import pytest

pytest.importorskip("triton")

from torchrl_perf.kernels.chain_blocks import ROOM, blocks_for
from torchrl_perf.kernels.chain_launch import Blocks, Network

SMALL = Network((4, 256, 256, 2), "tanh", 0.0, "tf32")
NARROW = Network((4, 64, 32, 2), "silu", 0.0, "bf16")
ROBOT = Network((48, 512, 256, 128, 12), "elu", 0.0, "tf32")


@pytest.mark.parametrize(
    ("direction", "net", "rows", "room", "expected"),
    [
        ("forward", SMALL, 65_536, ROOM, Blocks(128, 256, 32, 8, 3, pair=True)),
        ("backward", SMALL, 65_536, ROOM, Blocks(64, 256, 32, 4, 2, pair=True)),
        ("forward", SMALL._replace(precision="bf16"), 65_536, ROOM, Blocks(128, 256, 64, 8, 3, pair=True)),
        ("forward", SMALL._replace(sizes=(4, 64, 32, 2)), 65_536, ROOM, Blocks(128, 256, 32, 8, 3, pair=True)),
        ("forward", NARROW, 65_536, ROOM, Blocks(128, 256, 64, 8, 3, pair=True)),
        ("backward", NARROW, 65_536, ROOM, Blocks(64, 256, 64, 4, 2, pair=True)),
        ("forward", SMALL, 2048, ROOM, Blocks(16, 256, 32, 8, 3)),
        ("backward", SMALL, 2048, ROOM, Blocks(16, 128, 32, 4, 3)),
        ("forward", ROBOT, 24_576, ROOM, Blocks(64, 128, 32, 4, 3, 168)),
        ("backward", ROBOT._replace(precision="fp16"), 24_576, ROOM, Blocks(64, 128, 64, 4, 3, 168)),
        ("forward", ROBOT, 4096, ROOM, Blocks(32, 256, 32, 8, 3)),
        ("backward", ROBOT, 4096, ROOM, Blocks(32, 128, 32, 4, 3)),
        ("forward", SMALL._replace(eps=1e-5), 65_536, ROOM, Blocks(64, 128, 32, 4, 3)),
        ("forward", SMALL._replace(sizes=(4, 2)), 65_536, ROOM, Blocks(64, 128, 32, 4, 3, 168)),
        ("forward", SMALL, 65_536, ROOM // 2, Blocks(32, 64, 32, 4, 2)),
        ("forward", SMALL._replace(precision="ieee"), 65_536, ROOM, Blocks(32, 64, 32, 4, 2)),
    ],
)
def test_the_rule(direction, net, rows, room, expected):
    assert blocks_for(direction, net, rows, room) == expected
