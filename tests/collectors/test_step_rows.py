"""Rows of a rollout's memory: where they begin, and what the buffers hold of them."""

import pytest
import torch

from torchrl_perf.collectors.step_rows import StepRows

LIKES = (torch.zeros(4, 1, dtype=torch.bool), torch.zeros(4, 3), torch.zeros(4), torch.zeros((), dtype=torch.int64))
CPU = torch.device("cpu")


@pytest.mark.parametrize("aligned", [False, True])
def test_buffers_hold_what_rows_were_given(aligned):
    rows = StepRows(LIKES, 5, CPU, aligned=aligned)
    for step in range(5):
        for row, like in zip(rows.rows[step], LIKES, strict=True):
            assert row.shape == like.shape
            row.copy_(torch.full_like(like, step + 1))
    rows.settle()
    for buffer, like in zip(rows.buffers, LIKES, strict=True):
        assert buffer.is_contiguous()
        expected = torch.stack([torch.full_like(like, step + 1) for step in range(5)])
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("size", [1, 3, 4, 8, 16])
def test_aligned_rows_begin_at_multiples_of_16_bytes(size):
    likes = [torch.zeros(size, dtype=dtype) for dtype in (torch.bool, torch.float32, torch.int64)]
    rows = StepRows(likes, 4, CPU, aligned=True)
    for step in rows.rows:
        assert all(row.storage_offset() * row.element_size() % 16 == 0 for row in step)


def test_rows_that_fit_are_the_buffers_own():
    rows = StepRows([torch.zeros(4, 4)], 3, CPU, aligned=True)
    rows.rows[1][0].fill_(2.0)
    assert rows.buffers[0][1].sum() == 32.0
