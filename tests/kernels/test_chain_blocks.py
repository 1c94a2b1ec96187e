"""Tiles are measured once for a shape of many rows, and not for few, without a timer or while a graph is captured."""

import pytest
import torch

pytest.importorskip("triton")

from torchrl_perf.kernels import chain_blocks
from torchrl_perf.kernels.chain_launch import Network

NET = Network((4, 256, 256, 2), "tanh", 0.0, "tf32")


class OnCuda(torch.Tensor):
    """A tensor that says that it is on CUDA."""

    @property
    def is_cuda(self):
        return True


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(chain_blocks, "TABLE", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return torch.ones(chain_blocks.MANY_ROWS, 4).as_subclass(OnCuda)


def timer_of(times):
    asked = []

    def timer(call):
        blocks = call()
        asked.append(blocks)
        if blocks.rows not in times:
            raise type("OutOfResources", (Exception,), {})
        return times[blocks.rows]

    return timer, asked


@pytest.mark.parametrize(("wide", "expected"), [(50.0, 128), (95.0, 64), (150.0, 64)])
def test_the_fastest_is_kept_if_it_is_clearly_faster(rows, wide, expected):
    timer, asked = timer_of({64: 100.0, 128: wide})
    chosen = chain_blocks.blocks_for("forward", NET, rows, lambda blocks: blocks, timer)
    assert chosen.rows == expected and len(asked) == len(chain_blocks.LARGE)
    assert chain_blocks.blocks_for("forward", NET, rows, lambda blocks: blocks, timer) == chosen
    assert len(asked) == len(chain_blocks.LARGE)
    (choice,) = chain_blocks.TABLE.values()
    assert choice.blocks == chosen and min(choice.microseconds.values()) == min(100.0, wide)
    # another direction, and one output less, which changes nothing
    chain_blocks.blocks_for("backward", NET, rows, lambda blocks: blocks, timer)
    chain_blocks.blocks_for("forward", NET._replace(sizes=(4, 256, 256, 1)), rows, lambda blocks: blocks, timer)
    assert len(chain_blocks.TABLE) == 2


def test_tiles_that_do_not_fit_are_left_out(rows):
    timer, _ = timer_of({128: 50.0})
    assert chain_blocks.blocks_for("forward", NET, rows, lambda blocks: blocks, timer).rows == 128


def test_other_errors_are_not_hidden(rows):
    def broken(call):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        chain_blocks.blocks_for("forward", NET, rows, lambda blocks: blocks, broken)


def test_without_a_measurement_the_rule_decides(rows, monkeypatch):
    timer, asked = timer_of({64: 100.0, 128: 1.0})

    def run(blocks):
        return blocks

    assert chain_blocks.blocks_for("forward", NET, rows[:100], run, timer).rows == 16
    assert chain_blocks.blocks_for("forward", NET, rows, run, None) == chain_blocks.LARGE[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chain_blocks.blocks_for("forward", NET, rows, run, timer) == chain_blocks.LARGE[0]
    assert not asked and not chain_blocks.TABLE
